"""Part 1, without a model: which sums have equal bits, and whether the kernels compute what they should.

The design rests on the first two steps: rows of a linear layer, and a token's attention in a tree and alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from keeping import Bound, Measured
from torch import Tensor
from torch.nn.functional import linear

from dynatree.common.tree import TokenTree
from dynatree.engine.forward.scores import Scores
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.engine.gpu.decisions import choices_by_triton, chosen, ranking, ranks_by_triton
from dynatree.engine.gpu.fixed_rows import TARGET_ROWS
from dynatree.engine.gpu.rows import RowBuffers, RowSizes
from dynatree.engine.gpu.tree_attention import by_torch, by_triton, tile_rows
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.sampling.device_noise import by_triton as noise_by_triton
from dynatree.engine.sampling.device_noise import seed_bits
from dynatree.engine.sampling.gumbel import NoiseStream, gumbel

if TYPE_CHECKING:
    from session import Context

LINEAR = ((2560, 7680, True), (2560, 2560, True), (2560, 10240, True), (10240, 2560, True), (2560, 50304, False))
TINY_LINEAR = ((64, 192, True), (64, 512, False))
LONGEST = 2304  # slots of a session: its context, and a tree
KERNELS = partial(by_triton, longest=LONGEST)
NODES, TINY_NODES = 9, 5  # of the chain that is compared
MOST_EPS = {torch.float32: 16.0}  # a GPU's 2 ** x alone is 2 units off; other types: 8


# Linear layers


def linear_bits(context: Context) -> Measured:
    """Whether a row of a linear layer in bfloat16 has equal bits wherever it stands, and whatever stands beside it.

    Each layer, each number of rows R: the rows permuted; all but some replaced; and each of a few rows alone among
    zeros, at the first place, as in plain decoding.
    """
    layers = LINEAR if context.on_gpu and not context.sizes.tiny else TINY_LINEAR
    found = []
    for inputs, outputs, has_bias in layers:
        generator = torch.Generator(context.device).manual_seed(inputs + outputs)
        weight = _random((outputs, inputs), torch.bfloat16, context.device, generator) * inputs**-0.5
        bias = _random((outputs,), torch.bfloat16, context.device, generator) if has_bias else None
        for rows in TARGET_ROWS:
            differing = sum(_moved_rows(weight, bias, rows, generator) for _ in range(3))
            found.append({"inputs": inputs, "outputs": outputs, "bias": has_bias, "rows": rows, "differing": differing})
    by_rows = {rows: sum(each["differing"] for each in found if each["rows"] == rows) for rows in TARGET_ROWS}
    equal = [rows for rows, differing in by_rows.items() if not differing]
    says = f"(a) Rows of linear layers in bfloat16 have equal bits wherever they stand, at R = {equal or 'NONE'}."
    bounds = [Bound(f"differing rows at R = {rows}", differing, most=0) for rows, differing in by_rows.items()]
    return Measured({"layers": found, "rows with equal bits": equal}, [says], bounds)


def _moved_rows(weight: Tensor, bias: Tensor | None, rows: int, generator: torch.Generator) -> int:
    """How many rows' outputs change with their place or their neighbours."""
    x = _random((rows, weight.shape[1]), weight.dtype, weight.device, generator)
    y = linear(x, weight, bias)
    differing = 0
    for order in (
        torch.arange(rows - 1, -1, -1, device=x.device),
        torch.arange(rows, device=x.device).roll(1),
        torch.randperm(rows, device=x.device, generator=generator),
    ):
        differing += _unequal(linear(x[order], weight, bias), y[order])
    kept = torch.arange(rows, device=x.device) % 3 == 0
    others = 10 * _random(tuple(x.shape), weight.dtype, weight.device, generator)
    differing += _unequal(linear(torch.where(kept[:, None], x, others), weight, bias)[kept], y[kept])
    for row in (0, rows // 2 + 1, rows - 1):
        alone = torch.zeros_like(x)
        alone[0] = x[row]
        differing += _unequal(linear(alone, weight, bias)[:1], y[row : row + 1])
    return differing


def _unequal(ours: Tensor, theirs: Tensor) -> int:
    """Rows whose bits differ."""
    return int((ours.view(torch.int16) != theirs.view(torch.int16)).any(1).sum())


# Attention


@dataclass(frozen=True)
class Heads:
    """The shape of a layer's attention."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.heads} heads, {self.kv_heads} of keys, of {self.dim}, {str(self.dtype).removeprefix('torch.')}"


def shapes(context: Context) -> Iterator[Heads]:
    """Head sizes, types and groupings that models have."""
    if context.sizes.tiny:
        # the interpreter multiplies no bfloat16, and takes a second a launch
        yield Heads(2, 2, 64, torch.float16)
        yield Heads(4, 2, 80, torch.float32)
        return
    for dim in (64, 80, 128):
        for heads, kv_heads in ((8, 8), (8, 2), (14, 2)):
            for dtype in (torch.bfloat16, torch.float16):
                yield Heads(heads, kv_heads, dim, dtype)
    yield Heads(8, 8, 80, torch.float32)


def attention_bits(context: Context) -> Measured:
    """Whether a token's attention has equal bits in a tree and in plain decoding.

    In the tree the token's path stands behind another branch and behind another session's rows; alone each token is a
    forward's first row. Roots lie around the ends of blocks and of splits.
    """
    roots = (60,) if context.sizes.tiny else (1, 58, 60, 63, 64, 65, 127, 250, 255, 256, 257, 511, 513, 1500)
    found = []
    for shape in shapes(context):
        differing = {root: _differing_tokens(shape, root, context) for root in roots}
        found.append({"shape": str(shape), "differing": differing})
    wrong = [f"{each['shape']}: {root}" for each in found for root, count in each["differing"].items() if count]
    says = f"(b) A token's attention has equal bits in a tree and alone, except at {wrong[:6] or 'none'}."
    total = sum(sum(each["differing"].values()) for each in found)
    return Measured({"shapes": found}, [says], [Bound("tokens whose attention differs", total, most=0)])


def _differing_tokens(shape: Heads, root: int, context: Context) -> int:
    device = torch.device(context.device)
    beside, kv = KVRange(0, 64), KVRange(70, LONGEST)
    nodes = TINY_NODES if context.sizes.tiny else NODES
    tree = _tree(kv, root, [*_chain(nodes), -1, *range(nodes, 2 * nodes - 1)])
    other = Segment(beside, 3, [0] * 11, range(3, 14))
    generator = torch.Generator(device).manual_seed(root)
    count = len(other.token_ids) + len(tree.token_ids)
    sizes = RowSizes(32, tile_rows(shape.heads, shape.kv_heads), 2)
    numbers = _query_key_value(shape, count, generator)
    prefix = _random((2, shape.kv_heads, 80 + LONGEST, shape.dim), shape.dtype, device, generator)
    scale = shape.dim**-0.5
    in_tree = _attended(numbers, prefix.clone(), sizes, [other, tree], scale)
    first = len(other.token_ids)
    rows = [first, *range(first + nodes + 1, first + 2 * nodes + 1)]
    layer = prefix.clone()
    differing = 0
    for place, row in enumerate(rows):
        alone = Segment(kv, root + place, [0], [root + place])
        output = _attended([each[:, row : row + 1] for each in numbers], layer, sizes, [alone], scale)
        differing += not torch.equal(output[0], in_tree[row])
    return differing


def _attended(
    numbers: Sequence[Tensor],
    layer: Tensor,
    sizes: RowSizes,
    segments: Sequence[Segment],
    scale: float,
    by: Callable[..., Tensor] = KERNELS,
) -> Tensor:
    """The attention of a forward of fixed rows; padding repeats the first row's numbers."""
    [pieces] = sizes.cut(segments)
    buffers = RowBuffers(sizes, layer.shape[2] - 1, layer.device)
    buffers.fill(segments, pieces)
    padded = [torch.cat([each, each[:, :1].expand(-1, sizes.rows - each.shape[1], -1)], 1) for each in numbers]
    return by(*padded, layer, buffers.plan, scores=Scores(scale))


def attention_in_float64(context: Context) -> Measured:
    """The largest difference of the kernels from torch in float64, in units of the type's rounding."""
    found: list[dict[str, Any]] = []
    worst: dict[torch.dtype, float] = {}
    for shape in shapes(context):
        device = torch.device(context.device)
        segments = [
            _tree(KVRange(30, 200), 150, _bushy(12, seed=1)),
            _tree(KVRange(230, 90), 5, _chain(4)),
            Segment(KVRange(320, 600), 530, [0], [530]),
            Segment(KVRange(920, 100), 62, [0] * 4, range(62, 66)),
        ]
        used = sum(len(each.token_ids) for each in segments)
        generator = torch.Generator(device).manual_seed(3)
        numbers = _query_key_value(shape, used, generator)
        layer = torch.full((2, shape.kv_heads, 1100, shape.dim), math.nan, dtype=shape.dtype, device=device)
        layer[:, :, -1] = 0.0
        for each in segments:
            committed = slice(each.kv.start, each.kv.start + each.start)
            size = (2, shape.kv_heads, each.start, shape.dim)
            layer[:, :, committed] = _random(size, shape.dtype, device, generator)
        sizes = RowSizes(32, tile_rows(shape.heads, shape.kv_heads), 4)
        scale = shape.dim**-0.5
        wide = [each.double() for each in numbers]
        expected = _attended(wide, layer.double(), sizes, segments, scale, by_torch)
        output = _attended(numbers, layer, sizes, segments, scale)
        error = (output[:used].double() - expected[:used]).abs().max().item()
        error = error if math.isfinite(error) else math.inf
        found.append({"shape": str(shape), "error": error, "in eps": error / torch.finfo(shape.dtype).eps})
        worst[shape.dtype] = max(worst.get(shape.dtype, 0.0), found[-1]["in eps"])
    bounds = [
        Bound(f"largest difference from float64 in {dtype}", eps, "eps", most=MOST_EPS.get(dtype, 8.0))
        for dtype, eps in worst.items()
    ]
    return Measured({"shapes": found}, [f"{len(found)} shapes; slots that nobody may read hold NaN"], bounds)


def _query_key_value(shape: Heads, rows: int, generator: torch.Generator) -> list[Tensor]:
    counts = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [_random((count, rows, shape.dim), shape.dtype, generator.device, generator) for count in counts]


def _tree(kv: KVRange, root: int, parents: Sequence[int]) -> Segment:
    tree = TokenTree(tuple(range(len(parents))), tuple(parents))
    positions = [root, *(root + depth for depth in tree.depths)]
    return Segment(kv, root, [0] * len(positions), positions, mask=ancestor_mask(parents))


def _chain(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


def _bushy(nodes: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(-1, node) for node in range(nodes)]


def _random(size: tuple[int, ...], dtype: torch.dtype, device: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator, device=device).to(dtype)


# Noise


def noise(context: Context) -> Measured:
    """The device's Gumbel noise beside numpy's; with other random bits it would be far from it."""
    vocabulary = 2050 if context.sizes.tiny else 50304
    seeds, positions = (0, 1, 2**63, 2**64 - 1), (0, 1, 2047, 2**31 - 2)
    places = [(seed, position) for seed in seeds for position in positions]
    given = torch.tensor([seed_bits(seed) for seed, _ in places], device=context.device)
    at = torch.tensor([position for _, position in places], dtype=torch.int32, device=context.device)
    drawn = torch.empty(len(places), vocabulary, device=context.device)
    noise_by_triton(drawn, given, at, int(NoiseStream.CHOICE))
    expected = torch.stack([gumbel(seed, position, vocabulary) for seed, position in places]).numpy()
    steps = np.testing.assert_array_max_ulp(drawn.cpu().numpy(), expected, maxulp=np.inf)  # and returns them
    most = int(steps.max())
    says = [f"{np.mean(steps == 0):.4%} of {steps.size} numbers have numpy's bits; the furthest is {most} ulp away"]
    figures = {"numbers": steps.size, "equal share": float(np.mean(steps == 0)), "ulp": most}
    return Measured(figures, says, [Bound("noise away from numpy's", most, "ulp", most=1)])


def choices(context: Context) -> Measured:
    """The kernels' choices beside torch's, by which the host decides, and a draft's rankings."""
    rows, vocabulary = 12, 2050 if context.sizes.tiny else 50304
    device = torch.device(context.device)
    generator = torch.Generator(device).manual_seed(7)
    temperatures = torch.tensor([0.0, 0.7, 1.0, 3.0] * 3, device=device)
    seeds = torch.tensor([seed_bits(2**63 + row) for row in range(rows)], device=device)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    drawn = torch.empty(rows, vocabulary, device=device)
    noise_by_triton(drawn, seeds, positions + 1, int(NoiseStream.CHOICE))
    limits = torch.full((rows,), vocabulary - 7, dtype=torch.int32, device=device)
    unlike, furthest = 0, 0.0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for _ in range(1 if context.sizes.tiny else 50):
            logits = 3 * _random((rows, vocabulary), dtype, device, generator)
            for given, noise in ((temperatures, drawn), (0 * temperatures, None)):
                expected = chosen(logits, given, noise)
                unlike += int((choices_by_triton(logits, given, seeds, positions) != expected).sum())
        ranks = ranking(logits, temperatures, drawn).double()
        best = ranks[:, : vocabulary - 7].topk(16).values - ranks[:, : vocabulary - 7].logsumexp(-1, keepdim=True)
        _, chances = ranks_by_triton(logits, limits, temperatures, seeds, positions, 16)
        furthest = max(furthest, float((chances.double() - best).abs().max()))
    bounds = [
        Bound("choices unlike torch's", unlike, most=0),
        Bound("log-probabilities of a draft away from torch's", furthest, most=1e-4),
    ]
    return Measured({"choices unlike torch's": unlike, "furthest log-probability": furthest}, (), bounds)
