"""What forwards of a loaded model take on this machine, measured before the first request."""

from __future__ import annotations

import time

import torch

from dynatree.common.engine.attention import Segment
from dynatree.common.engine.engine import Engine
from dynatree.common.model_info import ForwardCost

# Rows after which what a forward takes may step up: multiples of matrix kernels' tiles, which have 4, 6, 8 or 16 rows.
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
CONTEXT = 128  # slots that the tokens attend to
MOST_PASSES = 5
SIZE_SECONDS = 0.6  # on one size, after which it is not measured again
ALL_SECONDS = 7.0  # on all sizes, after which no larger one is tried


def measure_forwards(engine: Engine, most_rows: int) -> tuple[ForwardCost, ...]:
    """The seconds of a forward over each of `SIZES` up to `most_rows` tokens behind a context: the least of a few.

    Large sizes are left out where they take long, and small ones measured again: those are what most rounds have. The
    first forward, which also warms the device up, does not count. No session may be open.
    """
    context = min(CONTEXT, engine.info.context_length // 2)
    sizes = [rows for rows in SIZES if rows <= min(most_rows, engine.info.context_length - context)]
    measured: dict[int, list[float]] = {}
    row = engine.arena.allocate()
    assert row is not None, "measured before any session is open"
    try:
        _seconds(engine, row, context, 1)
        for rows in sizes:
            measured[rows] = [_seconds(engine, row, context, rows)]
            if sum(map(sum, measured.values())) > ALL_SECONDS:
                break
        for _ in range(MOST_PASSES - 1):
            for rows, seconds in measured.items():
                if sum(seconds) < SIZE_SECONDS:
                    seconds.append(_seconds(engine, row, context, rows))
    finally:
        engine.arena.free(row)
    return tuple(ForwardCost(rows, min(seconds)) for rows, seconds in measured.items())


def _seconds(engine: Engine, row: int, context: int, rows: int) -> float:
    """What the context holds makes no difference, so it is not read first."""
    tokens = [token % engine.info.vocab_size for token in range(rows)]
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    started = time.perf_counter()
    engine.forward([Segment(row, context, tokens, range(context, context + rows), mask=mask)])
    engine.synchronize()
    return time.perf_counter() - started
