"""Admission: which requests start, which wait in the queue, and which are refused at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dynatree.common.errors import OutOfRangeError, QuotaError, ServiceBusyError
from dynatree.serving.fair_queue import FairQueue
from dynatree.serving.token_quota import NO_CHARGE, Charge, TokenNeed, TokenQuota

HELD_STEP = 0.2  # weight of the latest request in the running mean of request durations
LEAST_RETRY = 0.1  # seconds


@dataclass(eq=False)
class Turn:
    """A request's place in the queue, and then among the admitted requests."""

    principal: str
    slots: int
    charge: Charge = NO_CHARGE
    size: int = 1
    entered: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    refused: ServiceBusyError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ahead: int = 0

    async def positions(self) -> AsyncIterator[int]:
        """The number of requests ahead, now and after each change; ends with the admission.

        Raises:
            ServiceBusyError: The place was given to a principal with fewer places.
        """
        last = None
        while self.admitted is None:
            if self.refused is not None:
                raise self.refused
            if self.ahead != last:
                last = self.ahead
                yield last
            self.changed.clear()
            if self.admitted is None and self.refused is None and self.ahead == last:
                await self.changed.wait()

    async def come(self) -> None:
        """Wait for the admission.

        Raises:
            ServiceBusyError: The place was given to a principal with fewer places.
        """
        async for _ in self.positions():
            pass

    @property
    def queue_seconds(self) -> float:
        """Seconds spent in the queue."""
        return (self.admitted or time.monotonic()) - self.entered


@dataclass(frozen=True)
class Quota:
    """Limits of one principal; None means no limit.

    Attributes:
        sessions: Maximum number of concurrent sessions.
        queue: Maximum number of waiting requests.
        tokens: Tokens per minute, of prompts and completions; see `token_quota.Allowance`.
    """

    sessions: int | None = None
    queue: int | None = None
    tokens: int | None = None


NO_QUOTA = Quota()
NO_TOKENS = TokenNeed(0, 0)


class Admission:
    """A bounded queue in which principals take turns; each principal's requests are first come, first served.

    The next request waits until it fits, and no request overtakes it, so small requests do not starve a large one. A
    principal whose quota of sessions is used up waits without delaying other principals. `FairQueue` decides which
    requests get a place in a full queue.

    Args:
        sessions: Maximum number of concurrent sessions.
        slots: KV slots of all sessions together; may be infinite.
        queue: Maximum number of waiting requests.
        quota: Limits of each principal.
        clock: Time in seconds, for the token quota.
    """

    def __init__(
        self,
        sessions: int,
        slots: float,
        queue: int,
        quota: Quota = NO_QUOTA,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quota = quota
        self._tokens = TokenQuota(quota.tokens, clock)
        self._running_of: Counter[str] = Counter()
        self._sessions = sessions
        self._slots = slots
        self._running = 0
        self._slots_held = 0
        self._waiting: FairQueue[Turn] = FairQueue(queue)
        self._usual: float | None = None  # running mean of the seconds that an admitted request takes

    @property
    def running(self) -> int:
        """Number of admitted requests that have not ended."""
        return self._running

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    @property
    def slots_held(self) -> int:
        """KV slots of the running requests."""
        return self._slots_held

    @property
    def usage(self) -> float:
        """KV slots of the running requests / all KV slots."""
        return self._slots_held / self._slots

    def check(self, principal: str, tokens: int, seconds: float | None = None) -> None:
        """Refuse a request that `queued` would refuse anyway, before its size is known.

        Args:
            principal: The request's principal.
            tokens: Lower bound on the tokens that the request uses.
            seconds: Seconds until the request's deadline; None without one.

        Raises:
            ServiceBusyError: The queue is full, a quota is used up, or the turn would come after the deadline.
        """
        self._displaced(principal, 0, seconds)
        self._tokens.check(principal, tokens)

    @asynccontextmanager
    async def queued(
        self, principal: str, slots: int, seconds: float | None = None, tokens: TokenNeed = NO_TOKENS
    ) -> AsyncIterator[Turn]:
        """A place in the queue, released when the context ends; await the turn's `come` before using any resources.

        Args:
            principal: The request's principal.
            slots: KV slots that the request needs.
            seconds: Seconds until the request's deadline; None without one.
            tokens: Tokens that the principal is charged; report the used ones to the turn's `charge`.

        Raises:
            OutOfRangeError: The request needs more KV slots than exist.
            QuotaError: The principal has too few tokens left, or too many of its requests already wait.
            ServiceBusyError: The queue is full, or the turn would come after the deadline.
        """
        if slots > self._slots:
            raise OutOfRangeError(f"the request needs {slots} tokens of KV cache, but the service has {self._slots}")
        displaced = self._displaced(principal, slots, seconds)
        turn = Turn(principal, slots, self._tokens.charge(principal, tokens))
        for each in displaced:
            self._refuse(each)
        self._waiting.append(turn)
        self._admit()
        try:
            yield turn
        finally:
            self._leave(turn)

    def _displaced(self, principal: str, slots: int, seconds: float | None) -> list[Turn]:
        """The turns that must leave the queue to make room for a request.

        Raises:
            ServiceBusyError: The request itself is refused.
        """
        ahead = self._waiting.ahead_of(principal, self._may_run)
        if self._may_run(principal):
            if not ahead and self._fits(slots):
                return []
            expected = self._expected(ahead)
            if seconds is not None and expected > seconds:
                raise ServiceBusyError(
                    f"{ahead} requests are ahead, and the expected wait of {expected:.1f} s exceeds the deadline "
                    f"in {seconds:.1f} s",
                    retry_after=expected - seconds,
                )
        waiting = self._waiting.count(principal)
        if self._quota.queue is not None and waiting >= self._quota.queue:
            raise QuotaError(
                f"{waiting} requests of this principal are waiting, which is the limit", retry_after=self._expected(0)
            )
        displaced = self._waiting.displaced_by(principal, 1)
        if displaced is None:
            full = "every session" if self._running >= self._sessions else f"{self.usage:.0%} of the KV cache"
            raise ServiceBusyError(
                f"{full} is in use and {self.waiting} requests are waiting, which is the limit",
                retry_after=self._expected(0),
            )
        return displaced

    def _refuse(self, turn: Turn) -> None:
        """Remove a waiting request from the queue, and refuse it."""
        self._waiting.remove(turn)
        turn.refused = ServiceBusyError(
            f"{self.waiting + 1} requests were waiting, which is the limit; "
            "this one made room for a principal with fewer",
            retry_after=self._expected(0),
        )
        turn.changed.set()

    def _may_run(self, principal: str) -> bool:
        """Whether the principal's quota of sessions allows one more."""
        return self._quota.sessions is None or self._running_of[principal] < self._quota.sessions

    def _fits(self, slots: int) -> bool:
        return self._running < self._sessions and self._slots_held + slots <= self._slots

    def _expected(self, ahead: int) -> float:
        """Estimated seconds until the turn of a request with `ahead` requests before it, at the current concurrency."""
        return max((ahead + 1) * (self._usual or 0.0) / max(self._running, 1), LEAST_RETRY)

    def _leave(self, turn: Turn) -> None:
        turn.charge.end()
        if turn.admitted is not None:
            self._running -= 1
            self._running_of[turn.principal] -= 1
            if not self._running_of[turn.principal]:
                del self._running_of[turn.principal]
            self._slots_held -= turn.slots
            took = time.monotonic() - turn.admitted
            self._usual = took if self._usual is None else self._usual + HELD_STEP * (took - self._usual)
        elif turn.refused is None:
            self._waiting.remove(turn)
        self._admit()

    def _admit(self) -> None:
        """Admit requests in turn while they fit, then update the positions of the remaining ones."""
        while (turn := self._waiting.first(self._may_run)) is not None and self._fits(turn.slots):
            self._waiting.take(turn)
            self._running += 1
            self._running_of[turn.principal] += 1
            self._slots_held += turn.slots
            turn.admitted = time.monotonic()
            turn.changed.set()
        for ahead, turn in enumerate(self._waiting):
            turn.ahead = ahead
            turn.changed.set()
