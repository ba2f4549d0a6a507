"""Tests the attention kernel against float64, for equal bits in any company, and torch's attention as its fallback."""

import itertools
import math

import pytest
import torch

from dynatree.engine import loading
from dynatree.engine.cpu import native_program
from dynatree.engine.cpu.native_attention import NativeBatch
from dynatree.engine.cpu.native_linear import NativeLinear
from dynatree.engine.forward.scores import Scores
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.kv.locality import GLOBAL, Locality
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import save_random_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ERRORS = {torch.float32: 3e-6, torch.bfloat16: 0.02, torch.float16: 0.003}
LOCALITIES = (
    GLOBAL,
    *(Locality(window=window) for window in (1, 7, 64, 100, 1000)),  # tiles have 64 slots
    *(Locality(chunk=chunk) for chunk in (33, 128)),
    Locality(window=20, chunk=30),
)


def random_mask(rows, generator, beyond=0):
    """Return a mask in which every row sees itself and some other rows, after `beyond` more columns."""
    mask = torch.rand(rows, rows + beyond, generator=generator) < 0.4
    mask[:, beyond:] |= torch.eye(rows, dtype=torch.bool)
    return mask


def new_tensors(generator, tokens, heads, kv_heads, dim, dtype):
    """Return query, key and value as a model gives them: heads first, over memory in which tokens come first."""
    return [
        torch.randn(tokens, count, dim, generator=generator).to(dtype).transpose(0, 1)
        for count in (heads, kv_heads, kv_heads)
    ]


def random_tree(start, nodes, generator):
    """Return the positions of a random tree's nodes behind `start` slots, and the mask of their ancestors."""
    positions, mask = [], torch.eye(nodes, dtype=torch.bool)
    for node in range(nodes):
        parent = int(torch.randint(-1, node, (), generator=generator)) if node > 2 else node - 1
        positions.append(start if parent < 0 else positions[parent] + 1)
        if parent >= 0:
            mask[node] |= mask[parent]
    return positions, mask


def exact(segments, kv_cache, layer, query, scale, cap=None, sinks=None, columns=()):
    """Compute attention in float64 from the KV cache with the new keys and values.

    The positions of a mask's columns are `columns`, or their slots.
    """
    first, outputs, locality = 0, [], kv_cache.shape.locality(layer)
    group = query.shape[0] // kv_cache.shape.kv_heads
    for segment in segments:
        tokens = len(segment.token_ids)
        keys, values = (
            each.double().repeat_interleave(group, 0) for each in kv_cache.slots(segment.kv, segment.stop)[layer]
        )
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril() if segment.mask is None else segment.mask
        bias = torch.zeros(tokens, segment.stop, dtype=torch.float64)
        bias[:, segment.stop - mask.shape[1] :].masked_fill_(~mask, -math.inf)
        places = torch.arange(segment.stop)
        if segment.mask is not None and columns:
            places[segment.stop - len(columns) :] = torch.tensor(columns)
        bias.masked_fill_(places < locality.lowest(torch.tensor(segment.positions))[:, None], -math.inf)
        scores = query[:, first : first + tokens].double() @ keys.transpose(1, 2) * scale
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        scores = scores + bias
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, tokens, 1)], 2)
        outputs.append((scores.softmax(-1)[..., : segment.stop] @ values).transpose(0, 1))
        first += tokens
    return torch.cat(outputs)


def segment_of(kv, start, tokens, mask=None, positions=None):
    return Segment(kv, start, [0] * tokens, positions or range(start, start + tokens), mask)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 80), (8, 2, 64), (3, 3, 20), (2, 1, 7), (6, 2, 128)])
def test_every_query_attends_to_what_its_mask_shows(build, dtype, heads, kv_heads, dim):
    generator = torch.Generator().manual_seed(dim)
    kv_cache = KVCache(KVShape(2, kv_heads, dim), 1200, dtype, torch.device("cpu"))
    kv_cache.layer(1).copy_(torch.randn(kv_cache.layer(1).shape, generator=generator))
    segments = [
        segment_of(kv_cache.reserve(300), 200, 1),
        segment_of(kv_cache.reserve(100), 0, 70),
        segment_of(kv_cache.reserve(200), 130, 7, random_mask(7, generator, beyond=5)),
        segment_of(kv_cache.reserve(400), 255, 66, random_mask(66, generator)),
    ]
    query, key, value = new_tensors(generator, 1 + 70 + 7 + 66, heads, kv_heads, dim, dtype)
    scale = 1.2 * dim**-0.5
    got = NativeBatch(segments, kv_cache).attend(1, query, key, value, Scores(scale))
    assert got.dtype == dtype
    assert got.shape == (144, heads, dim)
    assert (got - exact(segments, kv_cache, 1, query, scale)).abs().max() < ERRORS[dtype]
    stored, first = kv_cache.slots(segments[3].kv, segments[3].stop)[1], 78
    for slots, new in zip(stored, (key, value), strict=True):
        assert torch.equal(slots[:, 255:], new[:, first:])
    assert not kv_cache.layer(0).any(), "another layer's slots are untouched"


@compiled
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_have_windows_chunks_caps_and_sinks(dtype):
    generator = torch.Generator().manual_seed(3)
    heads, kv_heads, dim, scale = 6, 2, 20, 1.2 * 20**-0.5
    shape = KVShape(len(LOCALITIES), kv_heads, dim, LOCALITIES)
    kv_cache = KVCache(shape, 1200, dtype, torch.device("cpu"))
    kv_cache.data.copy_(torch.randn(kv_cache.data.shape, generator=generator))
    positions, mask = random_tree(140, 30, generator)
    segments = [
        segment_of(kv_cache.reserve(300), 200, 1),
        segment_of(kv_cache.reserve(100), 0, 70),
        segment_of(kv_cache.reserve(250), 131, 66),
        segment_of(kv_cache.reserve(200), 151, 19, mask[11:], positions[11:]),
    ]
    query, key, value = new_tensors(generator, 1 + 70 + 66 + 19, heads, kv_heads, dim, dtype)
    batch, sinks = NativeBatch(segments, kv_cache), torch.randn(heads, generator=generator)
    for layer in range(len(LOCALITIES)):
        for cap, sink in ((None, None), (0.7, None), (None, sinks), (0.7, sinks.bfloat16())):
            got = batch.attend(layer, query, key, value, Scores(scale, cap, sink))
            expected = exact(segments, kv_cache, layer, query, scale, cap, sink, positions)
            assert (got - expected).abs().max() < ERRORS[dtype], (LOCALITIES[layer], cap)


@compiled
@pytest.mark.usefixtures("build")
def test_caps_are_exact_over_the_whole_range():
    rows = torch.cat([10.0 ** torch.linspace(-37, 38, 9000), torch.linspace(0, 12, 9000), torch.tensor([math.inf])])
    rows = torch.cat([rows, -rows, torch.tensor([0.0, math.nan])])
    layer = NativeLinear(torch.ones(1, 1), None)
    layer.structure.activation, layer.structure.cap = native_program._CAPPED, 1.0
    got, expected = layer(rows[:, None])[:, 0].double(), rows.double().tanh()
    assert got[-1].isnan()
    assert ((got - expected).abs() <= 2e-7 * expected.abs())[:-1].all()


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", range(3))
def test_a_query_has_the_same_bits_whatever_is_computed_beside_it(build, dtype, layer):
    """A chain is computed as single steps, in one segment, and beside other sessions; a prompt in any pieces."""
    generator = torch.Generator().manual_seed(1)
    heads, kv_heads, dim, length = 4, 2, 80, 150
    localities = (GLOBAL, Locality(window=6), Locality(window=65))
    kv_cache = KVCache(KVShape(3, kv_heads, dim, localities), 800, dtype, torch.device("cpu"))
    scores = Scores(None, 2.0, torch.randn(heads, generator=generator)) if layer else Scores()
    kv, other = kv_cache.reserve(200), kv_cache.reserve(300)
    query, key, value = new_tensors(generator, length, heads, kv_heads, dim, dtype)
    beside = new_tensors(generator, 9, heads, kv_heads, dim, dtype)

    def read(*cuts, crowd=False):
        rows = []
        for start, stop in itertools.pairwise([0, *cuts, length]):
            parts, segments = (
                [each[:, start:stop] for each in (query, key, value)],
                [segment_of(kv, start, stop - start)],
            )
            if crowd:
                segments.insert(0, segment_of(other, 77, 9, random_mask(9, generator)))
                parts = [torch.cat(both, dim=1) for both in zip(beside, parts, strict=True)]
            rows.append(NativeBatch(segments, kv_cache).attend(layer, *parts, scores)[-(stop - start) :])
        return torch.cat(rows)

    whole = read()
    for cuts in [(1,), (100,), (149,), (64, 128), (63, 65), tuple(range(1, length))]:
        assert torch.equal(read(*cuts), whole), cuts
        assert torch.equal(read(*cuts, crowd=True), whole), cuts
    # the last nine as a path of a tree whose siblings, invisible to the path, come between and after its tokens
    read(141)
    tokens = [141, 142, 3, 143, 144, 145, 4, 5, 146, 147, 148, 149, 6]
    path = [place for place, token in enumerate(tokens) if token > 140]
    mask = torch.eye(13, dtype=torch.bool)
    for index, place in enumerate(path):
        mask[place, path[:index]] = True
    positions = [token if token > 140 else 141 for token in tokens]
    tree = NativeBatch([segment_of(kv, 141, 13, mask, positions)], kv_cache).attend(
        layer, *(each[:, tokens] for each in (query, key, value)), scores
    )
    assert torch.equal(tree[path], whole[141:])


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_are_stored_as_zeros(build, dtype):
    kv_cache = KVCache(KVShape(1, 1, 16), 100, dtype, torch.device("cpu"))
    query, key, value = new_tensors(torch.Generator().manual_seed(2), 3, 1, 1, 16, dtype)
    key[0, 1, 3], value[0, 2, 5], value[0, 0, 0] = math.nan, math.inf, -math.inf
    segment = segment_of(kv_cache.reserve(50), 0, 3)
    output = NativeBatch([segment], kv_cache).attend(0, query, key, value, Scores())
    assert output.isfinite().all()
    for slots, new in zip(kv_cache.slots(segment.kv, 3)[0], (key, value), strict=True):
        assert torch.equal(slots, new.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_says_the_same_by_either_attention(tmp_path, dtype, monkeypatch):
    path = save_random_model(tmp_path / "model", "llama", seed=5)
    tokens = torch.randint(2, 2048, (60,), generator=torch.Generator().manual_seed(0)).tolist()

    def logits():
        engine = load_engine(ModelSettings(str(path), dtype=dtype, sessions=1))
        kv = engine.kv_cache.reserve(100)
        return torch.cat(
            [engine.forward([Segment(kv, a, tokens[a:b], range(a, b))])[0] for a, b in ((0, 40), (40, 41), (41, 60))]
        )

    native = logits()
    monkeypatch.setattr(loading, "is_native", lambda device, dtype: False)
    assert (native.float() - logits().float()).abs().max() < (1e-5 if dtype == "float32" else 0.05)


@pytest.mark.long
@compiled
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_slots_between_those_that_a_query_sees_change_no_bit(dtype):
    """A chain among hidden siblings has the bits that it has alone, whether its slots are odd or even."""
    generator = torch.Generator().manual_seed(7)
    heads, dim, prefix, length = 32, 80, 61, 24
    shape = KVShape(1, heads, dim)
    kv_cache = KVCache(shape, 400, dtype, torch.device("cpu"))
    one, other = kv_cache.reserve(200), kv_cache.reserve(200)
    held = torch.randn(2, heads, prefix, dim, generator=generator).to(dtype)
    for kv in (one, other):
        kv_cache.slots(kv, prefix)[0].copy_(held)
    for _ in range(150):  # one token in 400 had other bits when pairs of slots were summed in another order
        tensors = new_tensors(generator, 2 * length, heads, heads, dim, dtype)
        places = torch.randperm(2 * length, generator=generator)[:length].sort().values
        chain = [each[:, places] for each in tensors]
        alone = NativeBatch([segment_of(one, prefix, length)], kv_cache).attend(0, *chain, Scores())
        mask = torch.eye(2 * length, dtype=torch.bool)
        for index, place in enumerate(places):
            mask[place, places[:index]] = True
        among = NativeBatch([segment_of(other, prefix, 2 * length, mask)], kv_cache).attend(0, *tensors, Scores())
        assert torch.equal(among[places], alone)


@compiled
@pytest.mark.usefixtures("build")
def test_many_light_slots_beside_a_heavy_one_are_not_lost():
    slots, dim = 20_000, 16
    kv_cache = KVCache(KVShape(1, 1, dim), slots + 64, torch.float32, torch.device("cpu"))
    keys, values = kv_cache.layer(0)
    keys[0, 0, 0] = 17.3
    values[0, 0] = 1.0
    query = torch.zeros(1, 1, dim)
    query[..., 0] = 1.0
    segment = segment_of(kv_cache.reserve(slots + 10), slots - 1, 1)
    output = NativeBatch([segment], kv_cache).attend(
        0, query, torch.zeros(1, 1, dim), torch.zeros(1, 1, dim), Scores(1.0)
    )
    assert (output - 1 / (1 + (slots - 1) * math.exp(-17.3))).abs().max() < 1e-6
