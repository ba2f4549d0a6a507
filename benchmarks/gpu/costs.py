"""Parts 1 and 2: what the target's forward passes cost, by their rows, and compiled instead of fused."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from keeping import NO_GPU, Bound, Measured, NotMeasuredError
from pair import MAX_TREE_NODES

from dynatree.engine.engine import Engine
from dynatree.engine.forward.flat_forward import FlatForward
from dynatree.engine.gpu import fixed_rows
from dynatree.engine.gpu.fixed_rows import TARGET_ROWS, gives_equal_bits, round_seconds, with_fixed_rows

if TYPE_CHECKING:
    from session import Context

CALLS = 20  # of which a time is the median
COPIED = 2 << 30  # bytes


def rows(context: Context) -> Measured:
    """What a round of each number of rows costs, and whether it gives equal bits; then what the service would choose.

    The floor of a forward pass is the target's weights over what a copy on the device moves a second.
    """
    models = context.models
    bandwidth = _copied(context)
    step_bytes = models.eager.info.step_bytes
    floor = 1000 * step_bytes / bandwidth
    found = [_of_rows(count, context) for count in models.sizes.fixed_rows or TARGET_ROWS]
    target = models.target
    figures = {
        "copy bytes a second": bandwidth,
        "weight bytes": step_bytes,
        "floor milliseconds": floor,
        "rows": found,
        "chosen": {"rows": target.most_rows, "batch_invariant": target.batch_invariant},
        "milliseconds by tokens": {each.rows: round(1000 * each.seconds, 4) for each in target.info.forward_costs},
    }
    bits = "a token has equal bits in any company" if target.batch_invariant else "a token's bits go by its company"
    says = [
        f"a copy moves {bandwidth / 1e12:.3g} TB/s; the weights, {step_bytes / 1e9:.3g} GB, take {floor:.3g} ms",
        *(
            f"R = {each['rows']}: {each['milliseconds']:.3g} ms, {each['milliseconds'] / floor:.3g} floors; captured "
            f"and tried in {each['seconds']:.3g} s; equal bits: {'yes' if each['equal bits'] else 'NO'}"
            for each in found
        ),
        f"the target's forwards have {target.most_rows} rows; {bits}",
    ]
    # torch's operations on a CPU promise nothing
    bounds = [Bound("targets whose bits depend on their company", int(not target.batch_invariant), most=0)]
    return Measured(figures, says, bounds if context.on_gpu else [])


def _of_rows(count: int, context: Context) -> dict[str, Any]:
    models = context.models
    began = time.perf_counter()
    longest = models.eager.info.context_length + MAX_TREE_NODES
    engine = with_fixed_rows(models.eager, (count,), models.sessions, longest)
    took = time.perf_counter() - began
    full = round_seconds(engine.runner.forwards, engine)[count]  # type: ignore[attr-defined]
    found = {
        "rows": count,
        "equal bits": engine.batch_invariant,
        "equal bits again": gives_equal_bits(engine, count),
        "seconds": took,
        "milliseconds": 1000 * full,
        "GiB": round(torch.cuda.memory_reserved() / 2**30, 2) if context.on_gpu else None,
    }
    del engine
    gc.collect()
    if context.on_gpu:
        torch.cuda.empty_cache()
    return found


def compiled(context: Context) -> Measured:
    """A round with the fused forward pass beside one with torch.compile's, both in graphs: is it worth its code?"""
    if not context.on_gpu:
        raise NotMeasuredError(NO_GPU)
    models, target = context.models, context.models.target
    count = target.most_rows or 1
    flat = FlatForward(models.eager.model, models.eager.kv_cache.shape)
    forward = torch.compile(flat.__call__, dynamic=False, fullgraph=True)
    began = time.perf_counter()
    with patch.object(fixed_rows, "forward_of", lambda model, shape: forward):
        longest = models.eager.info.context_length + MAX_TREE_NODES
        engine = with_fixed_rows(models.eager, (count,), models.sessions, longest)
    took = time.perf_counter() - began
    times: dict[str, list[float]] = {"fused": [], "compiled": []}
    for _ in range(3):
        for name, each in (("fused", target), ("compiled", engine)):
            forwards = each.runner.forwards  # type: ignore[attr-defined]
            times[name].append(1000 * round_seconds(forwards, each)[count])
    figures = {
        "rows": count,
        "seconds to compile": took,
        "equal bits of compiled": engine.batch_invariant,
        "milliseconds": {name: median(each) for name, each in times.items()},
    }
    return Measured(figures, [f"{what}: {figure}" for what, figure in figures.items()])


def _copied(context: Context) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = torch.zeros(COPIED if context.on_gpu else COPIED >> 6, dtype=torch.uint8, device=context.device)
    copy = torch.empty_like(source)
    return 2 * len(source) / seconds(lambda: copy.copy_(source), context.models.eager)


def seconds(work: Callable[[], object], engine: Engine, calls: int = CALLS) -> float:
    """The median time of a call with the wait for it, after one that does not count."""
    times = []
    for _ in range(1 + calls):
        engine.synchronize()
        began = time.perf_counter()
        work()
        engine.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[1:])
