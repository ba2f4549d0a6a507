"""Part 3: a target of which half the layers are copied from the host's memory, beside the same with all on the GPU."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from keeping import Bound, Measured
from pair import prompts

from dynatree.engine.engine import Engine
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings

if TYPE_CHECKING:
    from session import Context

STEPS = 10
ROWS = (1, 64, 256)


def offloaded(context: Context) -> Measured:
    """Logits of a prompt and of steps behind it, bit by bit; what a step of each takes; how fast layers are copied."""
    context.models.free()
    folder = str(context.models.folders[0])
    [(_, prompt)] = prompts(1)
    layers = context.sizes.shapes[0].layers
    found, seconds = [], {}
    with tempfile.TemporaryDirectory() as cache:
        for resident in (layers, layers // 2):
            settings = ModelSettings(
                folder,
                device=context.device,
                sessions=1,
                max_context=1024,
                fixed_rows=(),
                resident_layers=resident,
                layer_cache=Path(cache),
            )
            engine = load_engine(settings)
            found.append(_outputs(engine, prompt))
            seconds[resident] = {rows: _step_seconds(engine, rows) for rows in ROWS}
            stream = engine.source
            if stream is not None:
                sweep, size = stream.sweep_seconds, stream.bytes
                stream.close()
            del engine
            if context.on_gpu:
                torch.cuda.empty_cache()
    unlike = sum(not torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    figures = {
        "offloaded layers": layers - layers // 2,
        "bytes": size,
        "sweep, s": sweep,
        "copied, bytes/s": size / sweep,
        "forward, s": {f"{resident} layers on the device": each for resident, each in seconds.items()},
        "forwards with other bits": unlike,
    }
    half = seconds[layers // 2]
    says = [
        f"{size / 1e9:.2f} GB are copied in {1e3 * sweep:.1f} ms, {size / sweep / 1e9:.1f} GB/s",
        *(f"{rows} rows: {1e3 * half[rows]:.1f} ms, all there {1e3 * seconds[layers][rows]:.1f} ms" for rows in ROWS),
    ]
    return Measured(figures, says, [Bound("forwards with other bits where layers are offloaded", unlike, most=0)])


def _outputs(engine: Engine, prompt: tuple[int, ...]) -> list[torch.Tensor]:
    """The logits of a prompt's last token, and of greedy steps behind it."""
    kv = engine.kv_cache.reserve(len(prompt) + STEPS)
    assert kv is not None, "no session is open"
    tokens, logits = list(prompt), []
    for _ in range(STEPS):
        start = len(tokens) - 1 if logits else 0
        given = tokens[start:]
        segment = Segment(kv, start, given, range(start, len(tokens)), keep=[len(given) - 1])
        logits.append(engine.forward([segment])[0].float().cpu())
        tokens.append(int(logits[-1][0].argmax()))
    engine.kv_cache.release(kv)
    return logits


def _step_seconds(engine: Engine, rows: int) -> float:
    """The median of some forwards."""
    kv = engine.kv_cache.reserve(rows)
    assert kv is not None, "no session is open"
    times = []
    for _ in range(5):
        engine.synchronize()
        began = time.perf_counter()
        engine.forward([Segment(kv, 0, [5] * rows, range(rows), keep=[rows - 1])])
        engine.synchronize()
        times.append(time.perf_counter() - began)
    engine.kv_cache.release(kv)
    return median(times[1:])
