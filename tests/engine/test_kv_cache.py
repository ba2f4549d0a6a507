"""Tests the pool of KV slots: ranges, their moves, the prefix cache, and errors at start."""

import random
from itertools import pairwise

import pytest
import torch

from dynatree.common.errors import StartupError
from dynatree.engine.kv import budget as kv_budget
from dynatree.engine.kv.budget import KVBudget
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.kv.locality import GLOBAL, Locality
from dynatree.engine.kv.prefix_cache import PrefixCache

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=4)


def kv_cache_of(size):
    return KVCache(SHAPE, size, torch.float32, torch.device("cpu"))


def fill(kv_cache, kv, value):
    kv_cache.slots(kv, kv.size).fill_(value)
    kv.used = kv.size


def test_ranges_never_overlap_and_keep_what_they_hold_wherever_they_are_moved():
    kv_cache, generator = kv_cache_of(100), random.Random(5)
    held = {}
    for step in range(1, 600):
        if held and generator.random() < 0.45:
            kv_cache.release(held.pop(generator.choice(list(held)))[0])
        size = generator.randint(1, 30)
        free = kv_cache.free_slots
        kv = kv_cache.reserve(size)
        assert (kv is not None) == (size <= free), "whatever fits by number fits"
        if kv is not None:
            fill(kv_cache, kv, step)
            held[step] = kv, size
        places = sorted((kv.start, kv.start + kv.size) for kv, _ in held.values())
        assert all(before[1] <= after[0] for before, after in pairwise(places))
        assert all(start >= 0 and stop <= 100 for start, stop in places)
        for value, (kv, size) in held.items():
            assert kv.size == size
            assert bool((kv_cache.slots(kv, size) == value).all())
    assert max(value for value in held) > 500


def reserve(cache, kv_cache, tokens, slots, principal="one"):
    kv, cached = cache.reserve(slots, tokens, principal)
    assert kv is not None
    for slot in range(cached, len(tokens)):
        kv_cache.slots(kv, slot + 1)[:, :, :, slot] = tokens[slot]
    kv.used = len(tokens)
    assert kv_cache.slots(kv, len(tokens))[0, 0, 0, :, 0].tolist() == list(tokens)
    return kv, cached


def test_a_prompt_that_begins_alike_is_not_read_again_and_another_principals_is():
    kv_cache = kv_cache_of(400)
    cache = PrefixCache(kv_cache)
    tokens = list(range(1, 61))
    kv, cached = reserve(cache, kv_cache, tokens, 100)
    assert cached == 0
    cache.release(kv, tokens, "one")
    assert cache.slots == 60
    for other, expected in ((tokens, 59), ([*tokens[:40], 7, 8], 40), (tokens[:10], 0), ([9, *tokens], 0)):
        kv, cached = reserve(cache, kv_cache, other, 100)
        assert cached == expected
        cache.release(kv, other[:1], "one")
    _, cached = reserve(cache, kv_cache, tokens, 100, principal="two")
    assert cached == 0


def test_cached_slots_are_free_for_the_asking_the_oldest_first():
    kv_cache = kv_cache_of(100)
    cache = PrefixCache(kv_cache)
    texts = [[start] * 20 for start in (1, 2, 3)]
    for text in texts:
        kv, _ = reserve(cache, kv_cache, text, 30)
        cache.release(kv, text, "one")
    assert cache.slots == 60
    kv, cached = reserve(cache, kv_cache, [*texts[0], 5], 60)  # the first entry is in use; the entries after it must go
    assert cached == 20
    cache.release(kv, [], "one")
    assert [entry.token_ids[0] for entry in cache._entries] == [1]
    kv, _ = cache.reserve(101, [1, 2], "one")
    assert kv is None


def test_entries_make_room_before_any_session_is_moved():
    """Moving sessions takes seconds in a large KV cache, and no pass runs meanwhile."""
    kv_cache = kv_cache_of(100)
    cache = PrefixCache(kv_cache)
    ranges = [reserve(cache, kv_cache, [start] * 20, size)[0] for start, size in ((1, 30), (2, 20), (3, 10), (4, 20))]
    cache.release(ranges[1], [2] * 20, "one")
    cache.release(ranges[3], [4] * 20, "one")
    kv, _ = reserve(cache, kv_cache, [5] * 20, 35)
    assert [each.start for each in (ranges[0], ranges[2], kv)] == [0, 50, 60]
    assert [entry.token_ids[0] for entry in cache._entries] == [2], "the older one is not in the way"
    fill(kv_cache, kv, 9)
    kv.used = 25
    cache.release(ranges[0], [], "one")
    last, _ = reserve(cache, kv_cache, [6], 52)  # 55 slots are free, but not contiguous
    assert (ranges[2].start, kv.start, last.start) == (0, 10, 45)
    assert not cache.slots
    assert bool((kv_cache.slots(kv, 25) == 9).all())


def test_the_fewest_of_the_oldest_entries_make_room_and_few_gaps_are_looked_for(monkeypatch):
    """An opening waits for it, and with it every session."""
    generator = random.Random(4)
    kv_cache = kv_cache_of(20_000)
    cache = PrefixCache(kv_cache)
    for start in range(800):
        text = [start] * generator.randrange(16, 26)
        kv, _ = reserve(cache, kv_cache, text, len(text))
        cache.release(kv, text, "one")
    generator.shuffle(cache._entries)
    ranges = [entry.kv for entry in cache._entries]
    gaps = (kv_cache.gap(6000, set(ranges[:count])) for count in range(len(ranges)))
    start = next(each for each in gaps if each is not None)
    kept = [each for each in ranges if each.start + each.size <= start or each.start >= start + 6000]
    gap, looked = KVCache.gap, []
    monkeypatch.setattr(KVCache, "gap", lambda *given: looked.append(given) or gap(*given))
    reserve(cache, kv_cache, [900], 6000)
    assert [entry.kv for entry in cache._entries] == kept
    assert 0 < len(kept) < len(ranges)
    assert len(looked) <= 14


def test_of_entries_with_the_same_prefix_the_last_used_one_is_used_again():
    kv_cache = kv_cache_of(200)
    cache = PrefixCache(kv_cache)
    shared = list(range(30))
    for end in (100, 101, 102):
        kv, _ = reserve(cache, kv_cache, [*shared, end], 31)
        cache.release(kv, [*shared, end], "one")
    kv, cached = reserve(cache, kv_cache, [*shared, 103, 104], 40)
    assert cached == 30
    assert [entry.token_ids[-1] for entry in cache._entries] == [100, 101, 102]


def test_what_begins_with_a_cached_text_takes_its_place():
    kv_cache = kv_cache_of(300)
    cache = PrefixCache(kv_cache)
    tokens = list(range(80))
    for length in (30, 80, 50):
        kv, _ = reserve(cache, kv_cache, tokens[:length], 90)
        cache.release(kv, tokens[:length], "one")
    assert [len(entry.token_ids) for entry in cache._entries] == [80]
    assert kv_cache.free_slots == 220


@pytest.mark.parametrize(
    ("asked", "sessions", "expected"),
    [
        (None, 4, 400),
        (None, 10**9, "half"),
        (None, 10**8, "with a copy"),
        (150, 4, 150),
        (99, 4, "--kv-tokens is 99"),
        (10**12, 4, "are free"),
    ],
)
def test_the_pool_is_sized_before_it_is_made(monkeypatch, asked, sessions, expected):
    monkeypatch.setattr("dynatree.engine.kv.budget.free_memory", lambda device: 10**9)
    copy_bytes = 200_000_000 if expected == "with a copy" else 0
    budget = KVBudget(sessions, session_slots=100, slot_bytes=1000, device=torch.device("cpu"), copy_bytes=copy_bytes)
    sizes = {"half": 500_000, "with a copy": 200_000}  # the copy has a KV cache too
    if isinstance(expected, str) and expected not in sizes:
        with pytest.raises(StartupError, match=expected):
            budget.slots(asked)
    else:
        assert budget.slots(asked) == sizes.get(expected, expected)


def test_a_context_that_cannot_fit_is_refused(monkeypatch):
    monkeypatch.setattr("dynatree.engine.kv.budget.free_memory", lambda device: 10**5)
    with pytest.raises(StartupError, match="--max-context"):
        KVBudget(4, session_slots=100, slot_bytes=1000, device=torch.device("cpu")).slots(None)


GROUP_FILES = {
    2: ("memory.max", "memory.current", "", "0::/box"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "9:memory:/box\n0::/"),
}


@pytest.mark.parametrize("where", ["its own group", "the root that a container sees"])
@pytest.mark.parametrize("version", GROUP_FILES)
def test_memory_is_free_within_the_control_groups_limit(tmp_path, monkeypatch, version, where):
    """Reclaimable file pages count as free, in control groups of both versions.

    This includes pages that were read twice, like those of a checkpoint larger than the group's limit.
    """
    limit, held, prefix, own = GROUP_FILES[version]
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(kv_budget, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(kv_budget, "_CGROUP", tmp_path)
    folder = tmp_path / "memory" if version == 1 else tmp_path
    if where == "its own group":
        folder /= "box"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit).write_text("1000000\n")
    (folder / held).write_text("700000\n")
    (folder / "memory.stat").write_text(f"cache 5\n{prefix}inactive_file 50000\n{prefix}active_file 60000\n")
    assert kv_budget.free_memory(torch.device("cpu")) == 350_000, "active ones are what the process runs from"
    active = kv_budget._RUNNING + 40_000
    (folder / "memory.stat").write_text(f"{prefix}inactive_file 50000\n{prefix}active_file {active}\n")
    assert kv_budget.free_memory(torch.device("cpu")) == 390_000
    (folder / limit).write_text("max\n")
    assert kv_budget.free_memory(torch.device("cpu")) > 10**8


def windowed(size):
    """A KV cache with a window of 300 tokens in the second of two layers; a slot of a head takes 128 bytes."""
    shape = KVShape(2, 3, 32, (GLOBAL, Locality(window=300)))
    return KVCache(shape, size, torch.float32, torch.device("cpu"))


def test_memory_below_a_window_is_returned_and_nothing_else_changes():
    kv_cache = windowed(3000)
    before, kv, behind = (kv_cache.reserve(size) for size in (70, 2000, 800))
    for value, each in enumerate((before, kv, behind), 1):
        fill(kv_cache, each, value)
    for position in range(0, 2000, 37):
        kv_cache.forget(kv, position)
        assert kv.forgotten <= max(position - 299, 0)
        held = kv_cache.slots(kv, 2000)
        assert bool((held[0] == 2).all()), "a layer without a window keeps all"
        assert bool((held[1, :, :, kv.forgotten :] == 2).all())
    pages = -(-70 // 32) * 32 - 70  # slots of the first page, which another range shares
    assert kv.forgotten > 1400
    assert bool((held[1, :, :, pages : kv.forgotten - 32] == 0).all()), "what is returned reads as zeros"
    for value, each in ((1, before), (3, behind)):
        assert bool((kv_cache.slots(each, each.size) == value).all())
    kv_cache.release(before)
    kv_cache.release(behind)
    assert kv_cache.reserve(1000) is not None, "the range moves to make room"
    assert kv.start == 0
    assert bool((kv_cache.slots(kv, 2000)[1, :, :, kv.forgotten :] == 2).all())
    assert bool((kv_cache.slots(kv, 2000)[0] == 2).all())


def test_a_prefix_is_reused_only_if_all_that_its_next_token_sees_is_held():
    kv_cache = windowed(4000)
    cache = PrefixCache(kv_cache)
    tokens = list(range(1, 1201))

    def session(prompt, grown):
        kv, cached = cache.reserve(grown, prompt, "one")
        kv_cache.slots(kv, grown)[:, :, :, cached:] = torch.arange(cached, grown)[:, None] + 1.0
        kv.used = grown
        seen = kv_cache.slots(kv, cached)[1, 0, 0, max(cached - 299, 0) :, 0].tolist()
        assert seen == list(range(max(cached - 299, 0) + 1, cached + 1))
        kv_cache.forget(kv, grown)
        cache.release(kv, tokens[:grown], "one")
        return cached

    assert session(tokens[:100], 200) == 0
    assert session(tokens[:300], 1000) == 200
    assert session([*tokens[:150], 5000], 160) == 150, "the short session's entry is still there"
    assert session([*tokens[:700], 5000], 720) == 200, "the long session has forgotten what token 700 sees"
    assert session([*tokens[:1000], 5000], 1100) == 1000
