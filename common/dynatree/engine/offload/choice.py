"""Decides whether layers of a model are offloaded, and how many layers stay in memory."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import GenerationConfig, PretrainedConfig

from dynatree.common.errors import StartupError
from dynatree.engine.kv.budget import CPU_SHARE, GPU_SHARE, free_memory
from dynatree.engine.kv.kv_cache import KVShape
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.offload.layer_cache import default_folder
from dynatree.engine.offload.layout import bytes_of
from dynatree.engine.offload.offloaded_model import OffloadedModel, load_offloaded, plan_of
from dynatree.engine.settings import WEIGHTS, ModelSettings

log = logging.getLogger(__name__)

# Shares of the free memory for weights. A target that nearly fills the memory is better kept whole, with a small KV
# cache, because offloading costs seconds for each forward pass. Once layers are offloaded, a few more cost little, and
# free memory is worth more.
WHOLE_SHARE = 0.85
WEIGHTS_SHARE = 0.7
GPU_WEIGHTS_SHARE = 0.9  # in both cases on a GPU, where nothing else runs
_LOADED_SHARE = 0.97  # loading leaves some memory in use besides the weights


def offloaded_model(settings: ModelSettings, config: PretrainedConfig, device: str, name: str) -> OffloadedModel | None:
    """Load the model with offloaded layers if requested or if it does not fit; return None if all layers are resident.

    On a CPU, offloaded layers are read from the disk. On a GPU, they are copied from the host's memory.

    Raises:
        StartupError: The layers cannot be offloaded, or their files differ from the files that were written.
    """
    asked, folder, where = settings.resident_layers, Path(settings.model), torch.device(device)
    if where.type not in ("cpu", "cuda"):
        if asked is not None:
            raise StartupError(f"layers can be offloaded on a CPU or a CUDA GPU, but the device is {device}")
        return None
    named = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    dtype = named or getattr(config, "dtype", None) or torch.float32
    model = skeleton(config, dtype)
    free, bits = free_memory(where), WEIGHTS.get(settings.weights)
    if asked is None and (free is None or bytes_of(model, bits) <= _share(where, WHOLE_SHARE) * free):
        return None
    plan = plan_of(model, bits)
    fitting = plan.layers
    if free is not None:
        room = _session_bytes(settings, config, dtype) / (CPU_SHARE if where.type == "cpu" else GPU_SHARE)
        fitting = plan.resident(int(min(_share(where, WEIGHTS_SHARE) * free, _LOADED_SHARE * free - room)))
    resident = fitting if asked is None else min(asked, plan.layers)
    if resident == plan.layers:
        return None
    cache = None if _from_memory(where) else settings.layer_cache or default_folder()
    if cache is None:
        _check_host((plan.layers - resident) * plan.layer_bytes)
        if settings.fixed_rows:
            raise StartupError("on a GPU, --fixed-rows cannot be combined with offloaded layers")
    source = cache or "the host's memory"
    log.info(
        "%s: %d of %d layers stay in memory, the others are offloaded from %s", name, resident, plan.layers, source
    )
    if not folder.is_dir():
        wanted, others = ["*.safetensors", "*.json"], ["*/*", "consolidated*"]  # the same weights in other forms
        folder = Path(snapshot_download(settings.model, allow_patterns=wanted, ignore_patterns=others))
    loaded = load_offloaded(model, folder, name, resident, where, cache, bits)
    if (folder / "generation_config.json").exists():
        loaded.model.generation_config = GenerationConfig.from_pretrained(folder)
    try:
        loaded.turns.source.check()
    except BaseException:
        loaded.turns.source.close()
        raise
    return loaded


def _share(device: torch.device, of_cpu: float) -> float:
    return of_cpu if device.type == "cpu" else GPU_WEIGHTS_SHARE


def _from_memory(device: torch.device) -> bool:
    return device.type == "cuda"


def _check_host(needed: int) -> None:
    free = free_memory(torch.device("cpu"))
    if free is not None and needed > free:
        raise StartupError(
            f"the layers that do not fit on the GPU take {needed / 1e9:.1f} GB of the host's memory, but only "
            f"{free / 1e9:.1f} GB are free"
        )


def _session_bytes(settings: ModelSettings, config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a session's keys and values, or 0 if the configuration lacks the usual attribute names."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    shape = KVShape(text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or heads, size)
    context = getattr(text, "max_position_embeddings", None) or 0
    return (min(context, settings.max_context or context) + settings.speculative_slots) * shape.slot_bytes(dtype)
