"""Tests the tree attention kernels in Triton's interpreter, and their fallback in torch, against float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dynatree.engine.forward.runner import Choosing
from dynatree.engine.forward.scores import Scores
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.engine.gpu.rows import RowBuffers, RowSizes
from dynatree.engine.gpu.tree_attention import RowPlan, by_torch, by_triton, splits, tile_rows
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.kv.locality import GLOBAL, Locality
from tests.support.kernel_builds import needs_triton

needs_triton()

SLOTS = 700
LONGEST = 640
CPU = torch.device("cpu")


def triton_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: Tensor,
    plan: RowPlan,
    scores: Scores,
    locality: Locality = GLOBAL,
) -> Tensor:
    return by_triton(query, key, value, layer, plan, LONGEST, scores, locality)


WAYS = {"triton": triton_kernels, "torch": by_torch}
Way = Callable[..., Tensor]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def tree_segment(kv: KVRange, root: int, parents: list[int]) -> Segment:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    positions = [root, *(root + depth for depth in depths)]
    return Segment(kv, root, [0] * len(positions), positions, mask=ancestor_mask(parents))


def visible(segment: Segment, row: int) -> list[int]:
    """Return the slots of the range that a token sees, by the definition."""
    if segment.mask is None:
        return list(range(segment.start + row + 1))
    before = segment.stop - segment.mask.shape[1]
    return [*range(before), *(before + slot for slot in segment.mask[row].nonzero()[:, 0].tolist())]


def filled(sizes: RowSizes, segments: list[Segment]) -> RowBuffers:
    [pieces] = sizes.cut(segments)
    buffers = RowBuffers(sizes, SLOTS, CPU)
    buffers.fill(segments, pieces)
    return buffers


def tensors(heads: int, kv_heads: int, rows: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dim)
    shapes = ((heads, rows, dim), (kv_heads, rows, dim), (kv_heads, rows, dim))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


def in_float64(
    query: Tensor, layer: Tensor, segments: list[Segment], scores: Scores, locality: Locality = GLOBAL
) -> Tensor:
    """Compute attention in float64 from the stored keys and values: `[rows, heads, dim]` for the segments' rows."""
    group = query.shape[0] // layer.shape[1]
    outputs = []
    row = 0
    for segment in segments:
        for index in range(len(segment.token_ids)):
            seen = visible(segment, index)  # in the order of their positions, which begin at 0
            slots = [segment.kv.start + slot for slot in seen[int(locality.lowest(torch.tensor(len(seen) - 1))) :]]
            keys, values = (each.double().repeat_interleave(group, 0) for each in layer[:, :, slots])
            products = torch.einsum("hd,hpd->hp", query[:, row].double() * scores.scale, keys)
            if scores.cap is not None:
                products = scores.cap * (products / scores.cap).tanh()
            if scores.sinks is not None:
                products = torch.cat((products, scores.sinks.double()[:, None]), 1)
            weights = products.softmax(-1)[:, : len(slots)]
            outputs.append(torch.einsum("hp,hpd->hd", weights, values))
            row += 1
    return torch.stack(outputs)


def chain(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


def bushy(nodes: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(-1, node) for node in range(nodes)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 64), (2, 2, 80), (2, 1, 128), (7, 1, 64), (6, 2, 80)], ids=str
)
def test_rows_of_several_sessions_see_what_their_masks_show(way: Way, heads: int, kv_heads: int, dim: int) -> None:
    """A tree in the third block of keys, a tree before the first whole block, a plain step and a piece of prompt.

    All other slots hold NaN, which would spread if one were read.
    """
    segments = [
        tree_segment(KVRange(30, 200), 150, bushy(8, seed=1)),
        tree_segment(KVRange(230, 90), 5, chain(4)),
        Segment(KVRange(320, 200), 130, [0], [130]),
        Segment(KVRange(520, 100), 62, [0] * 4, range(62, 66)),
    ]
    sizes = RowSizes(24, tile_rows(heads, kv_heads), 4)
    buffers = filled(sizes, segments)
    query, key, value = tensors(heads, kv_heads, sizes.rows, dim, torch.float32)
    layer = torch.full((2, kv_heads, SLOTS + 1, dim), math.nan)
    layer[:, :, SLOTS] = 0.0
    generator = torch.Generator().manual_seed(1)
    for each in segments:
        committed = slice(each.kv.start, each.kv.start + each.start)
        layer[:, :, committed] = torch.randn(layer[:, :, committed].shape, generator=generator)
    scores = Scores(dim**-0.5)
    output = way(query, key, value, layer, buffers.plan, scores)
    used = sum(len(each.token_ids) for each in segments)
    assert output.shape == (sizes.rows, heads, dim)
    assert output.isfinite().all()
    assert not output[used:].any(), "padding attends to nothing"
    torch.testing.assert_close(output[:used].double(), in_float64(query, layer, segments, scores), rtol=1e-5, atol=2e-6)
    row = 0
    for each in segments:
        stored = slice(each.kv.start + each.start, each.kv.start + each.stop)
        count = len(each.token_ids)
        assert torch.equal(layer[0, :, stored], key[:, row : row + count])
        assert torch.equal(layer[1, :, stored], value[:, row : row + count])
        row += count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_differ_by_their_rounding(way: Way, dtype: torch.dtype) -> None:
    segments = [tree_segment(KVRange(0, 300), 140, bushy(6, seed=2))]
    sizes = RowSizes(8, tile_rows(2, 1), 1)
    buffers = filled(sizes, segments)
    query, key, value = tensors(2, 1, 8, 80, dtype)
    layer = torch.randn((2, 1, SLOTS + 1, 80), generator=torch.Generator().manual_seed(3)).to(dtype)
    output = way(query, key, value, layer, buffers.plan, Scores(0.1))
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(
        output[:7].double(), in_float64(query, layer, segments, Scores(0.1)), rtol=2 * rounding, atol=2 * rounding
    )


def test_many_blocks_in_several_splits(way: Way) -> None:
    """A path crosses the end of a block and of a split."""
    segments = [tree_segment(KVRange(10, LONGEST), 510, chain(5))]
    sizes = RowSizes(6, tile_rows(1, 1), 1)
    buffers = filled(sizes, segments)
    assert buffers.plan.rows[:, 0].tolist() == [7] * 6
    query, key, value = tensors(1, 1, 6, 64, torch.float32)
    layer = torch.randn((2, 1, SLOTS + 1, 64), generator=torch.Generator().manual_seed(3))
    output = way(query, key, value, layer, buffers.plan, Scores(0.3))
    torch.testing.assert_close(output.double(), in_float64(query, layer, segments, Scores(0.3)), rtol=1e-5, atol=2e-6)


RULES = {
    "a window within a block": (Scores(0.3), Locality(window=5)),
    "a window of a block": (Scores(0.3), Locality(window=64)),
    "a window over blocks, and sinks": (Scores(0.3, sinks=torch.tensor([0.7, -40.0])), Locality(window=130)),
    "chunks": (Scores(0.3), Locality(chunk=60)),
    "a window in chunks of a cap": (Scores(0.3, cap=2.0), Locality(window=40, chunk=128)),
    "a cap and sinks": (Scores(0.3, 3.0, torch.tensor([30.0, 0.0])), GLOBAL),
}


@pytest.mark.parametrize("rule", RULES)
def test_windows_chunks_caps_and_sinks(way: Way, rule: str) -> None:
    """A tree behind eight blocks, a piece of a prompt over the end of a block, and a first token."""
    scores, locality = RULES[rule]
    segments = [
        tree_segment(KVRange(0, 530), 517, bushy(7, seed=5)),
        Segment(KVRange(530, 90), 60, [0] * 6, range(60, 66)),
        Segment(KVRange(620, 20), 0, [0], [0]),
    ]
    buffers = filled(RowSizes(18, tile_rows(2, 1), 3), segments)
    query, key, value = tensors(2, 1, 18, 64, torch.float32)
    layer = torch.randn((2, 1, SLOTS + 1, 64), generator=torch.Generator().manual_seed(6))
    output = way(query, key, value, layer, buffers.plan, scores, locality)
    assert output.isfinite().all()
    expected = in_float64(query, layer, segments, scores, locality)
    torch.testing.assert_close(output[: len(expected)].double(), expected, rtol=1e-5, atol=4e-6)


def test_numbers_that_are_none_are_stored_as_zeros_and_marked(way: Way) -> None:
    """The first layer stores them; the second, which stores none, leaves the marks."""
    segments = [Segment(KVRange(0, 100), 3, [0] * 3, [3, 4, 5]), Segment(KVRange(100, 100), 0, [0] * 2, [0, 1])]
    buffers = filled(RowSizes(8, tile_rows(2, 2), 2), segments)
    query, key, value = tensors(2, 2, 8, 64, torch.float32)
    whole = key.clone(), value.clone()
    key[0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    value[1, 2, 5] = math.nan
    key[1, 4, 63] = -math.inf
    key[0, 6, 0] = math.nan  # padding, which is not stored
    for each in ((key, value), whole):
        layer = torch.zeros(2, 2, SLOTS + 1, 64)
        assert way(query, *each, layer, buffers.plan, Scores(0.1)).isfinite().all()
        assert layer.isfinite().all()
        assert layer[0, 0, 3, 3] == key[0, 0, 3]
        assert bool(layer[0, 0, 3, :3].any()) == (each is whole)
        assert buffers.faulty.tolist() == [1, 0, 1, 0, 1, 0, 0, 0]
    buffers.fill((), ())
    assert not buffers.faulty.any()


@pytest.mark.long
@pytest.mark.parametrize("locality", [GLOBAL, Locality(window=9), Locality(chunk=62)], ids=str)
def test_a_token_has_equal_bits_in_a_tree_and_alone(locality: Locality) -> None:
    """Blocks that are contiguous in a plain step are gathered in a tree from other places, with the same sums.

    The interpreter shows that the same numbers are summed in the same order; equal bits on a GPU need a run there.
    """
    root, nodes = 62, 3  # the chain crosses the end of a block
    kv = KVRange(0, 300)
    query, key, value = tensors(2, 2, 2 * nodes + 1, 64, torch.bfloat16)
    prefix = torch.randn((2, 2, SLOTS + 1, 64), generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    # the chain comes after another branch, in rows 0 and nodes + 1 to 2 * nodes
    tree = tree_segment(kv, root, [*chain(nodes), -1, *range(nodes, 2 * nodes - 1)])
    sizes = RowSizes(2 * nodes + 2, 16, 1)  # a row is left over
    in_tree = triton_kernels(query, key, value, prefix.clone(), filled(sizes, [tree]).plan, Scores(0.1), locality)
    rows = [0, *range(nodes + 1, 2 * nodes + 1)]
    layer = prefix.clone()
    for place, row in enumerate(rows):
        alone = filled(sizes, [Segment(kv, root + place, [0], [root + place])])
        padding = sizes.rows - 1
        each = [
            torch.cat([part[:, row : row + 1], part[:, :1].expand(-1, padding, -1)], 1) for part in (query, key, value)
        ]
        output = triton_kernels(each[0], each[1], each[2], layer, alone.plan, Scores(0.1), locality)
        assert torch.equal(output[0], in_tree[row]), place


def test_a_session_has_few_splits_and_each_slot_is_in_one() -> None:
    for slots in (1, 64, 65, 2304, 8192, 8193, 131_072 + 256):
        count, blocks = splits(slots)
        assert count <= 32
        assert (count - 1) * blocks * 64 < slots <= count * blocks * 64
    assert splits(2304) == (9, 4), "as long as there are few they are short"


def test_segments_are_cut_into_forwards_that_hold_them() -> None:
    kv = KVRange(0, 600)
    segments = [Segment(kv, 1, [0] * size, range(1, 1 + size)) for size in (5, 40, 1, 1, 1, 70, 300)]
    segments.append(tree_segment(kv, 60, bushy(299, seed=3)))
    for sizes in (RowSizes(16, 4, 2), RowSizes(32, 16, 8), RowSizes(256, 1, 1), RowSizes(512, 16, 9)):
        forwards = list(sizes.cut(segments))
        tokens: list[tuple[int, int]] = []
        for pieces in forwards:
            row = tiles = 0
            for piece in pieces:
                assert piece.row == row
                row += piece.rows
                tiles += math.ceil(piece.rows / sizes.tile)
                tokens += [(piece.segment, token) for token in range(piece.first, piece.stop)]
            assert row <= sizes.rows
            assert len({piece.segment for piece in pieces}) == len(pieces), "no segment has two pieces of a forward"
            filled = RowBuffers(sizes, SLOTS, CPU)
            filled.fill(segments, pieces, [Choosing([-1] * len(each.token_ids)) for each in segments])
            assert tiles <= sizes.tiles
        assert tokens == [(index, token) for index, each in enumerate(segments) for token in range(len(each.token_ids))]
