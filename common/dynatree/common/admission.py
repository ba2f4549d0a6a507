"""Admission: who may begin, who waits for a turn, and who is refused at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dynatree.common.errors import OutOfRangeError, ServiceBusyError

HELD_STEP = 0.2  # weight of one completion in how long one usually takes
LEAST_RETRY = 0.1  # seconds


@dataclass(eq=False)
class Turn:
    """A place in the queue, and then among those that were admitted."""

    principal: str
    slots: int
    entered: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ahead: int = 0

    async def positions(self) -> AsyncIterator[int]:
        """How many are ahead, now and whenever it changes; ends with the admission."""
        last = None
        while self.admitted is None:
            if self.ahead != last:
                last = self.ahead
                yield last
            self.changed.clear()
            if self.admitted is None and self.ahead == last:
                await self.changed.wait()

    async def come(self) -> None:
        """Wait for the admission."""
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
        tokens: A minute, of prompts and completions.
    """

    sessions: int | None = None
    queue: int | None = None
    tokens: int | None = None


NO_QUOTA = Quota()


class Allowance:
    """The tokens that a principal may still use: `tokens` a minute, of which at most a minute's are saved up."""

    def __init__(self, tokens: int) -> None:
        self._rate = tokens / 60
        self._most = float(tokens)
        self._left = float(tokens)
        self._at = time.monotonic()

    def spend(self, tokens: int) -> None:
        """Take tokens that were used; what is left may be less than none."""
        self._left = self.left - tokens

    @property
    def left(self) -> float:
        """Tokens that may be used now."""
        now = time.monotonic()
        self._left = min(self._most, self._left + self._rate * (now - self._at))
        self._at = now
        return self._left

    @property
    def seconds(self) -> float:
        """Until some are left."""
        return max(0.0, -self.left / self._rate)


class Admission:
    """A bounded queue for each principal, served in turn; each is first come, first served.

    Whoever is next waits until it fits, and nobody overtakes it: a large request is not starved by small ones. A
    principal whose quota of sessions is used up waits without holding up others.

    Args:
        sessions: That may run at once.
        slots: Of the KV arena, over all sessions.
        queue: How many may wait.
        quota: What each principal may have.
    """

    def __init__(self, sessions: int, slots: int, queue: int, quota: Quota = NO_QUOTA) -> None:
        self._quota = quota
        self._running_of: Counter[str] = Counter()
        self._allowances: dict[str, Allowance] = {}
        self._sessions = sessions
        self._slots = slots
        self._queue = queue
        self._running = 0
        self._slots_held = 0
        self._waiting: dict[str, deque[Turn]] = {}  # of principals with somebody waiting; the next in turn first
        self._usual: float | None = None  # seconds that an admitted one takes

    @property
    def running(self) -> int:
        """Admitted, and not ended."""
        return self._running

    @property
    def waiting(self) -> int:
        """In the queue."""
        return sum(map(len, self._waiting.values()))

    @property
    def slots_held(self) -> int:
        """Slots of those that run."""
        return self._slots_held

    @property
    def usage(self) -> float:
        """Slots of those that run / all slots."""
        return self._slots_held / self._slots

    @asynccontextmanager
    async def queued(self, principal: str, slots: int, seconds: float | None = None) -> AsyncIterator[Turn]:
        """A place in the queue, left however the context ends; await the turn's `come` before using anything.

        Args:
            principal: On whose behalf.
            slots: Of the KV arena that it needs.
            seconds: Until its deadline; None without one.

        Raises:
            OutOfRangeError: It needs more slots than there are.
            ServiceBusyError: The queue is full, or the turn would come after the deadline.
        """
        if slots > self._slots:
            raise OutOfRangeError(f"the request needs {slots} tokens of KV cache, and there are {self._slots} in all")
        self._check_quota(principal, slots)
        if not self._has_all_sessions(principal):
            self._check(slots, seconds)
        turn = Turn(principal, slots)
        self._waiting.setdefault(principal, deque()).append(turn)
        self._admit()
        try:
            yield turn
        finally:
            self._leave(turn)

    def _check(self, slots: int, seconds: float | None) -> None:
        waiting = self._next_up()
        if not waiting and self._fits(slots):
            return
        expected = self._expected(waiting)
        if waiting >= self._queue:
            full = "every session" if self._running >= self._sessions else f"{self.usage:.0%} of the KV cache"
            raise ServiceBusyError(
                f"{full} is in use and {waiting} requests wait, the most that may", retry_after=self._expected(0)
            )
        if seconds is not None and expected > seconds:
            raise ServiceBusyError(
                f"{waiting} requests wait, and a turn in {expected:.1f} s is after the deadline in {seconds:.1f} s",
                retry_after=expected - seconds,
            )

    def spend(self, principal: str, tokens: int) -> None:
        """Count tokens that a principal used."""
        if self._quota.tokens is not None:
            self._allowance(principal).spend(tokens)

    def _allowance(self, principal: str) -> Allowance:
        assert self._quota.tokens is not None
        if principal not in self._allowances:
            # those who have all of theirs need not be remembered
            self._allowances = {name: each for name, each in self._allowances.items() if each.left < self._quota.tokens}
            self._allowances[principal] = Allowance(self._quota.tokens)
        return self._allowances[principal]

    def _next_up(self) -> int:
        """How many wait for room, and not for a session of their own principal to end."""
        return sum(len(queue) for each, queue in self._waiting.items() if not self._has_all_sessions(each))

    def _check_quota(self, principal: str, slots: int) -> None:
        waiting = len(self._waiting.get(principal, ()))
        most = self._queue if self._quota.queue is None else self._quota.queue
        waits = waiting or self._has_all_sessions(principal) or self._next_up() or not self._fits(slots)
        if waits and waiting >= most and (self._quota.queue is not None or self._has_all_sessions(principal)):
            raise ServiceBusyError(
                f"{waiting} requests of this principal wait, the most that may", retry_after=self._expected(0)
            )
        if self._quota.tokens is not None and (allowance := self._allowance(principal)).left < 0:
            raise ServiceBusyError(
                f"this principal has used its {self._quota.tokens} tokens a minute", retry_after=allowance.seconds
            )

    def _has_all_sessions(self, principal: str) -> bool:
        return self._quota.sessions is not None and self._running_of[principal] >= self._quota.sessions

    def _fits(self, slots: int) -> bool:
        return self._running < self._sessions and self._slots_held + slots <= self._slots

    def _expected(self, ahead: int) -> float:
        """Seconds until the turn of a request with so many ahead; as many run now as can."""
        return max((ahead + 1) * (self._usual or 0.0) / max(self._running, 1), LEAST_RETRY)

    def _leave(self, turn: Turn) -> None:
        if turn.admitted is None:
            queue = self._waiting[turn.principal]
            queue.remove(turn)
            if not queue:
                del self._waiting[turn.principal]
        else:
            self._running -= 1
            self._running_of[turn.principal] -= 1
            if not self._running_of[turn.principal]:
                del self._running_of[turn.principal]
            self._slots_held -= turn.slots
            took = time.monotonic() - turn.admitted
            self._usual = took if self._usual is None else self._usual + HELD_STEP * (took - self._usual)
        self._admit()

    def _next_principal(self) -> str | None:
        """Whose turn it is; None where nobody waits who may have another session."""
        return next((each for each in self._waiting if not self._has_all_sessions(each)), None)

    def _admit(self) -> None:
        """Admit whoever is next for as long as they fit, then tell the others where they stand."""
        while (principal := self._next_principal()) is not None:
            queue = self._waiting[principal]
            if not self._fits(queue[0].slots):
                break
            turn = queue.popleft()
            del self._waiting[principal]
            if queue:
                self._waiting[principal] = queue  # behind the other principals
            self._running += 1
            self._running_of[principal] += 1
            self._slots_held += turn.slots
            turn.admitted = time.monotonic()
            turn.changed.set()
        queues = list(self._waiting.values())
        for place, queue in enumerate(queues):
            for index, turn in enumerate(queue):
                others = [min(len(other), index + (before < place)) for before, other in enumerate(queues)]
                others[place] = index
                turn.ahead = sum(others)
                turn.changed.set()
