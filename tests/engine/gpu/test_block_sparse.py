"""Tests block-sparse attention in Triton's interpreter against float64, and that invisible blocks are skipped.

The interpreter multiplies the bits of bfloat16 as integers, so float16 stands for the 16-bit types here.
"""

import math
import random
import runpy
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatree.common.tree import TokenTree
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.verify.layout import depth_first
from tests.support.benchmark_modules import GPU, module
from tests.support.kernel_builds import needs_triton

block_sparse = module("block_sparse", GPU)
BlockMask, visible_blocks = block_sparse.BlockMask, block_sparse.visible_blocks
block_sparse_attention = block_sparse.block_sparse_attention
ORDERS = ("random", "depth_first", "breadth_first")
BLOCKS = st.sampled_from(block_sparse.BLOCKS)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel in Triton's interpreter, even if triton was imported without `TRITON_INTERPRET`.

    Triton reads the variable when it decorates a function, also in its own library, and torch or transformers may have
    imported it earlier. The fixture restores `triton.language`, because the interpreter's changes would break kernels
    that this process compiles later.
    """
    needs_triton()
    from triton import language
    from triton.runtime.interpreter import InterpretedFunction

    core = language.core
    changed = (language, core, language.math, core.tensor, core.dtype, core.condition, core.tensor_descriptor_base)
    before = [dict(vars(each)) for each in changed]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    functions = [(language, "zeros"), (language, "max"), (language, "sum")]
    for owner, name in [*functions, (block_sparse, "_attend"), (block_sparse, "_fold")]:
        monkeypatch.setattr(owner, name, InterpretedFunction(getattr(owner, name).fn))
    yield
    for each, attributes in zip(changed, before, strict=True):
        for name, value in dict(vars(each)).items():
            if name not in attributes:
                delattr(each, name)
            elif value is not attributes[name]:
                setattr(each, name, attributes[name])


def tree_mask(rows, order, seed=0):
    """Return the mask of a random tree, with rows and columns in a given order."""
    chance = random.Random(seed)
    parents = tuple(chance.randrange(-1, node) for node in range(rows - 1))
    tree = TokenTree(tuple(range(rows - 1)), parents)
    depths = [0, *tree.depths]
    places = {
        "random": chance.sample(range(rows), rows),
        "depth_first": [0, *(node + 1 for node in depth_first(tree, range(rows - 1)))],
        "breadth_first": sorted(range(rows), key=depths.__getitem__),
    }[order]
    return ancestor_mask(parents)[places][:, places]


def random_tensors(heads, kv_heads, rows, length, head_dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + length + head_dim)
    shapes = (heads, rows, head_dim), (kv_heads, length, head_dim), (kv_heads, length, head_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def exact(query, keys, values, mask, scale=None):
    """Compute attention in float64: `[rows, heads, head_dim]`, zeros for a row that sees nothing."""
    query, keys, values = query.double(), keys.double(), values.double()
    group = query.shape[0] // keys.shape[0]
    seen = torch.nn.functional.pad(mask, (keys.shape[1] - mask.shape[1], 0), value=True)
    scores = query @ keys.repeat_interleave(group, 0).mT * (query.shape[2] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ values.repeat_interleave(group, 0)).transpose(0, 1)


def assert_exact(query, keys, values, mask, block, scale=None, error=2e-6):
    got = block_sparse_attention(query, keys, values, BlockMask.of(mask, block), scale)
    assert got.dtype == query.dtype
    torch.testing.assert_close(got.double(), exact(query, keys, values, mask, scale), rtol=0, atol=error)


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 80), (3, 1, 128), (2, 1, 20)])
def test_every_row_attends_to_its_ancestors_and_the_prefix(interpreted, order, heads, kv_heads, head_dim):
    rows, prefix = 70, 37
    tensors = random_tensors(heads, kv_heads, rows, prefix + rows, head_dim)
    assert_exact(*tensors, tree_mask(rows, order), 32)


@pytest.mark.parametrize("block", block_sparse.BLOCKS)
@pytest.mark.parametrize(("rows", "prefix"), [(1, 0), (1, 65), (16, 16), (65, 0), (63, 130)])
def test_sizes_need_be_no_multiples_of_the_block(interpreted, block, rows, prefix):
    mask = tree_mask(rows, "depth_first")
    assert_exact(*random_tensors(1, 1, rows, prefix + rows, 64), mask, block)


@pytest.mark.parametrize("prefix", [0, 5])
def test_any_mask_will_do(interpreted, prefix):
    """The mask has more columns than rows and rows that see nothing, and the scale is not the default."""
    mask = torch.rand(40, 75, generator=torch.Generator().manual_seed(2)) < 0.2
    mask[3] = False
    mask[16:32] = False  # a whole tile
    mask[35, :64] = False  # this row sees its first key late
    tensors = random_tensors(2, 1, 40, prefix + 75, 64)
    assert_exact(*tensors, mask, 16, scale=0.3)
    if not prefix:
        assert not block_sparse_attention(*tensors, BlockMask.of(mask, 16))[16:32].any()


def test_in_16_bits_sums_are_in_32(interpreted):
    """Equal values are returned exactly, because rounding errors of sums over a thousand weights do not accumulate."""
    rows, prefix = 20, 1004
    query, keys, values = random_tensors(1, 1, rows, prefix + rows, 80, torch.float16)
    mask = tree_mask(rows, "random")
    assert_exact(query, keys, values, mask, 16, error=3e-4)
    assert block_sparse_attention(query, keys, torch.full_like(values, 5.0), BlockMask.of(mask, 16)).eq(5.0).all()


def test_large_scores_do_not_overflow(interpreted):
    query, keys, values = random_tensors(1, 1, 20, 40, 64)
    mask = tree_mask(20, "random")
    assert_exact(1000 * query, keys, values, mask, 16, error=1e-3)


def test_heads_may_lie_over_memory_in_which_tokens_come_first(interpreted):
    """A model gives such queries; such keys are one range of a larger KV cache."""
    rows, prefix = 33, 20
    query, keys, values = random_tensors(4, 2, rows, prefix + rows, 64)
    kv_cache = torch.full((2, 2, 200, 64), math.nan)
    for kept, each in zip(kv_cache, (keys, values), strict=True):
        kept[:, 50 : 50 + prefix + rows] = each
    slots = kv_cache[:, :, 50 : 50 + prefix + rows]
    apart = query.transpose(0, 1).contiguous().transpose(0, 1)
    mask = tree_mask(rows, "depth_first")
    got = block_sparse_attention(apart, slots[0], slots[1], BlockMask.of(mask, 16))
    torch.testing.assert_close(got.double(), exact(query, keys, values, mask), rtol=0, atol=2e-6)


def test_a_block_without_a_visible_pair_is_not_read(interpreted):
    """Blocks that a tile's queries do not see hold NaN, which would spread if a block were read."""
    rows, block, prefix = 90, 16, 11
    mask = tree_mask(rows, "depth_first")
    blocks = BlockMask.of(mask, block)
    tiles = len(blocks.offsets) - 1
    every = BlockMask.of(torch.ones_like(mask), block)
    every = BlockMask(mask, block, every.offsets, every.blocks)
    query, keys, values = random_tensors(1, 1, rows, prefix + rows, 64)
    expected = exact(query, keys, values, mask)
    skipped = 0
    for tile in range(tiles):
        visited = blocks.blocks[blocks.offsets[tile] : blocks.offsets[tile + 1]].tolist()
        poisoned = [each.clone() for each in (keys, values)]
        for unseen in set(range(tiles)) - set(visited):
            skipped += 1
            for each in poisoned:
                each[:, prefix + unseen * block : prefix + (unseen + 1) * block] = math.nan
        own = slice(tile * block, (tile + 1) * block)
        got = block_sparse_attention(query, *poisoned, blocks)[own]
        torch.testing.assert_close(got.double(), expected[own], rtol=0, atol=2e-6)
        if len(visited) < tiles:
            assert block_sparse_attention(query, *poisoned, every)[own].isnan().all()
    assert skipped > tiles * (tiles - 1) // 2  # more than a causal mask skips


@st.composite
def masks(draw):
    rows, columns = draw(st.integers(1, 140)), draw(st.integers(1, 140))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.0, 0.0005, 0.005, 0.3, 1.0]))


@given(masks(), BLOCKS)
@settings(deadline=None)
def test_visited_are_the_blocks_with_a_visible_pair(mask, block):
    seen = {(row // block, column // block) for row, column in mask.nonzero().tolist()}
    tiles = -(-mask.shape[0] // block)
    counts = [sum(each == tile for each, _ in seen) for tile in range(tiles)]
    assert visible_blocks(mask, block).tolist() == counts
    blocks = BlockMask.of(mask, block)
    assert blocks.offsets.dtype == blocks.blocks.dtype == torch.int32
    assert blocks.offsets.diff().tolist() == counts
    owners = torch.arange(tiles).repeat_interleave(blocks.offsets.diff()).tolist()
    assert list(zip(owners, blocks.blocks.tolist(), strict=True)) == sorted(seen)


def test_a_chain_visits_the_blocks_of_a_causal_mask():
    assert visible_blocks(ancestor_mask(range(-1, 128)), 32).tolist() == [1, 2, 3, 4, 5]


def test_depth_first_order_has_the_fewest_blocks():
    """DySpec's appendix C counts, for 512 rows in blocks of 32, 135.5 blocks in growth order and 52.8 depth-first."""
    counts = {order: int(visible_blocks(tree_mask(512, order), 32).sum()) for order in ORDERS}
    assert counts["depth_first"] < 60 < 100 < counts["breadth_first"] < counts["random"]


def test_what_does_not_belong_together_is_refused(monkeypatch):
    monkeypatch.setattr(block_sparse, "HAS_TRITON", True)
    blocks = BlockMask.of(torch.ones(3, 3, dtype=torch.bool), 16)
    query, keys, values = random_tensors(4, 2, 3, 5, 64)
    for parts in (
        (query[:3], keys, values),
        (query, keys[:, :4], values),
        (query[..., :32], keys, values),
        (query, keys[:, :2], values[:, :2]),
        (query[:, :2], keys, values),
        (query.mT.contiguous().mT, keys, values),
        (query, keys.mT.contiguous().mT, values),
        (query, keys, values.mT.contiguous().mT),
    ):
        with pytest.raises(ValueError, match=r"do not match|a mask \[3, 3\] for|lie apart"):
            block_sparse_attention(*parts, blocks)
    for mask, block in ((torch.ones(3, 3), 16), (blocks.mask[0], 16), (blocks.mask, 48)):
        with pytest.raises(ValueError, match=r"a mask is bool|a block is of 16 or 32 or 64"):
            BlockMask.of(mask, block)
        with pytest.raises(ValueError, match=r"a mask is bool|a block is of 16 or 32 or 64"):
            visible_blocks(mask, block)


def test_it_imports_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not runpy.run_path(block_sparse.__file__)["HAS_TRITON"]


def test_attention_needs_triton(monkeypatch):
    monkeypatch.setattr(block_sparse, "HAS_TRITON", False)
    blocks = BlockMask.of(torch.ones(3, 3, dtype=torch.bool), 16)
    with pytest.raises(RuntimeError, match="needs Triton, which is not installed"):
        block_sparse_attention(*random_tensors(1, 1, 3, 3, 64), blocks)
