"""Part 1 with the target: how many rows its forwards get, what they cost, and what is known of the loaded pair."""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from bits import event_seconds
from keeping import NO_GPU, Bound, Measured
from pair import MAX_TREE_NODES, Models

from dynatree.engine.engine import Engine
from dynatree.engine.forward.runner import Choosing
from dynatree.engine.forward.segment import Segment
from dynatree.engine.gpu.fixed_rows import TARGET_ROWS, gives_equal_bits, with_fixed_rows

if TYPE_CHECKING:
    from session import Context

CALLS = 20  # of which a time is the median
COPIED = 2 << 30  # bytes
CONTEXT = 1000  # tokens before the rows of a full forward


def pair(context: Context) -> Measured:
    """The loaded pair: what loading took, how many rows the target's forwards have, and what forwards cost."""
    models = context.models
    target, draft = models.pair.target.info, models.draft.info
    figures = {
        "seconds": {name: round(seconds, 2) for name, seconds in models.seconds.items()},
        "sessions": models.sessions,
        "rows": models.target.most_rows,
        "batch_invariant": models.target.batch_invariant,
        "target": {"parameters": target.parameters, "bytes": target.step_bytes, "costs": _costs(models.target)},
        "draft": {"parameters": draft.parameters, "bytes": draft.step_bytes, "costs": _costs(models.draft)},
        "memory": _memory(context),
    }
    return Measured(figures, [_chosen(models.target), f"loading: {figures['seconds']}"])


def rows(context: Context) -> Measured:
    """What each number of rows costs, and whether it gives equal bits; then what the service would choose.

    The floor of a forward is the target's weights over what a copy on the device moves a second.
    """
    models = context.models
    eager = models.eager
    bandwidth = _copy_bandwidth(context)
    step_bytes = eager.info.step_bytes
    floor = step_bytes / bandwidth
    found = [_of_rows(count, context) for count in models.sizes.fixed_rows or TARGET_ROWS]
    target = models.target
    same = _same_in_all_graphs(target)
    figures = {
        "copy bytes a second": bandwidth,
        "weight bytes": step_bytes,
        "floor milliseconds": 1000 * floor,
        "rows": found,
        "chosen": {"rows": target.most_rows, "batch_invariant": target.batch_invariant, "equal in all graphs": same},
        "seconds": {name: round(seconds, 2) for name, seconds in models.seconds.items()},
        "memory": _memory(context),
    }
    says = [
        f"a copy moves {bandwidth / 1e12:.3g} TB/s; the weights, {step_bytes / 1e9:.3g} GB, take {1000 * floor:.3g} ms",
        *(_told(each, floor) for each in found),
        _chosen(target),
    ]
    bounds = [Bound("graphs that differ from the forward's own", len(same["differing"]), most=0)]
    if context.on_gpu:  # torch's operations on a CPU promise nothing
        bounds.append(Bound("targets whose bits depend on their company", int(not target.batch_invariant), most=0))
    return Measured(figures, says, bounds)


def _of_rows(count: int, context: Context) -> dict[str, Any]:
    models = context.models
    before = _memory(context)
    began = time.perf_counter()
    longest = models.eager.info.context_length + MAX_TREE_NODES
    engine = with_fixed_rows(models.eager, (count,), models.sessions, longest)
    with_trial = time.perf_counter() - began
    again = gives_equal_bits(engine, count)
    trial = time.perf_counter() - began - with_trial
    with torch.inference_mode():
        padding, full = _row_seconds(engine, context)
    found = {
        "rows": count,
        "equal bits": engine.batch_invariant,
        "equal bits again": again,
        "capturing seconds": max(with_trial - trial, 0.0),
        "milliseconds": 1000 * padding,
        "milliseconds of full rows": 1000 * full,
        "eager milliseconds": 1000 * _eager_seconds(models, count, context),
        "memory before": before,
        "memory": _memory(context),
    }
    del engine
    gc.collect()
    if context.on_gpu:
        torch.cuda.empty_cache()
    return found


def _told(of_rows: dict[str, Any], floor: float) -> str:
    milliseconds = of_rows["milliseconds"]
    return (
        f"R = {of_rows['rows']}: {milliseconds:.3g} ms, {milliseconds / 1000 / floor:.3g} floors; all rows behind a "
        f"context {of_rows['milliseconds of full rows']:.3g}; eagerly {of_rows['eager milliseconds']:.3g}; captured in "
        f"{of_rows['capturing seconds']:.3g} s; equal bits: {'yes' if of_rows['equal bits'] else 'NO'}"
    )


def _row_seconds(engine: Engine, context: Context) -> tuple[float, float]:
    """Of a forward over padding, and of one whose rows are a chain behind a context."""
    forward = engine.runner.forwards[0]  # type: ignore[attr-defined]
    padding = _seconds(forward.run, context)
    rows = forward.sizes.rows
    begin = min(CONTEXT, engine.info.context_length // 2)
    kv = engine.kv_cache.reserve(begin + rows)
    assert kv is not None, "no session is open"
    try:
        segments = [Segment(kv, begin, [7] * rows, range(begin, begin + rows))]
        [pieces] = forward.sizes.cut(segments)
        forward.buffers.fill(segments, pieces)
        return padding, _seconds(forward.run, context)
    finally:
        engine.kv_cache.release(kv)


def _eager_seconds(models: Models, count: int, context: Context) -> float:
    """Of a forward over so many tokens behind a context, as transformers' modules compute it."""
    engine = models.eager
    begin = min(CONTEXT, engine.info.context_length // 2)
    kv = engine.kv_cache.reserve(begin + count)
    assert kv is not None, "no session is open"
    try:
        segment = Segment(kv, begin, [7] * count, range(begin, begin + count))
        return _wall_seconds(lambda: engine.forward([segment]), engine)
    finally:
        engine.kv_cache.release(kv)


def _same_in_all_graphs(engine: Engine) -> dict[str, Any]:
    """Whether the forward alone and the two with decisions give a tree's rows the same bits.

    Each is a graph of its own, and the trial of equal bits runs the first only.
    """
    size = min(engine.most_rows or 1, 24)
    kv = engine.kv_cache.reserve(64 + size)
    assert kv is not None, "no session is open"
    try:
        engine.forward([Segment(kv, 0, range(2, 62), range(60), keep=[])])
        segment = Segment(kv, 60, range(100, 100 + size), range(60, 60 + size))
        [alone] = engine.forward([segment])
        differing = []
        for name, temperature in (("greedy", 0.0), ("with noise", 0.7)):
            decided = engine.decide([segment], [Choosing([-1] * size, temperature, 5)])
            if decided is None or not torch.equal(decided[0][0], alone):
                differing.append(name)
    finally:
        engine.kv_cache.release(kv)
    return {"rows": size, "differing": differing}


def _copy_bandwidth(context: Context) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    size = COPIED if context.on_gpu else COPIED >> 6
    source = torch.zeros(size, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), context)


def _seconds(work: Any, context: Context) -> float:
    """Of a call on the device: its own time on a GPU, the clock's on a CPU."""
    if context.on_gpu:
        return event_seconds(work, CALLS)
    return _clocked(work, lambda: None)


def _wall_seconds(work: Any, engine: Engine) -> float:
    """Of a call with the wait for it, by the host's clock."""
    return _clocked(work, engine.synchronize)


def _clocked(work: Any, wait: Any) -> float:
    work()
    times = []
    for _ in range(CALLS // 4):
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return median(times)


def _chosen(engine: Engine) -> str:
    bits = "a token has equal bits in any company" if engine.batch_invariant else "a token's bits go by its company"
    return f"the target's forwards have {engine.most_rows} rows; {bits}"


def _costs(engine: Engine) -> dict[str, float]:
    """Milliseconds of a forward by its rows, as the policies know them."""
    return {str(each.rows): round(1000 * each.seconds, 4) for each in engine.info.forward_costs}


def _memory(context: Context) -> dict[str, float] | str:
    """GiB of the device."""
    if not context.on_gpu:
        return f"not measured: {NO_GPU}"
    free, total = torch.cuda.mem_get_info()
    held = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "in use": total - free,
    }
    return {name: round(size / 2**30, 2) for name, size in held.items()}
