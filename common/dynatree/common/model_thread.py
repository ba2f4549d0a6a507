"""The one thread on which a service's model work runs, so that the event loop stays free to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ModelThread:
    """Runs calls one after another, in the order in which they were asked for.

    A caller that is cancelled leaves its call running to the end; what it asks for next comes after it. So a session
    that is closed on cancellation is closed when no forward uses it any more.

    Models are loaded here as well. OpenMP keeps a team of threads for every thread that ever ran a parallel region, and
    once there are more of them than cores they sleep after each region instead of spinning: a forward of a small model
    then takes more than twice as long.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._unfinished = 0

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits. To be asked on the event loop."""
        return self._unfinished == 0

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Ask for `call(*args, **kwargs)`; the future of its result, or of whatever it raises."""
        future = asyncio.wrap_future(self._executor.submit(call, *args, **kwargs))
        self._unfinished += 1
        future.add_done_callback(self._finished)  # before anybody who waits for it
        return asyncio.shield(future)

    @asynccontextmanager
    async def held(self, open_: Callable[[], T], close: Callable[[T], None]) -> AsyncIterator[T]:
        """What `open_` returns, for as long as the context lives; both run on the thread, `close` behind all else.

        A caller that is cancelled while `open_` runs has it closed, too.
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

    def shutdown(self) -> None:
        """Finish what was asked for, then end the thread."""
        self._executor.shutdown(wait=True)
