"""The prefix cache: keys and values of ended sessions, kept in the KV cache until their slots are needed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.engine.kv.kv_cache import KVCache
from dynatree.engine.kv.kv_range import KVRange

LEAST = 16  # tokens; a shorter prefix is not worth a range


@dataclass(frozen=True, eq=False)
class _Entry:
    """The tokens whose keys and values a range holds, and the principal whose session they came from."""

    kv: KVRange
    token_ids: tuple[int, ...]
    principal: str


class PrefixCache:
    """Reserves and releases ranges of the KV cache. The prefix that a prompt shares with an ended session is reused.

    A session finds only entries of the same principal, because the time of a prefill would otherwise reveal the
    prompts of other principals. The least recently used entry is evicted first when slots are needed.

    Args:
        kv_cache: KV cache of the ranges; nothing else may reserve ranges of it.
        enabled: Whether any prefix is kept.
        only_prompts: Whether sessions leave only their prompt. In 16 bits, a token's keys and values may depend on the
            forward pass that computed them, and those of a prompt must come from a prefill (but see
            `Engine.batch_invariant`).
        most: Most entries that are kept; None means as many as fit into the KV cache.
    """

    def __init__(
        self, kv_cache: KVCache, *, enabled: bool = True, only_prompts: bool = False, most: int | None = None
    ) -> None:
        self.only_prompts = only_prompts
        self._most = most
        self._kv_cache = kv_cache
        self._enabled = enabled
        self._entries: list[_Entry] = []  # the most recently used is last

    @property
    def slots(self) -> int:
        """Slots that entries hold; they are evicted when the slots are needed."""
        return sum(entry.kv.size for entry in self._entries)

    def reserve(self, slots: int, prompt_ids: Sequence[int], principal: str) -> tuple[KVRange | None, int]:
        """Reserve a range of `slots` slots, and return it with the number of prompt tokens that it already holds.

        The range is None if too few slots are free. The last token of a prompt is never cached, because its logits are
        needed.
        """
        prompt = tuple(prompt_ids[:-1])
        found = max(
            (entry for entry in reversed(self._entries) if entry.principal == principal),  # of equals, the last used
            key=lambda entry: self._usable(entry, prompt),
            default=None,
        )
        cached = 0 if found is None else self._usable(found, prompt)
        if found is not None and cached >= LEAST:
            self._entries.remove(found)  # append it again as the most recently used
            self._entries.append(found)
        else:
            found, cached = None, 0
        self._make_room(slots)
        kv = self._kv_cache.reserve(slots)
        if kv is None or found is None or found not in self._entries:
            return kv, 0
        self._kv_cache.copy(found.kv, kv, cached)
        return kv, cached

    def _usable(self, entry: _Entry, tokens: tuple[int, ...]) -> int:
        """Return the number of first tokens of which an entry holds all that the next token sees."""
        return self._kv_cache.reach(entry.kv, _common(entry.token_ids, tokens))

    def _holds(self, kv: KVRange, position: int) -> bool:
        """Whether a range still holds all that a token at `position` sees."""
        return self._kv_cache.reach(kv, position) == position

    def _replaces(self, kv: KVRange, other: KVRange, count: int) -> bool:
        """Whether a range holds all that another one of its first `count` tokens does; states are kept at few places.

        So the state at the end of a prompt is kept beside a longer text that begins with it.
        """
        return self._holds(kv, count) and kv.covers(other, count)

    def _make_room(self, slots: int) -> None:
        """Evict the oldest entries that open a gap for a range; without such a gap, evict until enough slots are free.

        Compacting the KV cache would keep more entries, but it would delay every session.
        """

        def gap(count: int) -> int | None:
            return self._kv_cache.gap(slots, {entry.kv for entry in self._entries[:count]})

        # a gap that is there without some entries is there without more of them
        count = bisect_left(range(len(self._entries) + 1), True, key=lambda count: gap(count) is not None)
        start, evicted = gap(count), self._entries[:count]
        if start is not None:
            stop = start + slots
            evicted = [each for each in evicted if each.kv.start < stop and each.kv.start + each.kv.size > start]
        for entry in evicted:
            if start is None and self._kv_cache.free_slots >= slots:
                break
            self._entries.remove(entry)
            self._kv_cache.release(entry.kv)

    def note_prompt(self, kv: KVRange) -> None:
        """Keep what recurrent layers hold of a prompt that has just been read, for sessions with the same prompt."""
        if self._enabled:
            kv.checkpoint = kv.memory

    def release(self, kv: KVRange, token_ids: Sequence[int], principal: str) -> None:
        """Release a range whose first slots hold these tokens; keep it as an entry unless an entry begins with them.

        A broken range is not kept.
        """
        tokens = tuple(token_ids)
        same = [entry for entry in self._entries if entry.principal == principal]
        known = any(
            _common(entry.token_ids, tokens) == len(tokens) and self._replaces(entry.kv, kv, len(tokens))
            for entry in same
        )
        if not self._enabled or kv.broken or len(tokens) < LEAST or known or not self._holds(kv, len(tokens)):
            self._kv_cache.release(kv)
            return
        for entry in same:
            count = len(entry.token_ids)
            if _common(entry.token_ids, tokens) == count and self._replaces(kv, entry.kv, count):
                self._entries.remove(entry)
                self._kv_cache.release(entry.kv)
        self._kv_cache.shrink(kv, len(tokens))
        self._entries.append(_Entry(kv, tokens, principal))
        if self._most is not None and len(self._entries) > self._most:
            self._kv_cache.release(self._entries.pop(0).kv)


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:  # slices compare faster than a loop
            low = middle
        else:
            high = middle - 1
    return low
