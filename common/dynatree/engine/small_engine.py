"""The engine of a small model that no session uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from dynatree.engine.cpu.native import is_native
from dynatree.engine.cpu.native_program import program_of
from dynatree.engine.cpu.packing import pack
from dynatree.engine.forward.runner import Runner
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.runners import runner_of
from dynatree.engine.support.small_model import small_model


@dataclass(frozen=True, eq=False)
class SmallEngine:
    """Computes the forward passes of a model that no session uses; implements `Probed`."""

    model: PreTrainedModel
    kv_cache: KVCache
    runner: Runner

    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """See `Engine.forward`."""
        return self.runner.run(segments)


def small_engine(model: PreTrainedModel, shape: KVShape, context_length: int) -> SmallEngine:
    """Make an engine for a small model that runs on the CPU the way large ones do, with room for two sessions."""
    native = is_native(model.device, model.dtype)
    pack(model, native)
    kv_cache = KVCache(shape, 2 * context_length + 8, model.dtype, model.device)
    return SmallEngine(model, kv_cache, runner_of(model, kv_cache, native=native))


def kernels_of(config: PretrainedConfig, context_length: int) -> str:
    """Name the kernels that compute the models of a configuration, where their linear layers are native."""
    model = small_model(config, context_length, seed=0)
    pack(model, native=True)
    return "native kernels in transformers' modules" if program_of(model) is None else "a native program"
