"""Tests the kernels of recurrent layers against torch, and for equal bits of a token in any tree and company."""

import random
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynatree.engine.cpu import native_recurrence
from dynatree.engine.cpu.native_recurrence import fold, gated_delta, linear_attention, short_conv
from dynatree.engine.forward.recurrent_batch import RecurrentBatch
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.recurrent.memory import KEPT, RecurrentSize
from dynatree.engine.recurrent.recorded import Recorded
from dynatree.engine.recurrent.scan import Scan
from tests.support.kernel_builds import compiled

pytestmark = compiled
# derandomize: the bits of plain decoding are those of a tree almost always, and a test must not depend on luck
some = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
sizes = st.tuples(  # groups, heads of a group, dk, dv
    st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 40), st.integers(1, 70)
)
seeds = st.integers(0, 2**32 - 1)


def delta(q, k, v, g, beta, kept, ancestors, state):
    return gated_delta(q, k, v, g, beta, kept, ancestors, state)


def linear(q, k, v, g, beta, kept, ancestors, state):
    return linear_attention(q, k, v, g, kept, ancestors, state)


each_rule = pytest.mark.parametrize("rule", [delta, linear])


def drawn(generator, count, groups, shared, dk, dv):
    """Queries, keys, values, log-decays and betas of `count` tokens."""
    heads = groups * shared
    q, k = torch.nn.functional.normalize(
        torch.randn(2, count, groups, dk, generator=generator, dtype=torch.float64), dim=-1
    )
    v = torch.randn(count, heads, dv, generator=generator, dtype=torch.float64)
    g, beta = torch.rand(2, count, heads, generator=generator, dtype=torch.float64)
    g = torch.where(torch.rand(count, heads, generator=generator) < 0.1, 100.0 * g, g)  # some forget everything
    return q, k, v, -g, 2.0 * beta


def parents_of(chooser, nodes, chained):
    """A random tree of `nodes` tokens, whose first one is its root; sometimes a forest."""
    lowest = chooser.choice((0, 0, -1))
    return [-1] + [
        node - 1 if chooser.random() < chained else chooser.randint(lowest, node - 1) for node in range(1, nodes)
    ]


def ancestors_of(parents, kept):
    found = torch.zeros(len(parents), kept + len(parents), dtype=torch.bool)
    found[:, :kept] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            found[node] |= found[parent]
            found[node, kept + parent] = True
    return found


def path_to(parents, node):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@pytest.fixture
def in_torch(monkeypatch):
    """Computes a function without kernels."""

    def run(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(native_recurrence, "kernels", lambda: None)
            return function(*args)

    return run


def assert_near(ours, right):
    assert ours.shape == right.shape
    assert (ours - right).abs().max() <= 1e-13 * right.abs().max().clamp(min=1.0)


@pytest.mark.usefixtures("build")
@each_rule
@given(
    size=sizes, nodes=st.integers(1, 70), kept=st.sampled_from([0, 1, 5, 64, 90]), chained=st.floats(0, 1), seed=seeds
)
@some
def test_a_tree_equals_that_of_torch_and_each_token_has_the_bits_of_its_path_alone(
    in_torch, rule, size, nodes, kept, chained, seed
):
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    _, *records, _ = drawn(generator, kept, *size)
    tokens = drawn(generator, nodes, *size)
    state = torch.randn(size[0] * size[1], *size[2:], generator=generator, dtype=torch.float64)
    parents = parents_of(chooser, nodes, chained)
    given_ = (*tokens, tuple(records), ancestors_of(parents, kept), state)
    outputs, new = rule(*given_)
    for ours, right in zip((outputs, *new), (lambda x: (x[0], *x[1]))(in_torch(rule, *given_)), strict=True):
        assert_near(ours, right)
    if kept:
        assert_near(fold(state, tuple(records)), in_torch(fold, state, tuple(records)))
    for node in chooser.sample(range(nodes), min(nodes, 5)):
        path = path_to(parents, node)
        chain = torch.ones(len(path), kept + len(path), dtype=torch.bool).tril(kept - 1)
        alone, own = rule(*(each[path] for each in tokens), tuple(records), chain, state)
        assert torch.equal(alone, outputs[path])
        assert all(torch.equal(one, each[path]) for one, each in zip(own, new, strict=True))
        before = len(path) - 1  # in its own pass, behind the records of its ancestors
        last, _ = rule(
            *(each[path[-1:]] for each in tokens),
            tuple(torch.cat((old, each[:before])) for old, each in zip(records, own, strict=True)),
            torch.ones(1, kept + before + 1, dtype=torch.bool).tril(kept + before - 1),
            state,
        )
        assert torch.equal(last[0], outputs[node])


def scan_of(rule, size):
    groups, shared, dk, dv = size
    _, *none, _ = drawn(torch.Generator(), 0, *size)
    start = partial(torch.zeros, groups * shared, dk, dv, dtype=torch.float64)
    return Scan("a rule", rule, fold, start, tuple(none))


class Passes:
    """The passes of several sessions, whose tokens all have different numbers."""

    def __init__(self, rule, size, sessions):
        shape = KVShape(layers=1, kv_heads=1, head_dim=2, indices=(0,), recurrent=RecurrentSize(8, 8))
        self.cache = KVCache(shape, 4000, torch.float32, torch.device("cpu"))
        self.sessions = [self.cache.reserve(4000 // sessions) for _ in range(sessions)]
        self._scan = scan_of(rule, size)

    def run(self, segments, tokens):
        recurring = RecurrentBatch(segments)
        outputs = recurring.scan(0, self._scan, [torch.cat(each) for each in zip(*tokens, strict=True)])
        recurring.commit()
        return outputs.split([len(each.token_ids) for each in segments])


@pytest.mark.usefixtures("build")
@each_rule
@given(size=sizes, seed=seeds)
@some
def test_trees_of_ragged_sessions_have_the_bits_of_plain_decoding(rule, size, seed):
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [chooser.choice((1, 30, 64, 70, 140)) for _ in range(3)]
    texts = [drawn(generator, length + 100, *size) for length in lengths]
    plain, trees = Passes(rule, size, 3), Passes(rule, size, 3)
    wanted = []
    for kv, length, text in zip(plain.sessions, lengths, texts, strict=True):
        piece = Segment(kv, 0, [1] * length, range(length))
        rows = [plain.run([piece], [[each[:length] for each in text]])[0]]
        for place in range(length, length + 60):
            step = Segment(kv, place, [1], [place])
            rows += plain.run([step], [[each[place : place + 1] for each in text]])
        wanted.append(torch.cat(rows))
    starts = [0, 0, 0]
    for _ in range(9):
        segments, tokens, paths = [], [], []
        for kv, start, length, text in zip(trees.sessions, starts, lengths, texts, strict=True):
            if not start:
                segments.append(Segment(kv, 0, [1] * length, range(length)))
                tokens.append([each[:length] for each in text])
                paths.append(range(length))
                continue
            parents = parents_of(chooser, chooser.randint(1, 12), 0.7)
            parents = [max(each, 0) if place else -1 for place, each in enumerate(parents)]
            path = path_to(parents, chooser.randrange(len(parents)))
            own = list(drawn(generator, len(parents), *size))  # other tokens than the text's, except on the path
            for each, all_ in zip(own, text, strict=True):
                each[path] = all_[start : start + len(path)]
            mask = ancestor_mask([each - 1 for each in parents[1:]]) if len(parents) > 1 else None
            segments.append(Segment(kv, start, [1] * len(parents), range(len(parents)), mask=mask))
            tokens.append(own)
            paths.append(path)
        for session, (rows, path) in enumerate(zip(trees.run(segments, tokens), paths, strict=True)):
            right = wanted[session][starts[session] : starts[session] + len(path)][: len(rows)]
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(rows[list(path)][: len(right)].to(dtype), right.to(dtype))
            if starts[session]:
                kv, root = trees.sessions[session], starts[session]
                trees.cache.move(kv, [root + node for node in path[1:]], root + 1)
            starts[session] += len(path)


@pytest.mark.usefixtures("build")
def test_a_session_has_the_same_bits_beside_others():
    size = (2, 2, 13, 20)
    texts = [drawn(torch.Generator().manual_seed(seed), 80, *size) for seed in range(3)]
    alone, together = Passes(delta, size, 3), Passes(delta, size, 3)
    for start, stop in ((0, 70), *((place, place + 1) for place in range(70, 80))):
        pieces = [[each[start:stop] for each in text] for text in texts]
        pass_ = [Segment(kv, start, [1] * (stop - start), range(start, stop)) for kv in together.sessions]
        own = [Segment(kv, start, [1] * (stop - start), range(start, stop)) for kv in alone.sessions]
        rows = together.run(pass_, pieces)
        for segment, piece, row in zip(own, pieces, rows, strict=True):
            assert torch.equal(alone.run([segment], [piece])[0], row)


@each_rule
def test_all_builds_give_the_same_bits(rule, on_each_build):
    tokens = drawn(torch.Generator().manual_seed(1), 150, 2, 3, 27, 45)
    state = torch.zeros(6, 27, 45, dtype=torch.float64)
    found = on_each_build(lambda: rule(*tokens, tuple(each[:0] for each in tokens[1:4]), None, state)[0])
    if len(found) == 1:
        pytest.skip("this CPU runs a single build")
    assert len({bytes(each.numpy().tobytes()) for each in found.values()}) == 1, list(found)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    channels=st.integers(1, 600), width=st.integers(1, 6), nodes=st.integers(1, 40), kept=st.integers(0, 9), seed=seeds
)
@some
def test_a_convolution_has_the_bits_of_torch(in_torch, dtype, channels, width, nodes, kept, seed):
    chooser, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = ((nodes, channels), (channels, width), (channels,), (kept, channels), (width - 1, channels))
    x, weight, bias, records, state = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    parents = parents_of(chooser, nodes, 0.5)
    ancestors = chooser.choice((ancestors_of(parents, kept), None))
    arguments = (x, weight, chooser.choice((bias, None)), records, ancestors, state)
    ours, right = short_conv(*arguments), in_torch(short_conv, *arguments)
    assert ours.dtype == dtype
    assert torch.equal(ours, right)


@pytest.mark.usefixtures("build")
def test_numbers_that_are_not_finite_reach_no_other_branch():
    tokens = drawn(torch.Generator().manual_seed(2), 5, 1, 2, 8, 8)
    tokens[2][2] = float("nan")
    none, state = tuple(each[:0] for each in tokens[1:4]), torch.ones(2, 8, 8, dtype=torch.float64)
    outputs, _ = delta(*tokens, none, ancestors_of([-1, 0, 0, 1, 1], 0), state)
    assert outputs[[0, 1, 3, 4]].isfinite().all()
    assert outputs[2].isnan().all()


def test_tensors_that_do_not_belong_together_are_refused():
    q, k, v, g, beta = drawn(torch.Generator(), 3, 2, 2, 8, 8)
    none, state = (k[:0], v[:0], g[:0]), torch.zeros(4, 8, 8, dtype=torch.float64)
    ancestors = torch.zeros(3, 3, dtype=torch.bool)
    for wrong in (
        (q[:2], k, v, g, beta, none, ancestors, state),
        (q, k[..., :4], v, g, beta, none, ancestors, state),
        (q, k, v, g, beta[:, :3], none, ancestors, state),
        (q, k, v, g, beta, none, ancestors[:, :2], state),
        (q, k, v, g, beta, (k, v[:1], g), ancestors, state),
        (q.float(), k, v, g, beta, none, ancestors, state),
        (q, k, v, g, beta, none, ancestors, state[:3]),
    ):
        with pytest.raises(ValueError, match=r"expected|multiple"):
            native_recurrence.recur(*wrong)
    with pytest.raises(ValueError, match="expected"):
        native_recurrence.fold(state, (k, v, g[:2]))
    x, weight = torch.zeros(3, 10), torch.zeros(10, 4)
    for state in (torch.zeros(2, 10), torch.zeros(3, 9)):
        with pytest.raises(ValueError, match="expected"):
            native_recurrence.convolve(x, weight, None, x[:0], None, state)


def test_records_grow_in_place_unless_others_have_grown_them():
    def rows(*numbers):
        return (torch.tensor(numbers), torch.tensor(numbers)[:, None] * 10)

    def read(recorded):
        first, second = recorded.joined()
        assert torch.equal(first * 10, second[:, 0])
        return first.tolist()

    one = Recorded(rows(1, 2)).settled()
    left, right = one.followed_by(rows(3)), one.followed_by(rows(4, 5))
    settled, other = left.settled(), right.settled()
    assert (read(one), read(left), read(settled), read(other)) == ([1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 4, 5])
    assert settled.room is one.room
    assert other.room is not one.room
    assert read(right.taken([0, 1, 3])) == [1, 2, 5]
    assert right.taken([0, 1, 3]).room is one.room, "an accepted path copies its own records only"
    assert read(right.taken([0, 3, 1])) == [1, 5, 2]
    assert read(right.taken([0])) == [1]
    assert read(right.taken([])) == []
    grown = settled
    for number in range(4, 4 + 2 * KEPT):
        grown = grown.followed_by(rows(number)).settled()
    assert read(grown) == list(range(1, 4 + 2 * KEPT))
    assert read(settled) == [1, 2, 3]


def test_records_hold_no_memory_of_other_sessions():
    both = torch.zeros(100, 3)
    assert Recorded(both[:0]).followed_by((both[:2],)).new[0].untyped_storage().nbytes() == 24
