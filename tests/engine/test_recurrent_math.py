"""Tests recurrent layers on trees against their recurrence, token by token in float64, and against transformers."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn, mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from dynatree.engine.forward.recurrent_batch import RecurrentBatch
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.recurrent import gated_delta, linear_attention, selective_scan, short_conv
from dynatree.engine.recurrent.memory import KEPT
from dynatree.engine.recurrent.scan import Scan

HEADS, GROUPS, KEY, VALUE, WIDTH = 4, 2, 16, 24, 4
CHANNELS, STATES = 12, 8
ALLOWED = 1e-5  # of the largest output or number in the state; float32 rounds to 6e-8
DECAYS = {"near 0": (10.0, 200.0), "near 1": (0.0, 1e-4), "any": (0.0, 3.0)}  # of minus their logarithms


def drawn(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def log_decays(generator, decays, *shape):
    """Draw log-decays of one kind, or each of any kind."""
    kinds = [DECAYS[decays]] if decays in DECAYS else list(DECAYS.values())
    low, high = torch.tensor(kinds, dtype=torch.float64)[torch.randint(len(kinds), shape, generator=generator)].unbind(
        -1
    )
    return -(low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64))


class LinearAttention:
    """Mamba-2's with heads that share keys, and decays per head."""

    shape = (HEADS, KEY, VALUE)

    def tokens(self, generator, n, decays):
        q, k = drawn(generator, 2, n, GROUPS, KEY) * KEY**-0.5
        return q, k, drawn(generator, n, HEADS, VALUE), log_decays(generator, decays, n, HEADS)

    def nothing(self, tokens):
        return tuple(each[:0] for each in tokens[1:])

    def step(self, state, q, k, v, g):
        q, k = (each.repeat_interleave(HEADS // len(each), 0) for each in (q, k))
        g = g.view(HEADS, -1, 1)
        state = g.exp() * state + torch.einsum("hk,hv->hkv", k, v)
        return state, torch.einsum("hkv,hk->hv", state, q)

    run = staticmethod(linear_attention.linear_attention)
    fold = staticmethod(linear_attention.fold)


class GatedDelta(LinearAttention):
    """The gated delta rule with decays per head."""

    channels = ()

    def tokens(self, generator, n, decays):
        q, k = torch.nn.functional.normalize(drawn(generator, 2, n, GROUPS, KEY), dim=-1)
        g = log_decays(generator, decays, n, HEADS, *self.channels)
        beta = 2.0 * torch.rand(n, HEADS, generator=generator, dtype=torch.float64)  # OLMo hybrid's are up to 2
        return q, k, drawn(generator, n, HEADS, VALUE), g, beta

    def nothing(self, tokens):
        return tuple(each[:0] for each in tokens[1:4])

    def step(self, state, q, k, v, g, beta):
        q, k = (each.repeat_interleave(HEADS // len(each), 0) for each in (q, k))
        state = g.view(HEADS, -1, 1).exp() * state
        u = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, u)
        return state, torch.einsum("hkv,hk->hv", state, q)

    run = staticmethod(gated_delta.gated_delta)


class KimiDelta(GatedDelta):
    """The gated delta rule with decays per channel."""

    channels = (KEY,)


class SelectiveScan:
    """Mamba-1's."""

    shape = (CHANNELS, STATES)
    a = -(1.0 + torch.arange(STATES, dtype=torch.float64)).expand(CHANNELS, -1)

    def tokens(self, generator, n, decays):
        dt = -log_decays(generator, decays, n, CHANNELS)
        return dt, drawn(generator, n, CHANNELS), drawn(generator, n, STATES), drawn(generator, n, STATES)

    def nothing(self, tokens):
        return tuple(each[:0] for each in tokens[:3])

    def step(self, state, dt, v, b, c):
        state = (dt[:, None] * self.a).exp() * state + v[:, None] * b
        return state, state @ c

    def run(self, dt, v, b, c, kept, ancestors, state):
        return selective_scan.selective_scan(self.a.to(dt.dtype), dt, v, b, c, kept, ancestors, state)

    def fold(self, state, records):
        return selective_scan.fold(self.a.to(state.dtype), state, records)


class ShortConv:
    """A short convolution."""

    shape = (WIDTH - 1, CHANNELS)
    weight = drawn(torch.Generator().manual_seed(1), CHANNELS, WIDTH)
    bias = drawn(torch.Generator().manual_seed(2), CHANNELS)

    def tokens(self, generator, n, decays):
        return (drawn(generator, n, CHANNELS),)

    def nothing(self, tokens):
        return (tokens[0][:0],)

    def step(self, state, x):
        inputs = torch.cat((state, x[None]))
        return inputs[1:], (inputs * self.weight.T).sum(0) + self.bias

    def run(self, x, kept, ancestors, state):
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return short_conv.short_conv(x, weight, bias, *kept, ancestors, state), (x,)

    def fold(self, state, records):
        return short_conv.fold(state, *records)


KINDS = [LinearAttention(), GatedDelta(), KimiDelta(), SelectiveScan(), ShortConv()]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)


@dataclass(frozen=True)
class Tree:
    """`parents[i]` is the parent of node i; -1 is the last token before the tree."""

    parents: list

    def ancestors(self, kept):
        """Strict ancestors among `kept` tokens of a chain and the nodes: bool `[n, kept + n]`."""
        seen = torch.zeros(len(self.parents), kept + len(self.parents), dtype=torch.bool)
        seen[:, :kept] = True
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
                seen[node, kept + parent] = True
        return seen

    def path(self, node):
        path = []
        while node >= 0:
            path.insert(0, node)
            node = self.parents[node]
        return path


@st.composite
def trees(draw, most=256, depth=64):
    """Trees of 2 to `most` nodes; the share of nodes that follow the one before them makes them deep or bushy."""
    nodes, seed, chained = draw(st.integers(2, most)), draw(st.integers(0, 2**32 - 1)), draw(st.floats(0, 1))
    generator = torch.Generator().manual_seed(seed)
    parents, depths = [], []
    for node in range(nodes):
        last = torch.rand((), generator=generator).item() < chained
        parent = node - 1 if last else int(torch.randint(-1, node, (), generator=generator)) if node else -1
        if parent >= 0 and depths[parent] == depth:
            parent = -1
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return Tree(parents)


def single(tensors):
    return tuple(each.float() for each in tensors)


def stepped(kind, state, tokens, parents):
    """Compute every token's state and output from its parent's, by the recurrence."""
    states, outputs = [], []
    for parent, *token in zip(parents, *tokens, strict=True):
        after, output = kind.step(states[parent] if parent >= 0 else state, *token)
        states.append(after)
        outputs.append(output)
    return states, torch.stack(outputs)


def assert_near(ours, right):
    error = (ours.double() - right).abs().max().item()
    assert error <= ALLOWED * max(right.abs().max().item(), 1.0)


@each_kind
@given(
    tree=trees(),
    before=st.sampled_from([1, 70, 300]),
    kept=st.sampled_from([0, 1, 5, 64]),
    decays=st.sampled_from([*DECAYS, "each of any kind"]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=8, deadline=None)
def test_tree_equals_the_recurrence_along_each_path(kind, tree, before, kept, decays, seed):
    generator = torch.Generator().manual_seed(seed)
    n = before + kept
    tokens = kind.tokens(generator, n + len(tree.parents), decays)
    chain, nodes = ([each[:n] for each in tokens], [each[n:] for each in tokens])
    states, outputs = stepped(kind, torch.zeros(*kind.shape, dtype=torch.float64), chain, range(-1, n - 1))
    states, behind = stepped(kind, states[-1], nodes, tree.parents)

    ours, records = kind.run(*single(chain), single(kind.nothing(tokens)), None, torch.zeros(*kind.shape))
    assert_near(ours, outputs)
    state = kind.fold(torch.zeros(*kind.shape), tuple(each[:before] for each in records))
    records = tuple(each[before:] for each in records)
    ours, new = kind.run(*single(nodes), records, tree.ancestors(kept), state)
    assert_near(ours, behind)

    leaf = max(range(len(tree.parents)), key=lambda node: len(tree.path(node)))
    accepted = tuple(torch.cat((each, more[tree.path(leaf)])) for each, more in zip(records, new, strict=True))
    assert_near(kind.fold(state, accepted), states[leaf])


def in_passes(kind, tokens):
    """Compute a chain by passes, of which some fold; return the outputs and the last state."""
    nothing, state = kind.nothing(tokens), torch.zeros(*kind.shape, dtype=tokens[0].dtype)
    kept, outputs, start = nothing, [], 0
    for length in (1, 63, 64, 1, 65, 106):
        if start > 150:  # the records of earlier passes become the state
            state, kept = kind.fold(state, kept), nothing
        output, new = kind.run(*(each[start : start + length] for each in tokens), kept, None, state)
        kept = tuple(torch.cat(pair) for pair in zip(kept, new, strict=True))
        outputs.append(output)
        start += length
    return torch.cat(outputs), kind.fold(state, kept)


@each_kind
def test_passes_of_any_length_give_the_same_chain(kind):
    tokens = single(kind.tokens(torch.Generator().manual_seed(3), 300, "any"))
    outputs, state = in_passes(kind, tokens)
    whole, records = kind.run(*tokens, kind.nothing(tokens), None, torch.zeros(*kind.shape))
    assert_near(outputs, whole.double())
    assert_near(state, kind.fold(torch.zeros(*kind.shape), records).double())


@each_kind
def test_outputs_in_float64_have_the_same_bits_of_float32_in_passes_of_any_length(kind):
    tokens = single(kind.tokens(torch.Generator().manual_seed(3), 300, "any"))
    tokens = tuple(each.double() for each in tokens)
    start = torch.zeros(*kind.shape, dtype=torch.float64)
    whole, _ = kind.run(*tokens, kind.nothing(tokens), None, start)
    assert torch.equal(in_passes(kind, tokens)[0].float(), whole.float())


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[2], KINDS[4]], ids=lambda kind: type(kind).__name__)
@given(tree=trees(most=60), cut=st.integers(1, 59))
@settings(max_examples=8, deadline=None)
def test_kept_tokens_may_be_part_of_the_tree(kind, tree, cut):
    n = len(tree.parents)
    cut = min(cut, n - 1)
    tokens = single(kind.tokens(torch.Generator().manual_seed(4), n, "any"))
    state = torch.randn(*kind.shape, generator=torch.Generator().manual_seed(5))
    whole, _ = kind.run(*tokens, kind.nothing(tokens), tree.ancestors(0), state)
    first, records = kind.run(
        *(each[:cut] for each in tokens), kind.nothing(tokens), tree.ancestors(0)[:cut, :cut], state
    )
    second, _ = kind.run(*(each[cut:] for each in tokens), records, tree.ancestors(0)[cut:], state)
    assert_near(torch.cat((first, second)), whole.double())


def test_a_decay_of_zero_forgets_everything():
    for kind in KINDS[:3]:
        tokens = single(kind.tokens(torch.Generator().manual_seed(6), 100, "any"))
        tokens[3][50:51] = float("-inf")
        nothing, state = kind.nothing(tokens), torch.ones(*kind.shape)
        outputs, records = kind.run(*tokens, nothing, None, state)
        after, _ = kind.run(*(each[50:] for each in tokens), nothing, None, torch.zeros(*kind.shape))
        assert_near(outputs[50:], after.double())
        assert kind.fold(state, records).isfinite().all()


class Largest(TorchDispatchMode):
    """Remembers the most numbers of any tensor that was computed."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


@each_kind
def test_a_long_prompt_needs_no_matrix_of_tokens_by_tokens(kind):
    tokens = single(kind.tokens(torch.Generator().manual_seed(7), 4000, "any"))
    with Largest() as largest:
        kind.run(*tokens, kind.nothing(tokens), None, torch.zeros(*kind.shape))
    assert largest.numbers <= 4000 * HEADS * max(KEY, VALUE)


LENGTH = 150  # more than two chunks


def with_batch(tensors):
    return [each[None] for each in tensors]


@pytest.mark.parametrize(
    ("kind", "theirs"), [(KINDS[1], torch_chunk_gated_delta_rule), (KINDS[2], chunk_kimi_delta_attention)]
)
def test_gated_delta_equals_that_of_transformers(kind, theirs):
    q, k, v, g, beta = single(kind.tokens(torch.Generator().manual_seed(8), LENGTH, "any"))
    q, k = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (q, k))
    given = dict(zip(("query", "key", "value", "g", "beta"), with_batch((q, k, v, g, beta)), strict=True))
    right, state = theirs(**given, output_final_state=True)
    nothing = kind.nothing((q, k, v, g, beta))
    ours, records = kind.run(q * KEY**-0.5, k, v, g, beta, nothing, None, torch.zeros(*kind.shape))
    assert_near(ours, right[0].double())
    assert_near(kind.fold(torch.zeros(*kind.shape), records), state[0].double())


def test_linear_attention_equals_mamba_2_of_transformers():
    kind, generator = KINDS[0], torch.Generator().manual_seed(9)
    c, b, x, _ = single(kind.tokens(generator, LENGTH, "any"))
    dt = torch.rand(LENGTH, HEADS, generator=generator)
    a = -torch.rand(HEADS, generator=generator) * 4
    right, state = mamba2_chunk_scan(*with_batch((x, dt)), a, *with_batch((b, c)), 64, return_final_states=True)
    v, g = x * dt[..., None], dt * a
    ours, records = kind.run(c, b, v, g, (b[:0], v[:0], g[:0]), None, torch.zeros(*kind.shape))
    assert_near(ours, right[0].double())
    assert_near(kind.fold(torch.zeros(*kind.shape), records), state[0].mT.double())


def test_selective_scan_equals_mamba_of_transformers():
    kind, generator = KINDS[3], torch.Generator().manual_seed(10)
    dt, x, b, c = single(kind.tokens(generator, LENGTH, "any"))
    channels_first = with_batch((x.T, dt.T))
    right, state = mamba_selective_scan(
        *channels_first, kind.a.float(), *with_batch((b.T, c.T)), return_last_state=True
    )
    tokens = (dt, dt * x, b, c)
    ours, records = kind.run(*tokens, kind.nothing(tokens), None, torch.zeros(*kind.shape))
    assert_near(ours, right[0].T.double())
    assert_near(kind.fold(torch.zeros(*kind.shape), records), state[0].double())


def test_short_convolution_equals_that_of_transformers():
    kind = KINDS[4]
    (x,) = single(kind.tokens(torch.Generator().manual_seed(11), LENGTH, "any"))
    right = causal_conv1d_fn(x.T[None], kind.weight.float(), kind.bias.float())[0].T
    ours, _ = kind.run(x, kind.nothing((x,)), None, torch.zeros(*kind.shape))
    assert_near(ours, right.double())


def test_the_state_of_a_convolution_holds_no_memory_of_a_prompt():
    state = short_conv.fold(torch.zeros(WIDTH - 1, CHANNELS), torch.zeros(500, CHANNELS))
    assert state.untyped_storage().nbytes() == state.nbytes


def test_one_step_folds_nothing(monkeypatch):
    monkeypatch.setattr(linear_attention, "fold", None)
    kind = LinearAttention()
    tokens = single(kind.tokens(torch.Generator().manual_seed(0), 30, "any"))
    kind.run(*tokens, kind.nothing(tokens), None, torch.zeros(*kind.shape))


def test_a_prompt_of_mamba_1_is_computed_token_by_token_once(monkeypatch):
    """The state before its last tokens is folded from their records otherwise, with the same bits."""
    generator = torch.Generator().manual_seed(0)
    n, channels, states = 200, 6, 4
    a = -torch.rand(channels, states, generator=generator, dtype=torch.float64)
    shapes = ((n, channels), (n, channels), (n, states), (n, states))
    tokens = [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    lengths = []
    chain = selective_scan._chain
    monkeypatch.setattr(
        selective_scan, "_chain", lambda a, state, records: lengths.append(len(records[0])) or chain(a, state, records)
    )
    passed = {}
    scan = Scan(
        "a selective scan",
        partial(selective_scan.selective_scan, a, passed=passed),
        partial(selective_scan.fold, a, passed=passed),
        partial(torch.zeros_like, a),
        (tokens[0][:0], tokens[1][:0], tokens[2][:0]),
    )
    kv = KVRange(0, 300)
    recurring = RecurrentBatch([Segment(kv, 0, [0] * n, range(n))])
    outputs = recurring.scan(0, scan, tokens)
    recurring.commit()
    assert sum(lengths) == n
    state, records = kv.memory.layers[0, scan.name]
    assert torch.equal(state, selective_scan.fold(a, torch.zeros_like(a), [each[: n - KEPT] for each in tokens[:3]]))
    assert torch.equal(records.joined()[0], tokens[0][n - KEPT :])
    single = selective_scan.fold(a, torch.zeros_like(a), [each[:1] for each in tokens[:3]])
    assert torch.equal(outputs[0], single @ tokens[3][0])
