"""The single thread that runs a service's model work, so that the event loop stays responsive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LEFT: set[ModelThread] = set()  # threads that still have calls to run, and that nobody waits for


class ModelThread:
    """Runs calls one after another, in the order in which they were submitted.

    The call of a cancelled caller still runs to its end, and the caller's next call runs after it. So a session that is
    closed on cancellation closes only when no forward pass uses it any more.

    Models are loaded on this thread as well. OpenMP keeps a team of threads for every thread that ever ran a parallel
    region. Once all teams together have more threads than there are cores, the threads sleep after each region instead
    of spinning, and a forward pass of a small model takes more than twice as long.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._unfinished = 0

    @property
    def idle(self) -> bool:
        """Whether no call runs or waits. Read it only on the event loop."""
        return self._unfinished == 0

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Submit `call(*args, **kwargs)` and return the future of its result or exception."""
        future = asyncio.wrap_future(self._executor.submit(call, *args, **kwargs))
        self._unfinished += 1
        future.add_done_callback(self._finished)  # runs before the callbacks of the callers
        return asyncio.shield(future)

    @asynccontextmanager
    async def held(self, open_: Callable[[], T], close: Callable[[T], None]) -> AsyncIterator[T]:
        """Provide the result of `open_` and close it at the end; both run on the thread, `close` after earlier calls.

        The result is closed even if the caller is cancelled while `open_` runs.
        """
        opened: list[T] = []

        def close_opened() -> None:
            for each in opened:
                close(each)

        try:
            await self.run(lambda: opened.append(open_()))
            yield opened[0]
        finally:
            await self.run(close_opened)

    def _finished(self, _: asyncio.Future[T]) -> None:
        self._unfinished -= 1

    def shutdown(self, *, wait: bool = True) -> None:
        """Finish all submitted calls, then end the thread; `wait` for it, or leave it to end later.

        A thread that was left is not waited for by a later `shutdown` either.
        """
        if not wait:
            _LEFT.add(self)
            self._executor.submit(_LEFT.discard, self)  # the last call
        self._executor.shutdown(wait and self not in _LEFT)


def calls_left() -> bool:
    """Whether calls still run on threads that were left, for which Python itself would wait when the process ends."""
    return bool(_LEFT)
