"""The open requests: their number, and the memory of their bodies and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dynatree.gateway.errors import ApiError
from dynatree.gateway.limits import Limits

_NO_MEMORY = "the gateway has no memory left, and this request uses the most; ask for less at once, or try again later"
DRIPPING_SECONDS = 1.0  # a request whose body takes longer to arrive may be ended to make room for another


@dataclass(eq=False)
class OpenRequest:
    """One open request.

    Attributes:
        task: The task that answers it.
        requests: All open requests.
        held: Bytes of memory of its body and its answer.
        reading_since: Loop time at which reading its body began; None while no body is read.
        ended_by: The error for which its task was cancelled; None if it was not, or by the gateway's shutdown.
    """

    task: asyncio.Task[object]
    requests: OpenRequests
    held: int = 0
    reading_since: float | None = None
    ended_by: ApiError | None = None

    def hold(self, count: int) -> None:
        """Add `count` bytes to the request's memory, which is freed when the request ends."""
        self.held += count
        self.requests.hold(count)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Mark the body as being read within the context."""
        self.reading_since = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.reading_since = None

    def end(self, error: ApiError) -> None:
        """Cancel the request to make room for others; its client receives the error."""
        if self.ended_by is None:
            self.ended_by = error
            self.task.cancel()


class OpenRequests:
    """All open requests, kept within the limits of their number and memory."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.most_requests
        self._most_bytes = limits.held_bytes
        self._held = self._working = 0
        self._open: set[OpenRequest] = set()

    @property
    def tasks(self) -> set[asyncio.Task[object]]:
        """The tasks of the open requests."""
        return {each.task for each in self._open}

    @contextmanager
    def opened(self, *, watches: bool) -> Iterator[OpenRequest]:
        """Register the current task's request within the context; one that `watches` (monitoring) is always admitted.

        Raises:
            ApiError: Too many requests are in work, and none has been sending its body for long.
        """
        if not watches and self._working >= self._most:
            self._end_a_dripping_one()
        task = asyncio.current_task()
        assert task is not None
        request = OpenRequest(task, self)
        self._open.add(request)
        self._working += not watches
        try:
            yield request
        finally:
            self._open.discard(request)
            self._working -= not watches
            self._held -= request.held

    def hold(self, count: int) -> None:
        """Add `count` bytes to the memory of all requests; beyond the limit, end the request that takes the most."""
        self._held += count
        if self._held > self._most_bytes:
            going_on = [each for each in self._open if each.ended_by is None]
            if sum(each.held for each in going_on) > self._most_bytes:
                max(going_on, key=lambda each: each.held).end(_too_many(_NO_MEMORY))

    def _end_a_dripping_one(self) -> None:
        until = asyncio.get_running_loop().time() - DRIPPING_SECONDS
        reading = [(each.reading_since, each) for each in self._open if each.reading_since and not each.ended_by]
        since, oldest = min(reading, key=lambda each: each[0], default=(until, None))
        if oldest is None or since >= until:
            raise _too_many("the gateway has too many open requests; try again later")
        oldest.end(ApiError(408, "the body arrived too slowly while other requests waited", code="request_timeout"))


def _too_many(message: str) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": "1"})
