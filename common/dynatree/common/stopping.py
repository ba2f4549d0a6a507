"""How a service takes SIGINT and SIGTERM once it is ready, and what one leaves behind that is ended before."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_UNFINISHED: set[Path] = set()


@contextmanager
def unfinished(folder: Path) -> Iterator[None]:
    """While a folder is written, which is of no use before that is done: it goes if the process is ended meanwhile."""
    _UNFINISHED.add(folder)
    try:
        yield
    finally:
        _UNFINISHED.discard(folder)


def remove_unfinished() -> None:
    """Remove such folders, at the end of a process that puts nothing else in order."""
    for folder in list(_UNFINISHED):
        shutil.rmtree(folder, ignore_errors=True)


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
