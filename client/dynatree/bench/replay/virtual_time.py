"""An event loop in virtual time: waiting takes none, so what waits for seconds is simulated in no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns; nothing in it may wait for anything outside."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)


class _Selector(selectors.SelectSelector):
    """Waits for nothing: the clock is moved to when the wait would have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Nothing ever comes from outside."""
        if timeout is None:
            raise RuntimeError("everything waits, and nothing is about to happen")
        self.now += max(timeout, 0.0)
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves when there is nothing to do."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._virtual.now
