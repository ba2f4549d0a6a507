"""What forwards of a loaded model take on this machine, measured before the first request."""

from __future__ import annotations

import math
import time

import torch

from dynatree.common.engine.attention import Segment
from dynatree.common.engine.engine import Engine
from dynatree.v1 import tree_pb2

# Rows after which what a forward takes may step up: multiples of matrix kernels' tiles, which have 4, 6, 8 or 16 rows.
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
CONTEXT = 128  # slots that the tokens attend to
PASSES = 5
ENOUGH_SECONDS = 3.0  # after which no further pass begins
MOST_SECONDS = 10.0  # after which no larger size is tried


def measure_forwards(engine: Engine, most_rows: int) -> list[tree_pb2.ForwardCost]:
    """The seconds of a forward over each of `SIZES` up to `most_rows` tokens behind a context: the least of a few.

    Large sizes are left out where they take long. The first forward, which also warms the device up, does not count. No
    session may be open.
    """
    context = min(CONTEXT, engine.info.context_length // 2)
    sizes = [rows for rows in SIZES if rows <= min(most_rows, engine.info.context_length - context)]
    costs: dict[int, float] = {}
    row = engine.arena.allocate()
    assert row is not None, "measured before any session is open"
    try:
        _seconds(engine, row, context, 1)
        began = time.perf_counter()
        for _ in range(PASSES):
            for rows in sizes:
                costs[rows] = min(costs.get(rows, math.inf), _seconds(engine, row, context, rows))
                if time.perf_counter() - began > MOST_SECONDS:
                    break
            if time.perf_counter() - began > ENOUGH_SECONDS:
                break
    finally:
        engine.arena.free(row)
    return [tree_pb2.ForwardCost(rows=rows, seconds=seconds) for rows, seconds in costs.items()]


def _seconds(engine: Engine, row: int, context: int, rows: int) -> float:
    """What the context holds makes no difference, so it is not read first."""
    tokens = [token % engine.info.vocab_size for token in range(rows)]
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    started = time.perf_counter()
    engine.forward([Segment(row, context, tokens, range(context, context + rows), mask=mask)])
    engine.synchronize()
    return time.perf_counter() - started
