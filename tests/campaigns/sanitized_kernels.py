"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on random shapes: `make sanitize`.

    python -m tests.campaigns.sanitized_kernels [--builds N] [--cases N] [--seed N]
    python -m tests.campaigns.sanitized_kernels --mutants

The sources are compiled with the sanitizers for each instruction set that this CPU has, and run by the package's own
Python code in a separate process under LD_PRELOAD. `--mutants` makes one mistake in C at a time, each an off-by-one or
a missing bound, and expects the sanitizers to detect it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SOURCES = ("attention.c", "linear.c", "quantized.c", "experts.c", "forward.c", "recurrence.c", "short_conv.c")
CHECKED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# One mistake each: a file, the right text, and the wrong text that replaces it.
NORM = "for (int64_t d = whole; d {} width; d++) {{\n        float x = (load_one"
MUTANTS = (
    ("attention.c", "t < tokens; t++) {\n        int found", "t <= tokens; t++) {\n        int found"),
    ("attention.c", "to[k * wide + d] = d < dim ? load_one", "to[k * wide + d] = d <= dim ? load_one"),
    ("attention.c", "slot < tile + count; slot++", "slot <= tile + count; slot++"),
    ("attention.c", "chunk * (dim + wide + 3) +", "chunk * (dim + wide + 2) -"),
    ("attention.c", "memset(visible + first, 1, last - first);", "memset(visible + first, 1, last);"),
    ("attention.c", "token <= (first + rows - 1) / group; token++", "token <= (first + rows) / group; token++"),
    ("attention.c", "l->sinks[head * group + row % group]", "l->sinks[(head + 1) * group + row % group]"),
    ("attention.c", "= l->faulty + segment->first;", "= l->faulty + segment->first + 1;"),
    ("linear.c", "if (count < LANES) from = memcpy(buffer, from, count * size);", ""),
    ("linear.c", "place + c * size, buffer, count * size);", "place + c * size, buffer, (count + 1) * size);"),
    ("linear.c", "for (; at + LANES <= stop; at += LANES)", "for (; at < stop; at += LANES)"),
    ("quantized.c", "for (int64_t i = 0; i < inputs; i += LANES)", "for (int64_t i = 0; i <= inputs; i += LANES)"),
    ("quantized.c", "first < inputs; first += unit", "first <= inputs; first += unit"),
    ("quantized.c", "return inputs / w->group * group_bytes(w)", "return (inputs / w->group + 1) * group_bytes(w)"),
    ("experts.c", "malloc((s->experts + 1) * sizeof", "malloc(s->experts * sizeof"),
    ("experts.c", "enlarge(&s->middle, all * e->down", "enlarge(&s->middle, (all - 1) * e->down"),
    ("experts.c", "enlarge(&s->floats, linear_shared_floats(&e->gate, all) +", "enlarge(&s->floats, 0 *"),
    ("experts.c", "m->chosen = malloc(s->all *", "m->chosen = malloc((s->all - 1) *"),
    ("experts.c", "i < e->count; i++)\n        candidates", "i <= e->count; i++)\n        candidates"),
    ("experts.c", "gate.bias += g->expert * 2 *", "gate.bias += (g->expert + 1) * 2 *"),
    ("recurrence.c", "malloc((r->keys + all) * LINES *", "malloc(r->keys * LINES *"),
    ("recurrence.c", "for (; d + 8 <= size; d += 8)", "for (; d < size; d += 8)"),
    ("recurrence.c", "at + WIDE <= width; at += WIDE)", "at < width; at += WIDE)"),
    ("recurrence.c", "seen[found + i] = r->kept + first + i;", "seen[found + i] = r->kept + first + i + 1;"),
    ("recurrence.c", "(head * r->keys + d) * r->values;", "(head * r->keys + d + 1) * r->values;"),
    ("recurrence.c", "malloc(LINES * r->values", "malloc(2 * r->values"),
    ("recurrence.c", "first + line / kinds(r)) * r->groups + group", "first + line) * r->groups + group"),
    ("recurrence.c", "r->beta[token * r->heads + head]", "r->beta[(token + 1) * r->heads + head]"),
    ("recurrence.c", "r->keys - d >= 4 ? 4", "r->keys - d >= 3 ? 4"),
    ("short_conv.c", "i + LANES <= count; i += LANES", "i < count; i += LANES"),
    ("short_conv.c", "left && a--;)", "a--;)"),
    ("short_conv.c", "(c->width - 1 - left + tap) * bytes", "(c->width - left + tap) * bytes"),
    ("short_conv.c", "c->channels - first : TOGETHER", "TOGETHER : TOGETHER"),
    ("forward.c", NORM.format("<"), NORM.format("<=")),
    ("forward.c", "c->tokens[row] * bytes;", "(c->tokens[row] + 1) * bytes;"),
    ("forward.c", "(o->last ? c->keep[row] : row) *", "(o->last ? c->keep[row] + 1 : row) *"),
    ("forward.c", "part < o->parts;", "part <= o->parts;"),
    ("forward.c", "other + (row * o->parts + part) * bytes", "other + (row * o->parts + part + 1) * bytes"),
    ("forward.c", "c->locality[o->layer] *", "c->locality[o->layer + 1] *"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--builds", type=int, help="number of builds, the best for this CPU first (default: all)")
    parser.add_argument("--cases", type=int, default=100, help="random cases of each build (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutants", action="store_true", help="make mistakes in C, and check that they are detected")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.run, options.cases, options.seed)
        return 0
    from dynatree.engine.cpu import native

    builds = native.builds()
    if not builds or shutil.which("gcc") is None:
        print("no gcc, or a CPU without kernels of our own", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        if options.mutants:
            return mutants(native.FOLDER, builds[0], Path(folder), options.cases)
        for name in builds[: options.builds]:
            began = time.monotonic()
            done = checked(built(native.FOLDER, name, Path(folder)), options.cases, options.seed)
            print(f"{name}: {time.monotonic() - began:.0f} s: {done.stdout.splitlines()[-1:]}", flush=True)
            if done.returncode:
                print(done.stderr[-6000:], file=sys.stderr)
                return 1
    return 0


def built(sources: Path, name: str, folder: Path) -> Path:
    """Compile one build with the sanitizers."""
    settings = json.loads((sources / "builds.json").read_text())
    flags = [each for each in settings["flags"] if each != "-O3"]
    targets = [f"-m{each.replace('_', '')}" for each in settings["builds"][name]]
    output = folder / name
    files = [str(sources / each) for each in SOURCES]
    subprocess.run(["gcc", *flags, *CHECKED, "-DSOURCES=0u", *targets, *files, "-lm", "-o", str(output)], check=True)
    return output


def checked(library: Path, cases: int, seed: int) -> subprocess.CompletedProcess[str]:
    """Run a build in a separate process; its exit status is not 0 if a sanitizer has detected an error."""
    runtime = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        # ignore memory that Python leaves at exit; use malloc, because blocks of Python's allocator have no red zones
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=23",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",  # on a busy machine, spinning threads use up each other's time slices
    }
    command = [
        sys.executable,
        "-m",
        "tests.campaigns.sanitized_kernels",
        "--run",
        str(library),
        "--cases",
        str(cases),
        "--seed",
        str(seed),
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def mutants(sources: Path, name: str, folder: Path, cases: int) -> int:
    """Test one mistake after the other; return the exit status."""
    missed = 0
    for number, (file, right, wrong) in enumerate(MUTANTS):
        changed = folder / str(number)
        shutil.copytree(sources, changed, ignore=shutil.ignore_patterns("*.so"))
        text = (changed / file).read_text()
        assert text.count(right) == 1, (file, right)
        (changed / file).write_text(text.replace(right, wrong))
        done = checked(built(changed, name, changed), cases, seed=0)
        told = [line for line in done.stderr.splitlines() if "ERROR:" in line or "runtime error" in line]
        what = "not seen" if not done.returncode else told[0] if told else done.stderr.splitlines()[-1]
        missed += not done.returncode
        print(f"{file}: {wrong or f'without {right}'!r}\n    {what[:110]}", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} mistakes were seen")
    return int(missed > 0)


# The functions below run in a process under the sanitizers.


def run(library: Path, cases: int, seed: int) -> None:
    """Run random cases of each kind in turn."""
    import ctypes

    import torch

    from dynatree.engine.cpu import native, native_runner
    from dynatree.engine.kv import kv_cache

    loaded = ctypes.CDLL(str(library))
    for function, arguments in native._FUNCTIONS.items():
        getattr(loaded, function).argtypes = arguments
    native.kernels = lambda: loaded  # type: ignore[assignment]
    torch.cpu._is_amx_tile_supported = lambda: False  # with AMX, oneDNN would multiply in 16 bits
    # a KV cache's memory is a mapping without red zones around it, so allocate it normally
    kv_cache._zeros = lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device)
    # a forward's buffers lie side by side in one allocation
    native_runner.NativeRunner._lay_out = lay_out_apart  # type: ignore[method-assign]
    runners = {
        key: runner_of(*key)
        for key in (
            ("llama", "float32"),
            ("gpt_neox", "bfloat16"),
            ("gemma3_text", "float16"),
            ("qwen2_moe", "float16"),
            ("gpt_oss", "float32"),
        )
    }
    kinds: Sequence[Callable[[random.Random], Any]] = (
        attend,
        multiply,
        multiply_quantised,
        multiply_experts,
        recur,
        convolve,
        *(lambda chooser, runner=runner: forward(chooser, *runner) for runner in runners.values()),
    )
    with torch.inference_mode():
        for case in range(cases):
            print(f"seed {seed}, case {case}", flush=True)
            kinds[case % len(kinds)](random.Random(f"{seed} {case}"))
    print(f"{cases} cases, nothing was seen")


def attend(chooser: random.Random) -> None:
    """Run a layer's attention; slots outside the segments must stay unchanged."""
    import torch

    from dynatree.engine.cpu.native_attention import NativeBatch
    from dynatree.engine.forward.scores import Scores
    from dynatree.engine.kv.kv_cache import KVCache, KVShape
    from dynatree.engine.kv.locality import Locality

    dtype = chooser.choice((torch.float32, torch.bfloat16, torch.float16))
    kv_heads, group, dim = chooser.randint(1, 3), chooser.randint(1, 5), chooser.choice((1, 2, 7, 16, 20, 64, 80, 129))
    sizes = [chooser.choice((1, 2, 5, 63, 64, 65, 130)) for _ in range(chooser.randint(1, 3))]
    starts = [chooser.choice((0, 1, 60, 64, 200)) for _ in sizes]
    room = [start + size + chooser.choice((0, 0, 3)) for start, size in zip(starts, sizes, strict=True)]
    locality = Locality(chooser.choice((None, 1, 30, 64, 100)), chooser.choice((None, None, 1, 50, 64)))
    memory = KVCache(KVShape(1, kv_heads, dim, (locality,)), sum(room), dtype, torch.device("cpu"))
    ranges = [memory.reserve(each) for each in room]
    segments = [segment_of(chooser, kv, start, size) for kv, start, size in zip(ranges, starts, sizes, strict=True)]
    memory.data.normal_()
    before = memory.data.clone()
    rows = sum(sizes)
    query, key, value = (
        torch.randn(rows, heads, dim).to(dtype).transpose(0, 1) for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    faulty = chooser.choice(([], [rows - 1], [0]))
    for row in faulty:
        chooser.choice((key, value))[-1, row, -1] = chooser.choice((math.nan, math.inf))
    batch = NativeBatch(segments, memory)
    sinks = chooser.choice((None, torch.randn(kv_heads * group)))
    output = batch.attend(0, query, key, value, Scores(cap=chooser.choice((None, 5.0)), sinks=sinks))
    assert output.shape == (rows, kv_heads * group, dim)
    assert list(batch.faulty()) == faulty
    for segment in segments:
        begin = segment.kv.start + segment.start
        before[:, :, :, begin : begin + len(segment.token_ids)] = memory.data[
            :, :, :, begin : begin + len(segment.token_ids)
        ]
    assert torch.equal(before.view(torch.uint8), memory.data.view(torch.uint8)), "another's slots were written"


def segment_of(chooser: random.Random, kv: Any, start: int, size: int, tokens: Sequence[int] = ()) -> Any:
    """A segment of `size` tokens, causal or with a random mask, that keeps all or some of its logits."""
    import torch

    from dynatree.engine.forward.segment import Segment

    mask = None
    if chooser.random() < 0.6:
        columns = chooser.randint(size, start + size)
        mask = torch.rand(size, columns) < 0.5
        mask[:, columns - size :] |= torch.eye(size, dtype=torch.bool)
    keep = chooser.choice((None, [size - 1], range(0, size, 2)))
    return Segment(kv, start, tokens or [0] * size, range(start, start + size), mask, keep)


def multiply(chooser: random.Random) -> None:
    """Run a linear layer over some rows."""
    import torch

    from dynatree.engine.cpu.native_linear import NativeLinear

    dtype = chooser.choice((torch.float32, torch.bfloat16, torch.float16))
    inputs, features = chooser.choice((1, 2, 6, 63, 64, 130, 600)), chooser.choice((1, 3, 15, 16, 17, 64, 65, 200))
    inputs += inputs % 2 if dtype == torch.bfloat16 else 0
    bias = torch.randn(features).to(dtype) if chooser.random() < 0.5 else None
    layer = NativeLinear(torch.randn(features, inputs).to(dtype), bias)
    output = layer(torch.randn(chooser.choice((0, 1, 2, 5, 6, 7, 13, 24, 97, 200)), inputs))
    assert output.shape[1] == features


def multiply_experts(chooser: random.Random) -> None:
    """Run the experts of some rows, the last expert included, in 16 bits, float32, or 8 bits."""
    import torch

    from dynatree.engine.cpu.native_experts import NativeExperts
    from dynatree.engine.cpu.native_linear import NativeLinear
    from dynatree.engine.cpu.quantized_linear import QuantizedLinear
    from dynatree.engine.weights.quantized_weight import rounded

    dtype = chooser.choice((torch.float32, torch.bfloat16, torch.float16))
    count, hidden, width = chooser.randint(1, 5), chooser.choice((64, 192)), chooser.choice((64, 128))
    sizes = ((count * 2 * width, hidden), (count * hidden, width))
    weights = [torch.randn(size).mul(0.1).to(dtype) for size in sizes]
    if chooser.random() < 0.5:
        gate_up, down = (NativeLinear(each, None) for each in weights)
    else:
        gate_up, down = (QuantizedLinear(rounded(each, 8, 64), None, dtype) for each in weights)
    rows, chosen = chooser.choice((0, 1, 2, 7, 100)), chooser.randint(1, count)
    index = torch.rand(rows, count).topk(chosen).indices
    output = NativeExperts(gate_up, down, count)(torch.randn(rows, hidden).to(dtype), index, torch.rand(rows, chosen))
    assert output.shape == (rows, hidden)
    assert output.isfinite().all()


def recur(chooser: random.Random) -> None:
    """Run a layer with decays over a random forest, and fold; the delta rule or linear attention."""
    import torch

    from dynatree.engine.cpu import native_recurrence

    groups, shared = chooser.choice((1, 2, 3)), chooser.choice((1, 2, 5))
    sizes = (chooser.choice((1, 3, 7, 8, 16, 27, 64)) for _ in range(2))
    (keys, values), heads = sizes, groups * shared
    kept, nodes = chooser.choice((0, 1, 2, 64)), chooser.choice((1, 2, 3, 4, 5, 7, 30, 64))
    q, k = torch.randn(2, nodes, groups, keys, dtype=torch.float64)
    v, g = (torch.randn(nodes, heads, *more, dtype=torch.float64) for more in ((values,), ()))
    records = tuple(torch.randn(kept, *each.shape[1:], dtype=torch.float64) for each in (k, v, g))
    ancestors = torch.ones(nodes, kept + nodes, dtype=torch.bool)
    ancestors[:, kept:] = False
    for node in range(1, nodes):
        parent = chooser.randint(-1, node - 1)
        if parent >= 0:
            ancestors[node] = ancestors[parent]
            ancestors[node, kept + parent] = True
    state = torch.randn(heads, keys, values, dtype=torch.float64)
    beta = chooser.choice((torch.rand(nodes, heads, dtype=torch.float64), None))
    output, _ = native_recurrence.recur(q, k, v, -g.abs(), beta, records, ancestors, state)
    assert output.isfinite().all()
    assert native_recurrence.fold(state, records).shape == state.shape


def convolve(chooser: random.Random) -> None:
    """Run a short convolution over a chain or over random ancestors."""
    import torch

    from dynatree.engine.cpu.native_recurrence import convolve

    dtype = chooser.choice((torch.float32, torch.bfloat16, torch.float16))
    channels, width = chooser.choice((1, 7, 16, 255, 256, 257, 600)), chooser.choice((1, 2, 4, 16))
    kept, nodes = chooser.choice((0, 1, 2, 64)), chooser.choice((0, 1, 2, 5, 64))
    x, weight, records, state = (torch.randn(shape, channels).to(dtype) for shape in (nodes, width, kept, width - 1))
    ancestors = chooser.choice((None, (torch.rand(nodes, kept + nodes) < 0.5).tril(kept - 1)))
    bias = chooser.choice((None, torch.randn(channels).to(dtype)))
    output = convolve(x, weight.T.contiguous(), bias, records, ancestors, state)
    assert output.shape == (nodes, channels)


def multiply_quantised(chooser: random.Random) -> None:
    """Run a linear layer of quantised weights over some rows."""
    import torch

    from dynatree.engine.cpu.quantized_linear import QuantizedLinear
    from dynatree.engine.weights.gguf_blocks import repacked
    from dynatree.engine.weights.quantized_weight import rounded
    from tests.support.gguf_files import HALVES, random_blocks

    dtype = chooser.choice((torch.float32, torch.bfloat16, torch.float16))
    features, bits = chooser.choice((1, 15, 64, 65, 200)), chooser.choice((8, 4))
    if chooser.random() < 0.5:
        group = chooser.choice((16, 32, 64, 128))
        weight = rounded(torch.randn(features, group * chooser.choice((1, 2, 3, 9))), bits, group)
    else:
        kind = chooser.choice(list(HALVES))
        weight = repacked(random_blocks(kind, features, 256 * chooser.choice((1, 2, 3)), torch.Generator()), kind)
    bias = torch.randn(features).to(dtype) if chooser.random() < 0.5 else None
    layer = QuantizedLinear(weight, bias, dtype)
    output = layer(torch.randn(chooser.choice((0, 1, 2, 5, 6, 7, 13, 24, 97, 200)), layer.in_features))
    assert output.shape[1] == features


def runner_of(family: str, dtype: str) -> Any:
    """The program and the KV cache of a small model, whose sizes are no multiples of a vector's."""
    import torch
    from transformers import AutoConfig

    from dynatree.engine.cpu.native_program import program_of
    from dynatree.engine.cpu.native_runner import NativeRunner
    from dynatree.engine.cpu.packing import pack
    from dynatree.engine.kv.kv_cache import KVCache, KVShape
    from dynatree.engine.kv.locality import Locality
    from dynatree.engine.model.skeleton import skeleton

    heads, kv_heads, dim = (3, 3, 14) if family == "gpt_neox" else (4, 2, 10)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    changes: dict[str, Any] = {"rope_parameters": rope}
    middle = 50
    if family in ("qwen2_moe", "gpt_oss"):  # experts have whole panels
        kv_heads, dim, middle = 2, 16, 64
        changes |= {"num_local_experts" if family == "gpt_oss" else "num_experts": 5, "num_experts_per_tok": 2}
        changes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
    if family == "gemma3_text":
        kinds = ["sliding_attention", "full_attention"]
        changes = {"layer_types": kinds, "final_logit_softcapping": 5.0, "rope_parameters": dict.fromkeys(kinds, rope)}
    config = AutoConfig.for_model(
        family,
        vocab_size=67,
        hidden_size=heads * dim,
        intermediate_size=middle,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=512,
        hidden_act="gelu" if family in ("gpt_neox", "gemma3_text") else "silu",
        tie_word_embeddings=False,
        **changes,
    )
    kind = getattr(torch, dtype)
    model = skeleton(config, kind)
    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        weight = torch.nn.Parameter(torch.randn(parameter.shape).mul(0.1).to(kind), requires_grad=False)
        setattr(model.get_submodule(owner), last, weight)
    pack(model, True, ())
    program = program_of(model)
    assert program is not None, "its family has a program"
    localities = (Locality(window=9), Locality(chunk=70))
    memory = KVCache(KVShape(2, kv_heads, dim, localities), 400, kind, torch.device("cpu"))
    return NativeRunner(program, memory), memory


def lay_out_apart(runner: Any, count: int) -> None:
    """Allocate each buffer of `count` tokens by itself, so that a red zone follows its last number."""
    import torch

    program = runner._program
    runner._memory = [torch.empty(count * width, dtype=program.dtype) for width in program.widths[:-1]]
    runner._buffers[: len(runner._memory)] = [each.data_ptr() for each in runner._memory]


def forward(chooser: random.Random, runner: Any, memory: Any) -> None:
    """Run a forward pass over some segments; token ids include the last of the vocabulary."""
    sizes = [chooser.choice((1, 2, 5, 17, 64, 100)) for _ in range(chooser.randint(1, 3))]
    starts = [chooser.randint(0, 30) for _ in sizes]
    ranges = [memory.reserve(start + size) for start, size in zip(starts, sizes, strict=True)]
    try:
        segments = [
            segment_of(chooser, kv, start, size, [chooser.choice((0, 5, 66)) for _ in range(size)])
            for kv, start, size in zip(ranges, starts, sizes, strict=True)
        ]
        for rows, segment in zip(runner.run(segments), segments, strict=True):
            assert len(rows) == len(segment.token_ids if segment.keep is None else segment.keep)
            assert all(math.isfinite(each) for each in rows.float().abs().amax(-1).tolist())
    finally:
        for kv in ranges:
            memory.release(kv)


if __name__ == "__main__":
    sys.exit(main())
