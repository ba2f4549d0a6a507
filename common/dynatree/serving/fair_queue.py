"""A bounded queue in which principals take turns, and from which no principal can exclude the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    """An entry of the queue; `size` counts towards the queue's capacity."""

    @property
    def principal(self) -> str:
        """Principal to whom the entry belongs."""

    @property
    def size(self) -> int:
        """Size of the entry, at least 0."""


W = TypeVar("W", bound=Waiter)


class FairQueue(Generic[W]):
    """A queue in which principals take turns; the entries of one principal are served first in, first out.

    If the queue is full, a principal that would still hold less than another principal gets a place. The newest entries
    of the principal that holds most make room. So a principal that exceeds its fair share loses the excess.

    Args:
        most: Maximum sum of the sizes of waiting entries.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: dict[str, deque[W]] = {}  # by principal, the next in turn first; no queue is empty
        self._sizes: dict[str, int] = {}  # sum of the sizes in each queue
        self._size = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[W]:
        """All entries, in the order of their turns if none leaves early."""
        queues = [iter(queue) for queue in self._queues.values()]
        while queues:
            heads = [(queue, next(queue, None)) for queue in queues]
            queues = [queue for queue, waiter in heads if waiter is not None]
            yield from (waiter for _, waiter in heads if waiter is not None)

    def count(self, principal: str) -> int:
        """Number of waiting entries of a principal."""
        return len(self._queues.get(principal, ()))

    def ahead_of(self, principal: str, counts: Callable[[str], bool]) -> int:
        """Number of entries served before a new one of `principal`; only principals for which `counts` holds count."""
        own = self.count(principal)
        ahead, before = 0, 1  # principals earlier in turn have one more entry ahead
        for each, queue in self._queues.items():
            if each == principal:
                ahead, before = ahead + own, 0
            elif counts(each):
                ahead += min(len(queue), own + before)
        return ahead

    def displaced_by(self, principal: str, size: int) -> list[W] | None:
        """The entries that must leave to make room for a new one of `principal`; None if it must be refused."""
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
        """Append an entry, even if the queue is full."""
        self._queues.setdefault(waiter.principal, deque()).append(waiter)
        self._sizes[waiter.principal] = self._sizes.get(waiter.principal, 0) + waiter.size
        self._size += waiter.size

    def remove(self, waiter: W) -> None:
        """Remove a waiting entry."""
        queue = self._queues[waiter.principal]
        queue.remove(waiter)
        self._sizes[waiter.principal] -= waiter.size
        self._size -= waiter.size
        if not queue:
            del self._queues[waiter.principal], self._sizes[waiter.principal]

    def first(self, may: Callable[[str], bool] = lambda _: True) -> W | None:
        """The entry whose turn it is, among principals for which `may` holds; None if there is none."""
        return next((queue[0] for each, queue in self._queues.items() if may(each)), None)

    def take(self, waiter: W) -> None:
        """Remove the entry that `first` returned, and move its principal behind the others."""
        self.remove(waiter)
        if waiter.principal in self._queues:
            self._queues[waiter.principal] = self._queues.pop(waiter.principal)
