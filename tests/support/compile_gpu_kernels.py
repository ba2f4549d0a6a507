"""Compile the GPU kernels without a GPU, with Triton's own compiler, and print figures of the results as JSON.

It runs in a separate process, because nothing is compiled while Triton's interpreter is on, as in the other tests.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dynatree.engine.gpu import choosing_kernels, fused_kernels, tree_attention_kernels
from dynatree.engine.gpu.tree_attention import BLOCK, SPLIT_BLOCKS
from dynatree.engine.sampling import noise_kernels

warnings.simplefilter("ignore")

SIZES = ((32, 32, 80), (32, 8, 128), (14, 2, 64))  # heads, key heads, head size
# of these sizes; each pair on one architecture of two
TYPES = {80: ("bf16", "fp16", "bf16"), 90: ("fp16", "bf16", "fp16"), 100: ("bf16", "fp16", "bf16")}
Kernels = dict[str, Any]


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], arch: int, **options: Any) -> Kernels:
    """A compiled kernel's shared and local memory, its matrix products, and its number of fused multiply-adds."""
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options["enable_fp_fusion"] = False
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = built.asm["ptx"]
    return {
        "shared": built.metadata.shared,
        "local": bool(re.search(r"\.local\b", ptx)),
        "products": sorted(set(re.findall(r"(?:mma\.sync|wgmma)[\w.:]*", ptx))),
        "fused": len(re.findall(r"\bfma\.rn", ptx)),
    }


def attention(heads: int, kv_heads: int, dim: int, dtype: str, arch: int, narrow: bool = False) -> dict[str, Kernels]:
    """The kernels of both launches of tree attention; if `narrow`, with a window, a cap and sinks."""
    group = triton.next_power_of_2(heads // kv_heads)
    wide = dtype == "fp32"
    constants = {
        "heads": heads,
        "group": heads // kv_heads,
        "padded_group": group,
        "dim": dim,
        "padded_dim": triton.next_power_of_2(dim),
        "tile": max(16, group),
        "block": BLOCK,
        "splits": 9,
        "split_blocks": SPLIT_BLOCKS,
        "window": 512 if narrow else 0,
        "chunk": 0,
        "cap": 50.0 if narrow else 0.0,
        "wide": wide,
    }
    numbers, pointer = f"*{dtype}", dict.fromkeys(["part_max", "part_sum", "part_out"], "*fp32")
    strides = {"cache_value": "i64", "cache_head": "i64", "scale": "fp32"}
    shared = {
        **dict.fromkeys(["query", "key", "value", "cache"], numbers),
        **dict.fromkeys(["tiles", "rows_of", "slots", "faulty"], "*i32"),
        **pointer,
        **dict.fromkeys(["q_head", "q_row", "k_head", "k_row", "v_head", "v_row"], "i32"),
        **strides,
    }
    own = {
        **dict.fromkeys(["query", "cache"], numbers),
        **dict.fromkeys(["rows", "paths"], "*i32"),
        "sinks": numbers if narrow else "constexpr",
        **pointer,
        "output": numbers,
        **dict.fromkeys(["q_head", "q_row"], "i32"),
        **dict.fromkeys(["cache_value", "cache_head"], "i64"),
        "path_size": "i32",
        "scale": "fp32",
    }
    unused = {} if narrow else {"sinks": None}
    options = {"num_warps": 4, "num_stages": 1 if wide else 2}
    return {
        "shared": compiled(tree_attention_kernels.shared_blocks, shared, constants, arch, **options),
        "own": compiled(tree_attention_kernels.own_paths, own, constants | unused, arch, **options),
    }


def fused(dtype: str, arch: int) -> dict[str, Kernels]:
    """The kernels of the operations between linear layers."""
    numbers = f"*{dtype}"
    norm = {
        **dict.fromkeys(
            [
                "x",
                "first",
                "second",
                "summed",
                "scale",
                "shift",
                "normed",
                "other_scale",
                "other_shift",
                "other_normed",
            ],
            numbers,
        ),
        "width": "i32",
        **dict.fromkeys(["epsilon", "other_epsilon"], "fp32"),
    }
    rotate = {
        **dict.fromkeys(["query", "key", "cosines", "sines"], numbers),
        "positions": "*i32",
        **dict.fromkeys(["q_head", "q_row", "k_head", "k_row", "heads"], "i32"),
    }
    activate = {**dict.fromkeys(["gate", "other", "output"], numbers), "size": "i32"}
    kernels = {}
    for addends, norms in ((0, 1), (1, 1), (2, 2)):
        constants = {"addends": addends, "norms": norms, "centered": True, "shifted": True, "columns_block": 4096}
        kernels[f"norm {addends}"] = compiled(fused_kernels.add_and_norm, norm, constants, arch, num_warps=8)
    kernels["rotate"] = compiled(fused_kernels.rotate, rotate, {"half": 10, "padded_half": 16}, arch, num_warps=1)
    for kind in range(4):
        constants = {"kind": kind, "times": kind > 1, "block": 1024}
        kernels[f"activate {kind}"] = compiled(fused_kernels.activate, activate, constants, arch, num_warps=8)
    return kernels


def choosing(dtype: str, arch: int) -> dict[str, Kernels]:
    """The kernels from logits to tokens, and of noise alone."""
    numbers = {
        **dict.fromkeys(
            ["temperatures", "best", "highest", "part_values", "values", "bases", "sums", "chances"], "*fp32"
        ),
        **dict.fromkeys(["limits", "positions", "places", "token_ids", "parents", "slots", "homes", "moves"], "*i32"),
        **dict.fromkeys(["part_ids", "ids", "faulty"], "*i32"),
        **dict.fromkeys(["vocab_size", "row_stride", "stream", "parts", "rows"], "i32"),
        **dict.fromkeys(["seeds", "choices"], "*i64"),
        **{"logits": f"*{dtype}", "data": f"*{dtype}", "stride": "i64", "out": "*fp32"},
    }

    def built(kernel: Any, warps: int = 4, **constants: Any) -> Kernels:
        types = {name: numbers[name] for name in kernel.arg_names if name not in constants}
        return compiled(kernel, types, constants, arch, num_warps=warps)

    kernels = {}
    for noisy in (False, True):
        kernels[f"best {noisy}"] = built(choosing_kernels.best_of_parts, noisy=noisy, size=1024, padded_parts=64)
    kernels["ranked"] = built(choosing_kernels.ranked_parts, size=1024, breadth=16)
    kernels["choices"] = built(choosing_kernels.choices_of_rows, none=-1, fault=-2, padded_parts=64)
    kernels["accepted"] = built(choosing_kernels.accepted_moves, block=64)
    kernels["move"] = built(choosing_kernels.move_slots, warps=1, dim=80, padded_dim=128)
    for parts in (64, 256):
        kernels[f"merged {parts}"] = built(choosing_kernels.merged_ranks, breadth=16, padded_parts=parts)
    kernels["noise"] = built(noise_kernels.fill, block_count=256)
    return kernels


def main(arch: int) -> None:
    """Compile all kernels for one architecture, such as 90."""
    found: dict[str, Any] = {"attention": {}, "fused": {}, "choosing": {}}
    for sizes, dtype in (*zip(SIZES, TYPES[arch], strict=True), (SIZES[0], "fp32")):
        found["attention"][f"{dtype} {sizes}"] = attention(*sizes, dtype, arch)
        found["attention"][f"{dtype} {sizes} narrow"] = attention(*sizes, dtype, arch, narrow=True)
    for dtype in ("bf16", "fp16", "fp32"):
        found["fused"][dtype] = fused(dtype, arch)
        found["choosing"][dtype] = choosing(dtype, arch)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
