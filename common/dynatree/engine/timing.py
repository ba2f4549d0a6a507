"""Measures how long the forward passes of a loaded model take on this machine, before the first request."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence

import torch

from dynatree.common.model_info import FORWARD_SIZES, ForwardCost
from dynatree.engine.engine import Engine
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_range import KVRange

log = logging.getLogger(__name__)

CONTEXT = 128  # KV slots that the tokens attend to
MAX_PASSES = 5
LEAST_PASSES = 2  # the first forward pass over a size also prepares its kernels
SIZE_SECONDS = 0.6  # a size is not measured again after this total time
LONG_SECONDS = 2.0  # a size is measured only once if it takes this long
ALL_SECONDS = 7.0  # no further size is measured after this total time over all sizes
LAST = (3, 5)  # measured last: their costs are close to their neighbours', so a slow model can skip them
REST_SECONDS = 0.01  # longer than idle threads spin for more work
LEVELS = 4  # forward passes of a round
ROUNDS = 5
NEARLY = 1.05  # a time within this factor of the best counts as equally fast


def measure_forwards(engine: Engine, max_rows: int) -> tuple[ForwardCost, ...]:
    """Measure the cost of a forward pass over each of `FORWARD_SIZES` up to `max_rows` tokens after a context.

    A cost is the least of several measurements. If the engine splits forward passes at `most_rows`, the sizes just
    above each split are measured too. Small sizes are measured several times, because most rounds have small trees;
    large sizes are skipped if they take long. A first forward pass warms up the device and does not count. No session
    may be open.

    The tokens are random, so that the cost of rows counts the experts that they wake. In a small mixture trained on
    books, the rows of trees woke 0.9 to 1.1 times as many experts of a layer as random tokens.

    With offloaded layers, a forward pass takes the longer of reading the layers and computing. The computing time is
    measured without reading and extrapolated linearly beyond the measured sizes. It includes a share for the CPU time
    of reading.
    """
    if engine.source is None:
        return _measured(engine, max_rows)
    sweep = engine.source.sweep_seconds
    with engine.source.paused():
        computing = _measured(engine, max_rows)
    log.info("%s: %.2f GB of layers are read in %.2f s", engine.info.name, engine.source.bytes / 1e9, sweep)
    taken = engine.source.sweep_cpu_seconds / torch.get_num_threads()
    return tuple(ForwardCost(each.rows, max(each.seconds + taken, sweep)) for each in _continued(computing, max_rows))


def _continued(costs: Sequence[ForwardCost], max_rows: int) -> list[ForwardCost]:
    """Return the costs, extended beyond the largest size along the line through the last two."""
    if len(costs) < 2:
        return list(costs)
    before, last = costs[-2:]
    slope = max((last.seconds - before.seconds) / (last.rows - before.rows), 0.0)
    beyond = (rows for rows in FORWARD_SIZES if last.rows < rows <= max_rows)
    return [*costs, *(ForwardCost(rows, last.seconds + slope * (rows - last.rows)) for rows in beyond)]


def _measured(engine: Engine, max_rows: int) -> tuple[ForwardCost, ...]:
    context = min(CONTEXT, engine.info.context_length // 2)
    most = min(max_rows, engine.info.context_length - context)
    steps = range(engine.most_rows + 1, most, engine.most_rows) if engine.most_rows else ()
    sizes = sorted({rows for rows in (*FORWARD_SIZES, *steps) if rows <= most})
    measured: dict[int, list[float]] = {}
    kv = engine.kv_cache.reserve(context + max(sizes, default=1))
    assert kv is not None, "measured before any session is open"
    try:
        if engine.kv_cache.shape.recurrent is not None:  # which cannot continue from tokens that were never read
            engine.forward([Segment(kv, 0, [0] * context, range(context), keep=[context - 1])])
        _seconds(engine, kv, context, 1)
        for rows in sorted(sizes, key=lambda rows: (rows in LAST, rows)):
            measured[rows] = [_seconds(engine, kv, context, rows)]
            if sum(map(sum, measured.values())) > ALL_SECONDS:
                break
        for _ in range(MAX_PASSES - 1):
            for rows, seconds in measured.items():
                again = len(seconds) < LEAST_PASSES and sum(seconds) < LONG_SECONDS
                if again or sum(seconds) < SIZE_SECONDS:
                    seconds.append(_seconds(engine, kv, context, rows))
    finally:
        engine.kv_cache.release(kv)
    return tuple(ForwardCost(rows, min(seconds)) for rows, seconds in sorted(measured.items()))


def choose_threads(engine: Engine) -> int:
    """Set a draft model to the fewest threads that are as fast as any number, and return that number.

    The timed workload is a draft's: a few forward passes over one token, after a rest in which the other threads fall
    asleep. A small model gains little from more threads, and on many cores it gets slower. No session may be open.
    """
    most = torch.get_num_threads()
    counts = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
    if most == 1 or engine.kv_cache.device.type != "cpu":
        return most
    context = min(CONTEXT, engine.info.context_length // 2)
    kv = engine.kv_cache.reserve(context + 1)
    assert kv is not None, "measured before any session is open"
    try:
        seconds = {count: min(_round(engine, kv, context, count) for _ in range(ROUNDS)) for count in counts}
    finally:
        engine.kv_cache.release(kv)
    chosen = next(count for count in counts if seconds[count] <= NEARLY * min(seconds.values()))
    torch.set_num_threads(chosen)
    log.info("%s: using %d of %d threads, the fewest that are as fast as any number", engine.info.name, chosen, most)
    return chosen


def _round(engine: Engine, kv: KVRange, context: int, threads: int) -> float:
    """Return the seconds of a few forward passes on `threads` threads, after a rest."""
    torch.set_num_threads(threads)
    time.sleep(REST_SECONDS)
    return sum(_seconds(engine, kv, context, 1) for _ in range(LEVELS))


def _seconds(engine: Engine, kv: KVRange, context: int, rows: int) -> float:
    """Return the seconds of a forward pass over `rows` tokens after a context that is left unwritten."""
    tokens = random.Random(0).choices(range(min(engine.info.vocab_size, len(engine.tokenizer))), k=rows)
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    started = time.perf_counter()
    engine.forward([Segment(kv, context, tokens, range(context, context + rows), mask=mask)])
    engine.synchronize()
    return time.perf_counter() - started
