"""Decides whether and when a failed request is sent again."""

import time
from collections.abc import Callable

import grpc

_UNAVAILABLE, _BUSY = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
_TOO_LONG = grpc.StatusCode.OUT_OF_RANGE
_REFUSED = (_BUSY, grpc.StatusCode.FAILED_PRECONDITION)  # by one server; another may accept the request
_FAILED = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0  # seconds, between rounds over all servers


class Attempts:
    """The attempts at one request; `after` decides whether there is another attempt.

    A partly received request is retried until its time limit, so that its tokens are not lost. A request that has
    received nothing is tried on every server, but not again on a server that refused it. A refusal by a quota holds for
    all servers, since going from one to the next would add up their quotas.

    Args:
        servers: the number of servers to try.
        connect_seconds: how long a request that has received nothing is retried; a negative number means never.
        resume_seconds: how long a partly received request is retried after its server was lost; negative means never.
        left: returns the seconds until the call's deadline; None means no deadline.
    """

    def __init__(
        self,
        servers: int,
        connect_seconds: float,
        resume_seconds: float,
        left: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._servers = servers
        self._connect_seconds = connect_seconds
        self._resume_seconds = resume_seconds
        self._left = left
        self._begun = False
        self._failures = 0  # since the last message
        self._refusals = 0
        self._broken = 0  # INTERNAL and UNKNOWN failures over the whole request
        self._lost_at = 0.0

    def received(self) -> float | None:
        """Note a received message; return the seconds since the server was lost, if it follows a loss, or else None."""
        lost = time.monotonic() - self._lost_at if self._begun and self._failures else None
        self._begun = True
        self._failures = self._refusals = 0
        return lost

    def after(self, code: grpc.StatusCode, retry_after: float | None = None, *, quota: bool = False) -> float | None:
        """Return the seconds until the next attempt after one that failed with `code`; None to give up.

        Args:
            code: the status of the failed attempt.
            retry_after: the seconds after which the server wants to be asked again, if it says.
            quota: whether the principal's quota refused the request.
        """
        now = time.monotonic()
        self._failures += 1
        if self._failures == 1:
            self._lost_at = now
        if now - self._lost_at > (self._resume_seconds if self._begun else self._connect_seconds):
            return None
        if code in _FAILED:
            self._broken += 1
            if self._broken > 1 or not self._begun:
                return None  # the request itself may cause the failure
        elif self._begun and code in (_BUSY, _TOO_LONG):
            pass  # a server once accepted the request, so one with enough room and context may come back
        elif code in _REFUSED:
            self._refusals += 1
            if quota or self._refusals >= self._servers:
                return None
        elif code is not _UNAVAILABLE:
            return None
        pause = 0.0  # if the next server has not been asked yet
        if quota or self._failures % self._servers == 0:
            doublings = min(self._failures // self._servers, 10)  # a float overflows after a thousand
            pause = min(max(_FIRST_PAUSE * 2.0**doublings, retry_after or 0.0), _LONGEST_PAUSE)
        left = self._left()
        return None if left is not None and pause >= left else pause
