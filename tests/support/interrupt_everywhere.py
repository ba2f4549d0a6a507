"""Run as a program, `interrupt_everywhere.py ADDRESS`: interrupt the reading of a stream at every line that it runs.

Python may raise an interrupt between any two lines, of gRPC's code as well as of ours. Here a trace function raises it
at the first line of a stream's reading, then at the second, and so on. After each interrupt the client must still
answer and close.
"""

import faulthandler
import itertools
import sys
from types import FrameType
from typing import Any, Self

from dynatree.client import Client

_SECONDS = 120


class InterruptAt:
    """A trace function that raises KeyboardInterrupt at event number `point`, from 0, and then stops tracing."""

    def __init__(self, point: int) -> None:
        self._left = point
        self.where: tuple[str, int, str] | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Self:
        if event == "exception":  # Python itself would raise no interrupt here
            return self
        if self._left == 0:
            self.where = (frame.f_code.co_filename, frame.f_lineno, event)
            sys.settrace(None)
            raise KeyboardInterrupt
        self._left -= 1
        return self


def interrupted_at(address: str, point: int) -> tuple[str, int, str] | None:
    """Interrupt at one point; return its file, line and event, or None if the stream ended before it."""
    trace = InterruptAt(point)
    with Client(address) as client:
        try:
            with client.stream("Once") as stream:
                sys.settrace(trace)
                try:
                    for _ in stream:
                        pass
                finally:
                    sys.settrace(None)
        except KeyboardInterrupt:
            assert trace.where
        else:
            assert not trace.where, f"the interrupt was lost at {trace.where}"
        assert client.generate("Once").text == "Héllo"
    return trace.where


def main() -> None:
    """Interrupt at every point, and print the number of points."""
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    for point in itertools.count():
        if not interrupted_at(sys.argv[1], point):
            print(point)
            break


if __name__ == "__main__":
    main()
