"""The thread that encodes and decodes prompts, so that a long text does not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from dynatree.common.errors import ServiceBusyError
from dynatree.serving.fair_queue import FairQueue

MAX_WAITING_BYTES = 64 * 2**20  # texts and token ids; a text of 4 MiB takes some seconds
RETRY_SECONDS = 1.0

T = TypeVar("T")


@dataclass(eq=False)
class _Place:
    principal: str
    size: int  # bytes
    turn: asyncio.Future[ServiceBusyError | None]  # None when the turn comes, or the error if it is refused


class TokenizerThread:
    """Runs calls one after the other; principals take turns.

    A cancelled caller leaves the queue with its call. A call that has begun cannot be stopped, and the next call waits
    for its end.

    Args:
        most_bytes: Maximum bytes of all waiting calls.
    """

    def __init__(self, most_bytes: int = MAX_WAITING_BYTES) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._most_bytes = most_bytes
        self._waiting: FairQueue[_Place] = FairQueue(most_bytes)
        self._running = False

    async def run(self, principal: str, size: int, call: Callable[[], T]) -> T:
        """Run `call()` on the thread, and return its result or raise its error.

        Args:
            principal: The principal.
            size: Bytes that the call works on.
            call: The call.

        Raises:
            ServiceBusyError: The queue is full, and this principal has more in it than others.
        """
        if self._running:
            await self._turn(principal, size)
        self._running = True
        loop = asyncio.get_running_loop()

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed: the service has stopped
                loop.call_soon_threadsafe(self._next)

        try:
            running = self._executor.submit(call)
        except Exception:  # RuntimeError: no thread can be started
            self._next()
            raise
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    async def _turn(self, principal: str, size: int) -> None:
        """Wait in the queue for the turn of a call."""
        displaced = self._waiting.displaced_by(principal, size)
        if displaced is None:
            raise self._busy()
        for each in displaced:
            self._waiting.remove(each)
            each.turn.set_result(self._busy())
        place = _Place(principal, size, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        try:
            refused = await asyncio.shield(place.turn)  # shielded, as the turn may come during a cancellation
        except asyncio.CancelledError:
            if not place.turn.done():
                self._waiting.remove(place)
            elif place.turn.result() is None:
                self._next()
            raise
        if refused is not None:
            raise refused

    def _next(self) -> None:
        """Let the next call begin, now that no call runs."""
        place = self._waiting.first()
        self._running = place is not None
        if place is not None:
            self._waiting.take(place)
            place.turn.set_result(None)

    def _busy(self) -> ServiceBusyError:
        return ServiceBusyError(
            f"prompts of {self._most_bytes / 2**20:g} MiB are waiting to be tokenized, which is the limit",
            retry_after=RETRY_SECONDS,
        )
