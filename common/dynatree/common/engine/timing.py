"""The seconds that forwards of a loaded model take on this machine, measured before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from dynatree.common.engine.engine import Engine
from dynatree.common.engine.segment import Segment
from dynatree.common.kv_range import KVRange
from dynatree.common.model_info import FORWARD_SIZES, ForwardCost

log = logging.getLogger(__name__)

CONTEXT = 128  # slots that the tokens attend to
MAX_PASSES = 5
LEAST_PASSES = 2  # the first forward over a size also prepares its kernels
SIZE_SECONDS = 0.6  # a size that took so long in all is not measured again
LONG_SECONDS = 2.0  # a size that took so long is measured once
ALL_SECONDS = 7.0  # no further size is tried once all took so long
LAST = (3, 5)  # between sizes of nearly their cost, so a slow model does without them
REST_SECONDS = 0.01  # longer than idle threads turn for more work
LEVELS = 4  # forwards of a round
ROUNDS = 5
NEARLY = 1.05  # times the best: as fast


def measure_forwards(engine: Engine, max_rows: int) -> tuple[ForwardCost, ...]:
    """The cost of a forward over each of `FORWARD_SIZES` up to `max_rows` tokens behind a context: the least of some.

    Where more than so many rows take several forwards, the sizes at which one more begins are measured too.

    Small sizes are measured several times, since most rounds have small trees; large sizes are left out where they take
    long. The first forward warms the device up and does not count. No session may be open.

    Where layers are streamed, a forward takes the time of reading them, or that of computing where that is longer. The
    latter is measured without reading, and goes on in a straight line beyond the sizes that were measured. What reading
    takes of the cores comes on top.
    """
    if engine.stream is None:
        return _measured(engine, max_rows)
    sweep = engine.stream.sweep_seconds
    with engine.stream.paused():
        computing = _measured(engine, max_rows)
    log.info("%s: %.2f GB of layers are read in %.2f s", engine.info.name, engine.stream.bytes / 1e9, sweep)
    taken = engine.stream.sweep_cpu_seconds / torch.get_num_threads()
    return tuple(ForwardCost(each.rows, max(each.seconds + taken, sweep)) for each in _continued(computing, max_rows))


def _continued(costs: Sequence[ForwardCost], max_rows: int) -> list[ForwardCost]:
    """Costs, and beyond the largest size those on the line through the last two."""
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
    kv = engine.arena.reserve(context + max(sizes, default=1))
    assert kv is not None, "measured before any session is open"
    try:
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
        engine.arena.release(kv)
    return tuple(ForwardCost(rows, min(seconds)) for rows, seconds in sorted(measured.items()))


def choose_threads(engine: Engine) -> int:
    """Have a draft run on the fewest threads that are as fast as any, and return their number.

    What is timed is what a draft does: a few forwards over one token, after a rest in which the other threads fell
    asleep. A small model gains little by more threads, and on many cores it loses. No session may be open.
    """
    most = torch.get_num_threads()
    counts = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
    if most == 1 or engine.arena.device.type != "cpu":
        return most
    context = min(CONTEXT, engine.info.context_length // 2)
    kv = engine.arena.reserve(context + 1)
    assert kv is not None, "measured before any session is open"
    try:
        seconds = {count: min(_round(engine, kv, context, count) for _ in range(ROUNDS)) for count in counts}
    finally:
        engine.arena.release(kv)
    chosen = next(count for count in counts if seconds[count] <= NEARLY * min(seconds.values()))
    torch.set_num_threads(chosen)
    log.info("%s: %d of %d threads are as fast as any", engine.info.name, chosen, most)
    return chosen


def _round(engine: Engine, kv: KVRange, context: int, threads: int) -> float:
    """The seconds of a few forwards on so many threads, after a rest."""
    torch.set_num_threads(threads)
    time.sleep(REST_SECONDS)
    return sum(_seconds(engine, kv, context, 1) for _ in range(LEVELS))


def _seconds(engine: Engine, kv: KVRange, context: int, rows: int) -> float:
    """The seconds of one forward over `rows` tokens; the context's contents do not matter, so it is not read first."""
    tokens = [token % engine.info.vocab_size for token in range(rows)]
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    started = time.perf_counter()
    engine.forward([Segment(kv, context, tokens, range(context, context + rows), mask=mask)])
    engine.synchronize()
    return time.perf_counter() - started
