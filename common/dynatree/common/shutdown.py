"""Handling of SIGINT and SIGTERM by a ready service, and removal of unfinished folders when one ends early."""

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
    """Register a folder as unfinished while the context lives, so that `remove_unfinished` removes it."""
    _UNFINISHED.add(folder)
    try:
        yield
    finally:
        _UNFINISHED.discard(folder)


def remove_unfinished() -> None:
    """Remove the folders that are still unfinished; for a process that exits without other cleanup."""
    for folder in list(_UNFINISHED):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def on_shutdown(act: Callable[[int], object]) -> Iterator[None]:
    """While the context lives, call `act` with the signal's number on the running event loop at SIGINT or SIGTERM.

    The loop's own handlers are not used: a closing loop restores Python's default handlers, and these would raise an
    exception during the process's shutdown.
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
