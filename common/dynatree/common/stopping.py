"""How a service takes SIGINT and SIGTERM once it is ready."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_stop(act: Callable[[int], object]) -> Iterator[None]:
    """For as long as the context lives, either signal calls `act` with its number, on the running event loop.

    Not by the loop's own handlers: when it is closed they leave Python's, which would raise an exception in the midst
    of the process's end.
    """
    loop = asyncio.get_running_loop()

    def handle(number: int, _: FrameType | None) -> None:
        loop.call_soon_threadsafe(act, number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
