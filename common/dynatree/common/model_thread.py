"""The one thread on which a service's model work runs, so that the event loop stays free to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ModelThread:
    """Runs calls one after another, in the order in which they were asked for.

    A caller that is cancelled leaves its call running to the end; what it asks for next comes after it. So a session
    that is closed on cancellation is closed when no forward uses it any more.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Ask for `call(*args, **kwargs)`; the future of its result, or of whatever it raises."""
        return asyncio.shield(asyncio.wrap_future(self._executor.submit(call, *args, **kwargs)))

    def shutdown(self) -> None:
        """Finish what was asked for, then end the thread."""
        self._executor.shutdown(wait=True)
