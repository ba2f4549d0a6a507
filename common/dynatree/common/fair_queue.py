"""A bounded queue in which principals take turns, and from which none keeps the others out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    """Somebody who waits; `size` is its share of what the queue may hold."""

    @property
    def principal(self) -> str:
        """On whose behalf."""

    @property
    def size(self) -> int:
        """At least 0."""


W = TypeVar("W", bound=Waiter)


class FairQueue(Generic[W]):
    """Who waits: principals take turns, and of each principal's the first that came is next.

    When the queue is full, a principal that would still hold less than another one gets a place, at the expense of the
    newest of whoever holds most. So a principal that asks for more than its share loses what exceeds the share.

    Args:
        most: The sum of the sizes that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: dict[str, deque[W]] = {}  # of principals with somebody waiting; the next in turn first
        self._sizes: dict[str, int] = {}  # likewise, summed
        self._size = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[W]:
        """All, in the order of their turns if nobody leaves."""
        queues = [iter(queue) for queue in self._queues.values()]
        while queues:
            heads = [(queue, next(queue, None)) for queue in queues]
            queues = [queue for queue, waiter in heads if waiter is not None]
            yield from (waiter for _, waiter in heads if waiter is not None)

    def count(self, principal: str) -> int:
        """How many of a principal wait."""
        return len(self._queues.get(principal, ()))

    def ahead_of(self, principal: str, counts: Callable[[str], bool]) -> int:
        """How many would have a turn before one more of `principal`, of those principals that count."""
        own = self.count(principal)
        ahead, before = 0, 1  # the principals before it in turn are one ahead
        for each, queue in self._queues.items():
            if each == principal:
                ahead, before = ahead + own, 0
            elif counts(each):
                ahead += min(len(queue), own + before)
        return ahead

    def displaced_by(self, principal: str, size: int) -> list[W] | None:
        """Who has to leave if one more of `principal` is to wait; None where this one is to be refused instead."""
        excess = self._size + size - self._most
        if excess <= 0:
            return []
        sizes, newest = self._sizes.copy(), {each: reversed(queue) for each, queue in self._queues.items()}
        own = sizes.get(principal, 0) + size
        leaving: list[W] = []
        while excess > 0:
            largest = max(sizes, key=sizes.__getitem__, default=principal)
            if sizes.get(largest, 0) <= own:
                return None
            leaving.append(next(newest[largest]))
            sizes[largest] -= leaving[-1].size
            excess -= leaving[-1].size
        return leaving

    def append(self, waiter: W) -> None:
        """Let somebody wait, whether there is room or not."""
        self._queues.setdefault(waiter.principal, deque()).append(waiter)
        self._sizes[waiter.principal] = self._sizes.get(waiter.principal, 0) + waiter.size
        self._size += waiter.size

    def remove(self, waiter: W) -> None:
        """Let somebody go that waits."""
        queue = self._queues[waiter.principal]
        queue.remove(waiter)
        self._sizes[waiter.principal] -= waiter.size
        self._size -= waiter.size
        if not queue:
            del self._queues[waiter.principal], self._sizes[waiter.principal]

    def first(self, may: Callable[[str], bool] = lambda _: True) -> W | None:
        """Whose turn it is, of the principals that may have one; None where nobody waits."""
        return next((queue[0] for each, queue in self._queues.items() if may(each)), None)

    def take(self, waiter: W) -> None:
        """Give `first` its turn: it waits no longer, and its principal is behind the others."""
        self.remove(waiter)
        if waiter.principal in self._queues:
            self._queues[waiter.principal] = self._queues.pop(waiter.principal)
