"""Tests what recurrent layers keep of sessions: its moves, copies and folds, against a scan over the whole sequence."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatree.common.errors import StartupError
from dynatree.engine.forward.recurrent_batch import RecurrentBatch
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.engine.kv.budget import KVBudget
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.kv.prefix_cache import PrefixCache
from dynatree.engine.recurrent.memory import KEPT, RecurrentSize
from dynatree.engine.recurrent.scan import Scan

SHAPE = KVShape(layers=1, kv_heads=1, head_dim=2, indices=(0,), recurrent=RecurrentSize(8, 8))
DECAY = 0.75


def compute(x, kept, ancestors, state):
    """A token's output is the sum of its path's numbers, each decayed once for each later token, exactly in float64."""
    m, n = len(kept[0]), len(x)
    ancestors = torch.ones(n, m + n, dtype=torch.bool).tril(m - 1) if ancestors is None else ancestors
    seen = ancestors | torch.eye(n, m + n, dtype=torch.bool).roll(m, 1)
    later = seen.flip(1).cumsum(1).flip(1) - 1  # tokens of the path behind each one
    weights = torch.where(seen, DECAY ** later.double(), 0.0)
    return weights @ torch.cat((kept[0], x)) + state * DECAY ** seen.sum(1, keepdim=True).double(), (x,)


def fold(state, records):
    for each in records[0]:
        state = DECAY * state + each
    return state


SCAN = Scan(
    "a sum", compute, fold, lambda: torch.zeros(1, dtype=torch.float64), (torch.zeros(0, 1, dtype=torch.float64),)
)


def numbers(tokens):
    return torch.tensor(tokens, dtype=torch.float64)[:, None]


def run(segments):
    """Run one pass; return each segment's outputs."""
    recurring = RecurrentBatch(segments)
    outputs = recurring.scan(0, SCAN, [numbers([token for each in segments for token in each.token_ids])])
    recurring.commit()
    return outputs.split([len(each.token_ids) for each in segments])


def expected(path):
    later = torch.arange(len(path) - 1, -1, -1, dtype=torch.float64)
    return (DECAY**later * torch.tensor(path, dtype=torch.float64)).sum(0, keepdim=True)


def kv_cache_of(size):
    return KVCache(SHAPE, size, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(4))
def test_rounds_of_random_trees_give_each_path_its_own_outputs(seed):
    chooser = random.Random(seed)
    kv_cache = kv_cache_of(8000)
    sessions = [(kv_cache.reserve(2000), [], []) for _ in range(3)]  # range, committed tokens, prompt left
    for _, _, prompt in sessions:
        prompt += [chooser.randint(1, 9) for _ in range(chooser.choice([1, 30, 64, 65, 200, 300]))]
    for _ in range(60):
        segments, paths, chosen = [], [], []
        for kv, committed, prompt in sessions:
            if prompt:
                size = chooser.randint(1, min(len(prompt), 150))
                piece, prompt[:size] = prompt[:size], []
                segments.append(Segment(kv, len(committed), piece, range(len(committed), len(committed) + size)))
                paths.append([[*committed, *piece[: place + 1]] for place in range(size)])
                chosen.append(None)
                continue
            parents = [chooser.randint(-1, node - 1) for node in range(chooser.randint(0, 12))]
            tokens = [chooser.randint(1, 9) for _ in range(1 + len(parents))]
            own = [[*committed, tokens[0]]]
            for node, parent in enumerate(parents):
                own.append([*own[parent + 1], tokens[node + 1]])
            mask = ancestor_mask(parents) if parents else None
            segments.append(Segment(kv, len(committed), tokens, range(len(tokens)), mask=mask))
            paths.append(own)
            accepted, node = [], chooser.randint(-1, len(parents) - 1)
            while node >= 0:
                accepted, node = [node, *accepted], parents[node]
            chosen.append((tokens, accepted))
        for outputs, own in zip(run(segments), paths, strict=True):
            torch.testing.assert_close(outputs, torch.stack([expected(path) for path in own]), rtol=1e-12, atol=0)
        for (kv, committed, _), segment, round_ in zip(sessions, segments, chosen, strict=True):
            root = len(committed)
            if round_ is None:  # a piece of the prompt
                committed += segment.token_ids
                continue
            tokens, accepted = round_
            committed += [tokens[0], *(tokens[node + 1] for node in accepted)]
            kv_cache.move(kv, [root + 1 + node for node in accepted], root + 1)
            assert kv.memory.stop == len(committed)
        assert all(kv.memory.count <= 2 * KEPT + 13 for kv, _, _ in sessions)


def test_a_pass_that_fails_changes_nothing_and_may_be_tried_again():
    kv_cache = kv_cache_of(300)
    kv = kv_cache.reserve(300)
    run([Segment(kv, 0, [1] * 130, range(130))])
    before = kv.memory
    failed = RecurrentBatch([Segment(kv, 130, [2], [130])])
    failed.scan(0, SCAN, [numbers([2])])
    assert kv.memory is before
    (outputs,) = run([Segment(kv, 130, [2], [130])])
    torch.testing.assert_close(outputs[0], expected([1] * 130 + [2]), rtol=1e-12, atol=0)


def test_a_session_never_continues_from_a_state_that_holds_later_tokens():
    kv_cache = kv_cache_of(400)
    kv = kv_cache.reserve(400)
    run([Segment(kv, 0, [1] * 200, range(200))])
    with pytest.raises(ValueError, match="can continue from slots 136 to 200 only"):
        run([Segment(kv, 100, [2], [100])])
    with pytest.raises(ValueError, match="can continue from slots 136 to 200 only"):
        run([Segment(kv, 201, [2], [201])])
    (outputs,) = run([Segment(kv, 150, [2], [150])])
    torch.testing.assert_close(outputs[0], expected([1] * 150 + [2]), rtol=1e-12, atol=0)
    (outputs,) = run([Segment(kv, 0, [3], [0])])
    assert outputs.item() == 3.0, "a range is begun again"


def test_a_prefix_is_reused_from_a_state_that_was_kept_and_not_before_it():
    kv_cache = kv_cache_of(4000)
    cache = PrefixCache(kv_cache, most=2)
    tokens = list(range(1, 401))

    def session(prompt, grown):
        """Read a prompt and `grown` more tokens; return the number of prompt tokens that were cached."""
        kv, cached = cache.reserve(len(prompt) + grown, prompt, "one")
        outputs = run([Segment(kv, cached, prompt[cached:], range(cached, len(prompt)))])[0]
        torch.testing.assert_close(outputs[-1], expected(prompt), rtol=1e-12, atol=0)
        kv.checkpoint = kv.memory
        for place in range(grown):
            run([Segment(kv, len(prompt) + place, [7], [0])])
        kv.used = len(prompt) + grown
        cache.release(kv, [*prompt, *[7] * grown], "one")
        return cached

    assert session(tokens[:200], 100) == 0
    assert session([*tokens[:200], *[7] * 100, 5], 0) == 300, "the next turn"
    assert session(tokens[:200], 0) == 199, "the same prompt again"
    assert session([*tokens[:150], 5], 0) == 150, "within what is kept at the prompt's end"
    assert session([*tokens[:100], 5], 0) == 0, "before it"
    assert len(cache._entries) == 2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(17, 150), st.integers(0, 70)), min_size=2, max_size=4))
@settings(max_examples=12, deadline=None)
def test_a_prompt_is_found_again_whatever_longer_and_shorter_texts_are_cached(sessions):
    kv_cache = kv_cache_of(10_000)
    cache = PrefixCache(kv_cache)

    def session(book, length, grown):
        """A text begins with every shorter one of its book."""
        kv, cached = cache.reserve(length + grown, [book] * length, "one")
        run([Segment(kv, cached, [book] * (length - cached), range(cached, length))])
        kv.checkpoint = kv.memory
        for place in range(length, length + grown):
            run([Segment(kv, place, [book], [0])])
        cache.release(kv, [book] * (length + grown), "one")

    for count, each in enumerate(sessions, 1):
        session(*each)
        for book, length, _ in sessions[:count]:
            kv, cached = cache.reserve(length, [book] * length, "one")
            kv_cache.release(kv)
            assert cached == length - 1
    entries = []
    for _ in range(2):
        for each in sessions:
            session(*each)
        entries.append(len(cache._entries))
    assert entries[0] == entries[1], "sessions that are repeated take no further room"


def test_numbers_that_are_not_finite_reach_no_other_token():
    kv_cache = kv_cache_of(20)
    kv = kv_cache.reserve(20)
    recurring = RecurrentBatch([Segment(kv, 0, [1, 2, 3], range(3), mask=ancestor_mask([-1, -1]))])
    outputs = recurring.scan(0, SCAN, [numbers([1.0, float("nan"), 3.0])])
    assert recurring.faulty() == [1]
    assert outputs[2].item() == DECAY * 1 + 3
    recurring.commit()
    assert all(each.isfinite().all() for _, records in kv.memory.layers.values() for each in records.joined())


def test_states_are_counted_before_slots(monkeypatch):
    monkeypatch.setattr("dynatree.engine.kv.budget.free_memory", lambda device: 10**9)
    cpu = torch.device("cpu")
    assert KVBudget(4, 100, 1000, cpu, session_bytes=2 * 10**7).slots(None) == 400
    assert KVBudget(10**9, 100, 1000, cpu).slots(None) == 500_000
    assert KVBudget(10, 10**6, 100, cpu, session_bytes=2 * 10**7).slots(None) == 4_000_000
    assert KVBudget(10, 10**6, 100, cpu, session_bytes=2 * 10**7, pass_bytes=10**8).slots(None) == 3_500_000
    assert KVBudget(4, 100, 0, cpu, session_bytes=2 * 10**7).slots(None) == 400, "a model without attention"


def test_as_many_sessions_are_served_as_states_fit(monkeypatch):
    """The defaults refused a model of 0.8 billion parameters on a machine of 24 GiB."""
    monkeypatch.setattr("dynatree.engine.kv.budget.free_memory", lambda device: 10**9)
    cpu = torch.device("cpu")
    for budget, sessions in (
        (KVBudget(30, 100, 1000, cpu, session_bytes=2 * 10**7), 25),
        (KVBudget(30, 100, 1000, cpu, session_bytes=2 * 10**7, pass_bytes=10**8), 20),
        (KVBudget(4, 100, 1000, cpu, session_bytes=2 * 10**7), 4),
    ):
        assert budget.fitting_sessions == sessions
        assert budget.slots(None) == 100 * sessions
    with pytest.raises(StartupError, match=r"one session .* take 0.6 GiB, .* 0.5 GiB of the free"):
        KVBudget(30, 100, 1000, cpu, session_bytes=6 * 10**8).slots(None)


@pytest.mark.parametrize("prompt", [100, 1000])
@pytest.mark.parametrize("prefixes", [False, True])
def test_all_that_sessions_hold_is_counted(prefixes, prompt):
    kv_cache, rows = kv_cache_of(4000), 200
    cache = PrefixCache(kv_cache, enabled=prefixes)
    size = RecurrentSize(8, 8)
    for text in range(2):
        kv, _ = cache.reserve(1500, [text] * prompt, "one")
        run([Segment(kv, 0, [text] * prompt, range(prompt))])
        cache.note_prompt(kv)
        for place in range(prompt, prompt + 120):
            run([Segment(kv, place, [7], [0])])
        before = kv.memory
        run([Segment(kv, prompt + 120, [7] * rows, range(rows), mask=ancestor_mask([-1] * (rows - 1)))])
        held = [before, kv.memory, kv.checkpoint]
        held += [each for entry in cache._entries for each in (entry.kv.memory, entry.kv.checkpoint)]
        storages = [
            each.untyped_storage()
            for memory in held
            if memory
            for state, records in memory.layers.values()
            for each in (state, *records.new, *records.room.tensors)
        ]
        bytes_held = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
        assert bytes_held <= size.session_bytes(prefixes) + size.pass_bytes(rows)
        assert bytes_held > size.pass_bytes(rows)
        assert (kv.checkpoint is not None) == prefixes
        kv_cache.move(kv, [], prompt + 121)
        cache.release(kv, [*[text] * prompt, *[7] * 121], "one")
