"""Whether layers of a model are streamed, and how many stay in memory."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import GenerationConfig, PretrainedConfig

from dynatree.common.engine.arena import KVShape
from dynatree.common.engine.kv_budget import CPU_SHARE, GPU_SHARE, free_memory
from dynatree.common.engine.model_settings import DTYPES, ModelSettings
from dynatree.common.engine.streaming.layer_cache import default_folder
from dynatree.common.engine.streaming.layout import bytes_of
from dynatree.common.engine.streaming.streamed_model import StreamedModel, load_streamed, plan_of, skeleton
from dynatree.common.errors import StartupError

log = logging.getLogger(__name__)

# of the free memory. A target that is nearly too large is better kept whole, with few keys and values: what is
# streamed takes seconds a step. Once layers are streamed, some more of them cost little, and room is worth more.
WHOLE_SHARE = 0.85
WEIGHTS_SHARE = 0.7
GPU_WEIGHTS_SHARE = 0.9  # for both; nothing else runs there
_LOADED_SHARE = 0.97  # loading leaves some in use besides weights


def streamed_model(settings: ModelSettings, config: PretrainedConfig, device: str, name: str) -> StreamedModel | None:
    """The model with streamed layers, where some are asked for or do not fit; None where all stay on the device.

    On a CPU they are read from the disk, on a GPU they are copied from the host's memory.

    Raises:
        StartupError: They cannot be streamed, or their files are not what was written.
    """
    asked, folder, where = settings.resident_layers, Path(settings.model), torch.device(device)
    if where.type not in ("cpu", "cuda"):
        if asked is not None:
            raise StartupError(f"layers are streamed to a CPU or a CUDA GPU, and the device is {device}")
        return None
    dtype = DTYPES.get(settings.dtype) or getattr(config, "dtype", None) or torch.float32
    model = skeleton(config, dtype)
    free = free_memory(where)
    if asked is None and (free is None or bytes_of(model) <= _share(where, WHOLE_SHARE) * free):
        return None
    plan = plan_of(model)
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
            raise StartupError("on a GPU, --fixed-rows and streamed layers do not go together")
    source = cache or "the host's memory"
    log.info("%s: %d of %d layers stay in memory, the others are streamed from %s", name, resident, plan.layers, source)
    if not folder.is_dir():
        wanted, others = ["*.safetensors", "*.json"], ["*/*", "consolidated*"]  # the same weights in other forms
        folder = Path(snapshot_download(settings.model, allow_patterns=wanted, ignore_patterns=others))
    loaded = load_streamed(model, folder, name, resident, where, cache)
    if (folder / "generation_config.json").exists():
        loaded.model.generation_config = GenerationConfig.from_pretrained(folder)
    try:
        loaded.turns.stream.check()
    except BaseException:
        loaded.turns.stream.close()
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
            f"the layers that the GPU has no room for take {needed / 1e9:.1f} GB of the host's memory, and "
            f"{free / 1e9:.1f} GB are free"
        )


def _session_bytes(settings: ModelSettings, config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Of the keys and values of one session, by the names that most configurations have; 0 where it has others."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    shape = KVShape(text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or heads, size)
    context = getattr(text, "max_position_embeddings", None) or 0
    return (min(context, settings.max_context or context) + settings.speculative_slots) * shape.slot_bytes(dtype)
