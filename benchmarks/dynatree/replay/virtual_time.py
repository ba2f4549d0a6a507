"""An event loop in virtual time: a wait advances the loop's clock and takes no real time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine and return its result; it must not wait for anything outside the loop."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)


class _Selector(selectors.SelectSelector):
    """A selector that does not wait: it moves the clock to the time at which the wait would end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock by the timeout; no event ever comes from outside."""
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
        """Virtual seconds since the loop was created."""
        return self._virtual.now
