"""The requests that are in work: how many, and how much memory their bodies and answers take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dynatree.gateway.errors import ApiError
from dynatree.gateway.limits import Limits

_NO_MEMORY = (
    "this request takes the most memory of those in work, and the gateway has no more; ask for less at once, or try "
    "again later"
)
DRIPPING_SECONDS = 1.0  # for which a body may be read before its request can be ended for the sake of another


@dataclass(eq=False)
class OpenRequest:
    """One request.

    Attributes:
        task: Answers it.
        held: Bytes of its body and its answer, in memory.
        reading_since: On the loop's clock; None while no body is read.
        ended_by: Why its task was cancelled; None where the gateway's stop, or nothing, did so.
    """

    task: asyncio.Task[object]
    requests: OpenRequests
    held: int = 0
    reading_since: float | None = None
    ended_by: ApiError | None = None

    def hold(self, count: int) -> None:
        """So many bytes more are in memory, for as long as the request is open."""
        self.held += count
        self.requests.hold(count)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While its body is read."""
        self.reading_since = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.reading_since = None

    def end(self, error: ApiError) -> None:
        """End it for the sake of others; its client is told the error."""
        if self.ended_by is None:
            self.ended_by = error
            self.task.cancel()


class OpenRequests:
    """All of them."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.most_requests
        self._most_bytes = limits.held_bytes
        self._held = self._working = 0
        self._open: set[OpenRequest] = set()

    @property
    def tasks(self) -> set[asyncio.Task[object]]:
        """Their tasks."""
        return {each.task for each in self._open}

    @contextmanager
    def opened(self, *, watches: bool) -> Iterator[OpenRequest]:
        """A request, until it is answered; one that asks for the gateway's health has room always.

        Raises:
            ApiError: There are too many, and none of them has been sending its body for long.
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
        """One of them takes so many bytes more; where there are too many, the one that takes most of all is ended."""
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
            raise _too_many("the gateway has too many requests in work; try again later")
        oldest.end(ApiError(408, "the body came too slowly, and others wait", code="request_timeout"))


def _too_many(message: str) -> ApiError:
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", headers={"Retry-After": "1"})
