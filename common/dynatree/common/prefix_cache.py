"""The prefix cache: what ended sessions leave in the KV arena, until its slots are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.engine.arena import KVArena
from dynatree.common.kv_range import KVRange

LEAST = 16  # tokens; fewer are not worth a range of their own


@dataclass(frozen=True, eq=False)
class _Entry:
    """Tokens whose keys and values a range holds, and whose prompt they came from."""

    kv: KVRange
    token_ids: tuple[int, ...]
    principal: str


class PrefixCache:
    """Reserves ranges of the arena and takes them back. A prompt that begins like an ended session's is not read again.

    A session finds what the same principal's sessions left, and nothing else: how long a prompt takes to read would
    tell of others' prompts. The entry that was used longest ago goes first when slots are wanted.

    Args:
        arena: Whose ranges it hands out; nobody else reserves any.
        enabled: Whether anything is kept at all.
        only_prompts: Whether sessions leave their prompt alone. In 16 bits a token's keys and values may depend on the
            forward that computed them, and a prompt's are to be those of a prompt's forward (but see
            `Engine.batch_invariant`).
    """

    def __init__(self, arena: KVArena, *, enabled: bool = True, only_prompts: bool = False) -> None:
        self.only_prompts = only_prompts
        self._arena = arena
        self._enabled = enabled
        self._entries: list[_Entry] = []  # used last last

    @property
    def slots(self) -> int:
        """Slots that entries hold; they are free for the asking."""
        return sum(entry.kv.size for entry in self._entries)

    def reserve(self, slots: int, prompt_ids: Sequence[int], principal: str) -> tuple[KVRange | None, int]:
        """A range of `slots` slots, and how many of its first ones hold the prompt's first tokens already.

        None where too few slots are free. The last token of a prompt is never cached: its logits are wanted.
        """
        prompt = tuple(prompt_ids[:-1])
        found = max(
            (entry for entry in self._entries if entry.principal == principal),
            key=lambda entry: _common(entry.token_ids, prompt),
            default=None,
        )
        cached = 0 if found is None else _common(found.token_ids, prompt)
        if found is not None and cached >= LEAST:
            self._entries.remove(found)  # and back again, as the one that was used last
            self._entries.append(found)
        else:
            found, cached = None, 0
        self._make_room(slots)
        kv = self._arena.reserve(slots)
        if kv is None or found is None or found not in self._entries:
            return kv, 0
        self._arena.copy(found.kv, kv, cached)
        return kv, cached

    def _make_room(self, slots: int) -> None:
        """Evict the entries in the way of a range, the oldest ones that will do; where none will, as many as it takes.

        Moving other ranges together would keep more entries, and hold every session up meanwhile.
        """
        evicted: list[_Entry] = []
        start = self._arena.gap(slots)
        while start is None and len(evicted) < len(self._entries):
            evicted = self._entries[: len(evicted) + 1]
            start = self._arena.gap(slots, [entry.kv for entry in evicted])
        if start is not None:
            stop = start + slots
            evicted = [each for each in evicted if each.kv.start < stop and each.kv.start + each.kv.size > start]
        for entry in evicted:
            if start is None and self._arena.free_slots >= slots:
                break
            self._entries.remove(entry)
            self._arena.release(entry.kv)

    def release(self, kv: KVRange, token_ids: Sequence[int], principal: str) -> None:
        """Take a range back whose first slots hold these tokens, and keep it if nothing kept begins with them.

        One that is broken is not kept.
        """
        tokens = tuple(token_ids)
        same = [entry for entry in self._entries if entry.principal == principal]
        known = any(_common(entry.token_ids, tokens) == len(tokens) for entry in same)
        if not self._enabled or kv.broken or len(tokens) < LEAST or known:
            self._arena.release(kv)
            return
        for entry in same:
            if _common(entry.token_ids, tokens) == len(entry.token_ids):
                self._entries.remove(entry)
                self._arena.release(entry.kv)
        self._arena.shrink(kv, len(tokens))
        self._entries.append(_Entry(kv, tokens, principal))


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:  # slices compare faster than a loop
            low = middle
        else:
            high = middle - 1
    return low
