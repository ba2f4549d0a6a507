"""Blocks of a tree's mask, by the order of its rows: `python benchmarks/gpu/blocks.py --output FILE`.

DySpec's appendix C skips the blocks of the attention mask without a visible pair, and puts rows in depth-first order so
that there are few others. Counted here are the blocks that `block_sparse_attention` computes, in several orders of the
same trees, and what gathering each row's own path computes instead. The kernel is timed as well: on a GPU, or in
Triton's interpreter, whose times say nothing of a GPU. It needs torch, transformers and, for the times, triton; from a
checkout without an installation, `PYTHONPATH=protos:common:draft_service:verify_service:client`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

# Nothing of dynatree is imported here: `main` says first whether Triton's interpreter is used.

SIZES = (64, 128, 256, 512, 768, 1024, 2048)  # rows, the root's among them
BLOCKS = (32, 64)
PREFIXES = (0, 1000)
TREES = 10  # of each family and size, by the seeds 0 to 9
PATH_BLOCK = 64  # keys that path gathering sums at a time (`gpu/tree_attention.py`)
RANKS = 64  # tokens of a synthetic draft distribution
EXPONENTS = (1.0, 4.0)  # most trees are less than 10 deep at 64 rows and 30 at 768, as DySpec section 4.3 tells
RUNS = 20
INTERPRETER_RUNS = 1
INTERPRETER_SIZE = 256  # the largest that is timed there
PAPER = {256: (36.0, 22.5), 512: (135.5, 52.8), 1024: (490.2, 119.3), 2048: (1654.5, 278.7)}  # DySpec table 5

ORDERS = {
    "random": "any permutation",
    "grown": "as the tree grew; taken for the original order of the paper, which does not define it",
    "breadth_first": "level by level",
    "depth_first": "verify.layout.depth_first: siblings as they grew",
    "heavy_path": "depth-first, the largest subtree first (the paper's near-optimum)",
}
FAMILIES = {
    "random": "each row's parent is uniform among the rows before it",
    "dyspec": "DySpec's algorithm 1: the draw of highest value next, without replacement, from a draft distribution "
    f"p(rank) ~ rank ** -s over {RANKS} tokens, s uniform in {list(EXPONENTS)} anew for each node",
}


def random_tree(rows: int, chance: random.Random) -> list[int]:
    """The parents of all nodes but the root, whose number is -1."""
    return [chance.randrange(-1, node) for node in range(rows - 1)]


def dyspec_tree(rows: int, chance: random.Random) -> list[int]:
    """The same, of DySpec's algorithm 1: each step takes the slot of highest value v and draws a token y from its R.

    The slot beside it then has the value v (1 - R[y]) and R without y, and the slot below it v R[y] and a new R.
    """
    parents: list[int] = []
    count = iter(range(2 * rows))  # of equal values the older
    slots = [(-1.0, next(count), -1, draft_distribution(chance))]
    while len(parents) < rows - 1:
        value, _, parent, residual = heapq.heappop(slots)
        drawn = chance.choices(range(len(residual)), residual)[0]
        p = residual.pop(drawn)
        node = len(parents)
        parents.append(parent)
        rest = sum(residual)
        if rest > 0.0:
            heapq.heappush(slots, (value * (1 - p), next(count), parent, [each / rest for each in residual]))
        heapq.heappush(slots, (value * p, next(count), node, draft_distribution(chance)))
    return parents


def draft_distribution(chance: random.Random) -> list[float]:
    """Zipf's, of a random exponent, likeliest first."""
    exponent = chance.uniform(*EXPONENTS)
    weights = [rank**-exponent for rank in range(1, RANKS + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


@dataclass(frozen=True)
class OrderedTree:
    """One tree: its mask as it grew, its rows in each of `ORDERS`, and each row's depth."""

    mask: Tensor
    orders: dict[str, list[int]]
    depths: list[int]

    @classmethod
    def of(cls, parents: Sequence[int], chance: random.Random) -> OrderedTree:
        """The tree of these parents; `chance` permutes."""
        from dynatree.common.tree import TokenTree
        from dynatree.engine.forward.tree_mask import ancestor_mask
        from dynatree.verify.layout import depth_first

        tokens = tuple(range(len(parents)))
        below = [1] * len(parents)
        for node in reversed(tokens):
            if parents[node] >= 0:
                below[parents[node]] += below[node]
        tree = TokenTree(tokens, tuple(parents))
        # `depth_first` puts the likelier child first: let the larger subtree's be likelier.
        heavy = TokenTree(tokens, tuple(parents), tuple(math.log(count / len(parents)) for count in below))
        depths = [0, *tree.depths]
        rows = range(len(depths))
        orders = {
            "random": chance.sample(rows, len(rows)),
            "grown": list(rows),
            "breadth_first": sorted(rows, key=depths.__getitem__),
            "depth_first": [0, *(node + 1 for node in depth_first(tree, tokens))],
            "heavy_path": [0, *(node + 1 for node in depth_first(heavy, tokens))],
        }
        return cls(ancestor_mask(parents), orders, depths)

    def ordered(self, order: str) -> Tensor:
        """The mask, with its rows and columns in an order."""
        rows = torch.tensor(self.orders[order])
        return self.mask[rows][:, rows]


def trees(family: str, rows: int) -> Iterator[OrderedTree]:
    """The trees of a family and size."""
    grow = {"random": random_tree, "dyspec": dyspec_tree}[family]
    for seed in range(TREES):
        chance = random.Random(f"{family} {rows} {seed}")
        yield OrderedTree.of(grow(rows, chance), chance)


def count(family: str, rows: int) -> list[dict[str, Any]]:
    """The mean blocks of a family and size: one record for each block size and prefix."""
    from block_sparse import visible_blocks

    visible: dict[tuple[int, str], list[int]] = {}  # by block size and order: of each tree
    depths = []
    for tree in trees(family, rows):
        depths.append(tree.depths)
        for order in ORDERS:
            mask = tree.ordered(order)
            for block in BLOCKS:
                visible.setdefault((block, order), []).append(int(visible_blocks(mask, block).sum()))
    records = []
    for block in BLOCKS:
        tiles = math.ceil(rows / block)
        for prefix in PREFIXES:
            before = tiles * math.ceil(prefix / block)
            paths = mean(sum(math.ceil((prefix + depth + 1) / PATH_BLOCK) for depth in each) for each in depths)
            orders = {order: round(before + mean(visible[block, order]), 1) for order in ORDERS}
            records.append(
                {
                    "trees": family,
                    "rows": rows,
                    "mean_depth": round(mean(map(mean, depths)), 1),
                    "mean_greatest_depth": round(mean(map(max, depths)), 1),
                    "block": block,
                    "prefix": prefix,
                    "dense": before + tiles**2,
                    "causal": before + tiles * (tiles + 1) // 2,
                    "blocks": orders,
                    "path_blocks": round(paths, 1),
                    "path_pairs_per_depth_first_pair": round(
                        paths * PATH_BLOCK / (orders["depth_first"] * block**2), 3
                    ),
                }
            )
    return records


def kernel_times(device: str) -> Iterator[dict[str, Any]]:
    """Milliseconds of one call on one tree of each family and size, in every order, and with no block left out."""
    from block_sparse import BlockMask, block_sparse_attention

    gpu = device == "cuda"
    heads, head_dim, dtype = (64, 128, torch.bfloat16) if gpu else (1, 128, torch.float32)
    sizes = [rows for rows in SIZES if gpu or rows <= INTERPRETER_SIZE]
    for family, rows, prefix in product(FAMILIES, sizes, PREFIXES if gpu else PREFIXES[:1]):
        tree = next(trees(family, rows))
        generator = torch.Generator(device).manual_seed(rows)
        query, keys, values = (
            torch.randn(heads, length, head_dim, dtype=dtype, device=device, generator=generator)
            for length in (rows, prefix + rows, prefix + rows)
        )
        for block in BLOCKS if gpu else BLOCKS[:1]:
            masks = {order: BlockMask.of(tree.ordered(order).to(device), block) for order in ORDERS}
            every = BlockMask.of(torch.ones(rows, rows, dtype=torch.bool, device=device), block)
            masks["every_block"] = BlockMask(masks["grown"].mask, block, every.offsets, every.blocks)
            times = {
                order: round(milliseconds(partial(block_sparse_attention, query, keys, values, mask), device), 4)
                for order, mask in masks.items()
            }
            yield {
                "trees": family,
                "rows": rows,
                "block": block,
                "prefix": prefix,
                "heads": heads,
                "head_dim": head_dim,
                "dtype": str(dtype).removeprefix("torch."),
                "milliseconds": times,
            }


def milliseconds(run: Callable[[], Tensor], device: str) -> float:
    """The median of some runs, after one that compiles."""
    run()
    times: list[float] = []
    for _ in range(RUNS if device == "cuda" else INTERPRETER_RUNS):
        if device == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            run()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended))
        else:
            start = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - start))
    return median(times)


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    names = " ".join(f"{order:>13}" for order in ORDERS)
    print(f"trees   rows block prefix   dense  causal {names}  grown/depth-first  path blocks  path/depth-first pairs")
    for each in report["counts"]:
        blocks = each["blocks"]
        print(
            f"{each['trees']:7} {each['rows']:4} {each['block']:5} {each['prefix']:6} {each['dense']:7} "
            f"{each['causal']:7} {' '.join(f'{blocks[order]:13.1f}' for order in ORDERS)} "
            f"{blocks['grown'] / blocks['depth_first']:18.2f} {each['path_blocks']:12.1f} "
            f"{each['path_pairs_per_depth_first_pair']:23.3f}"
        )
    print(f"\nmilliseconds on {report['device']}{', interpreted: no times of a GPU' if report['interpreted'] else ''}")
    print(f"trees   rows block prefix {names}   every block")
    for each in report["times"]:
        times = each["milliseconds"]
        print(
            f"{each['trees']:7} {each['rows']:4} {each['block']:5} {each['prefix']:6} "
            f"{' '.join(f'{times[order]:13.4f}' for order in (*ORDERS, 'every_block'))}"
        )


def main() -> int:
    """Count, time, write the report and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of the kernel (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, and when a kernel runs
    from block_sparse import HAS_TRITON

    report = {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"a CPU ({platform.machine()})",
        "interpreted": device == "cpu",
        "remark": "times of Triton's interpreter say nothing of a GPU" if device == "cpu" else None,
        "torch": torch.__version__,
        "seeds": TREES,
        "trees": FAMILIES,
        "orders": ORDERS,
        "blocks": "block rows by block keys; the prefix has blocks of its own, and the tree's begin behind it",
        "path_blocks": f"one row by {PATH_BLOCK} keys: of each row, those of the prefix, its ancestors and itself",
        "paper": {"block": 32, "grown and depth_first, by rows": PAPER},
        "counts": [record for family, rows in product(FAMILIES, SIZES) for record in count(family, rows)],
        "times": list(kernel_times(device)) if HAS_TRITON else [],
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
