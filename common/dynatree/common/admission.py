"""Admission: who may begin, who waits for a turn, and who is refused at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dynatree.common.errors import OutOfRangeError, QuotaError, ServiceBusyError
from dynatree.common.fair_queue import FairQueue
from dynatree.common.token_quota import NO_CHARGE, Charge, TokenNeed, TokenQuota

HELD_STEP = 0.2  # weight of one completion in how long one usually takes
LEAST_RETRY = 0.1  # seconds


@dataclass(eq=False)
class Turn:
    """A place in the queue, and then among those that were admitted."""

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
        """How many are ahead, now and whenever it changes; ends with the admission.

        Raises:
            ServiceBusyError: Its place went to a principal with fewer places.
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
        """Wait for the admission; raises as `positions` does."""
        async for _ in self.positions():
            pass

    @property
    def queue_seconds(self) -> float:
        """How long it waited."""
        return (self.admitted or time.monotonic()) - self.entered


@dataclass(frozen=True)
class Quota:
    """What one principal may have; None: as much as there is.

    Attributes:
        sessions: At once.
        queue: That may wait.
        tokens: A minute, of prompts and completions; see `token_quota.Allowance`.
    """

    sessions: int | None = None
    queue: int | None = None
    tokens: int | None = None


NO_QUOTA = Quota()
NO_TOKENS = TokenNeed(0, 0)


class Admission:
    """A bounded queue, served by principal in turn; each principal's requests are first come, first served.

    Whoever is next waits until it fits, and nobody overtakes it: a large request is not starved by small ones. A
    principal whose quota of sessions is used up waits without holding up others. Who gets a place in a full queue is
    `FairQueue`'s matter.

    Args:
        sessions: That may run at once.
        slots: Of the KV arena, over all sessions.
        queue: How many may wait.
        quota: What each principal may have.
        clock: Seconds, by which tokens come back.
    """

    def __init__(
        self,
        sessions: int,
        slots: int,
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
        self._usual: float | None = None  # seconds that an admitted one takes

    @property
    def running(self) -> int:
        """Admitted, and not ended."""
        return self._running

    @property
    def waiting(self) -> int:
        """In the queue."""
        return len(self._waiting)

    @property
    def slots_held(self) -> int:
        """Slots of those that run."""
        return self._slots_held

    @property
    def usage(self) -> float:
        """Slots of those that run / all slots."""
        return self._slots_held / self._slots

    def check(self, principal: str, tokens: int, seconds: float | None = None) -> None:
        """Refuse a request that `queued` would refuse in any case, before its size is known.

        Args:
            principal: On whose behalf.
            tokens: That it uses at least.
            seconds: Until its deadline; None without one.

        Raises:
            ServiceBusyError: As `queued` does.
        """
        self._displaced(principal, 0, seconds)
        self._tokens.check(principal, tokens)

    @asynccontextmanager
    async def queued(
        self, principal: str, slots: int, seconds: float | None = None, tokens: TokenNeed = NO_TOKENS
    ) -> AsyncIterator[Turn]:
        """A place in the queue, left however the context ends; await the turn's `come` before using anything.

        Args:
            principal: On whose behalf.
            slots: Of the KV arena that it needs.
            seconds: Until its deadline; None without one.
            tokens: That the principal is charged; the turn's `charge` is to be told which of them are used.

        Raises:
            OutOfRangeError: It needs more slots than there are.
            QuotaError: The principal has too few tokens left, or as many requests wait as it may have.
            ServiceBusyError: The queue is full, or the turn would come after the deadline.
        """
        if slots > self._slots:
            raise OutOfRangeError(f"the request needs {slots} tokens of KV cache, and there are {self._slots} in all")
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
        """Who has to leave the queue if one more is to be in it."""
        ahead = self._waiting.ahead_of(principal, self._may_run)
        if self._may_run(principal):
            if not ahead and self._fits(slots):
                return []
            expected = self._expected(ahead)
            if seconds is not None and expected > seconds:
                raise ServiceBusyError(
                    f"{ahead} requests are ahead, and a turn in {expected:.1f} s is after the deadline in "
                    f"{seconds:.1f} s",
                    retry_after=expected - seconds,
                )
        waiting = self._waiting.count(principal)
        if self._quota.queue is not None and waiting >= self._quota.queue:
            raise QuotaError(
                f"{waiting} requests of this principal wait, the most that may", retry_after=self._expected(0)
            )
        displaced = self._waiting.displaced_by(principal, 1)
        if displaced is None:
            full = "every session" if self._running >= self._sessions else f"{self.usage:.0%} of the KV cache"
            raise ServiceBusyError(
                f"{full} is in use and {self.waiting} requests wait, the most that may", retry_after=self._expected(0)
            )
        return displaced

    def _refuse(self, turn: Turn) -> None:
        """Refuse one that waits."""
        self._waiting.remove(turn)
        turn.refused = ServiceBusyError(
            f"{self.waiting + 1} requests wait, the most that may; this one made room for a principal with fewer",
            retry_after=self._expected(0),
        )
        turn.changed.set()

    def _may_run(self, principal: str) -> bool:
        """Whether its quota of sessions allows one more."""
        return self._quota.sessions is None or self._running_of[principal] < self._quota.sessions

    def _fits(self, slots: int) -> bool:
        return self._running < self._sessions and self._slots_held + slots <= self._slots

    def _expected(self, ahead: int) -> float:
        """Seconds until the turn of a request with so many ahead; as many run now as can."""
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
        """Admit whoever is next for as long as they fit, then tell the others where they stand."""
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
