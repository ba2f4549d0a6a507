"""Chooses the runner of a model's forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from dynatree.engine.cpu.native_program import program_of
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.forward.attention import SegmentAttending
from dynatree.engine.forward.eager import EagerRunner
from dynatree.engine.forward.flat_forward import FlatForward
from dynatree.engine.forward.offloaded_layers import OffloadedLayers
from dynatree.engine.forward.runner import Runner
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache


def runner_of(
    model: PreTrainedModel,
    context_length: int,
    kv_cache: KVCache,
    attending: Callable[[Sequence[Segment]], SegmentAttending],
    native: bool,
    offloaded: OffloadedLayers | None,
) -> Runner:
    """Return the runner for forward passes of any size."""
    program = program_of(model) if native else None
    if program is None:
        return EagerRunner(FlatForward(model, context_length), kv_cache, attending)
    return NativeRunner(program, kv_cache, offloaded)
