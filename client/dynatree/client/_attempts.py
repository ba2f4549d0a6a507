"""When a request whose server was lost is sent anew."""

import time

import grpc

_UNAVAILABLE, _BUSY = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
_TOO_LONG = grpc.StatusCode.OUT_OF_RANGE
_REFUSED = (_BUSY, grpc.StatusCode.FAILED_PRECONDITION)  # by one server; another may take it
_FAILED = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0  # seconds, between rounds over all servers


class Attempts:
    """The attempts at one request; `after` says whether there is another one.

    A request of which something was received goes on for as long as its window allows, so that nothing is lost. One of
    which nothing was received is tried at every server; a server that refused it is not asked again. A quota's refusal
    holds for all servers, since to go from one to the next would add up their quotas.

    Args:
        servers: How many there are to try.
        connect_seconds: How long a request of which nothing was received is tried.
        resume_seconds: How long one is tried that was received in part, since its server was lost; 0: not at all.
    """

    def __init__(self, servers: int, connect_seconds: float, resume_seconds: float) -> None:
        self._servers = servers
        self._connect_seconds = connect_seconds
        self._resume_seconds = resume_seconds
        self._begun = False
        self._failures = 0  # since something was received
        self._refusals = 0
        self._broken = 0  # over the whole request
        self._lost_at = 0.0

    def received(self) -> float | None:
        """Note that something was received; the seconds since the server was lost, where one was lost before it."""
        lost = time.monotonic() - self._lost_at if self._begun and self._failures else None
        self._begun = True
        self._failures = self._refusals = 0
        return lost

    def after(self, code: grpc.StatusCode, retry_after: float | None = None, *, quota: bool = False) -> float | None:
        """Seconds until the next attempt, after one that failed with `code`; None where there is none.

        Args:
            code: how it failed.
            retry_after: seconds after which the server would be asked again, where it says.
            quota: whether the principal's quota refused it.
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
                return None  # it may be the request
        elif self._begun and code in (_BUSY, _TOO_LONG):
            pass  # a server took it, and one with as much room, or as long a context, may be back
        elif code in _REFUSED:
            self._refusals += 1
            if quota or self._refusals >= self._servers:
                return None
        elif code is not _UNAVAILABLE:
            return None
        if self._failures % self._servers and not quota:
            return 0.0  # the next server has not been asked yet
        pause = max(_FIRST_PAUSE * 2.0 ** (self._failures // self._servers), retry_after or 0.0)
        return min(pause, _LONGEST_PAUSE)
