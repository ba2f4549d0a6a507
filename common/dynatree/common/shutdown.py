"""Handling of signals by a service, and removal of unfinished folders when one ends early."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

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

    with _handled_by(handle, signal.SIGINT, signal.SIGTERM):
        yield


@contextmanager
def on_hangup(act: Callable[[], object]) -> Iterator[None]:
    """While the context lives, call `act` on the running event loop at SIGHUP.

    When the terminal of the process is closed, the system sends SIGHUP as well; it then acts like SIGTERM.
    """
    loop = asyncio.get_running_loop()
    with _hangup_handled_by(lambda: loop.call_soon_threadsafe(act)):
        yield


@contextmanager
def hangup_ignored() -> Iterator[None]:
    """While the context lives, SIGHUP only writes a warning to the log, unless the terminal was closed.

    Inside the context, `on_hangup` takes the signal over.
    """
    with _hangup_handled_by(lambda: log.warning("SIGHUP is ignored: the service is not ready")):
        yield


@contextmanager
def _hangup_handled_by(act: Callable[[], object]) -> Iterator[None]:
    terminal = sys.stderr.isatty()

    def handle(number: int, _: FrameType | None) -> None:
        if terminal and not sys.stderr.isatty():
            signal.raise_signal(signal.SIGTERM)
        else:
            act()

    with _handled_by(handle, signal.SIGHUP):
        yield


@contextmanager
def _handled_by(handle: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
