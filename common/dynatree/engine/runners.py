"""Chooses the runner of a model's forward passes."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedModel

from dynatree.engine.cpu.native_attention import NativeBatch
from dynatree.engine.cpu.native_program import program_of
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.forward.batch import Batch
from dynatree.engine.forward.eager import EagerRunner
from dynatree.engine.forward.flat_forward import FlatForward
from dynatree.engine.forward.offloaded_layers import OffloadedLayers
from dynatree.engine.forward.runner import Runner
from dynatree.engine.kv.kv_cache import KVCache


def runner_of(
    model: PreTrainedModel,
    kv_cache: KVCache,
    *,
    native: bool,
    padded: bool = False,
    offloaded: OffloadedLayers | None = None,
) -> Runner:
    """Return the runner for forward passes of any size.

    Args:
        model: The model.
        kv_cache: KV cache that stores its keys and values.
        native: Whether the project's kernels compute its attention.
        padded: Whether torch's attention pads its operands to batch-invariant sizes.
        offloaded: Loads the model's last layers into memory while the layers before them compute.
    """
    if not native:
        batch = partial(Batch, kv_cache=kv_cache, batch_invariant=padded)
        return EagerRunner(FlatForward(model, kv_cache.shape), kv_cache, batch)
    program = program_of(model)
    if program is None:
        return EagerRunner(FlatForward(model, kv_cache.shape), kv_cache, partial(NativeBatch, kv_cache=kv_cache))
    return NativeRunner(program, kv_cache, offloaded)
