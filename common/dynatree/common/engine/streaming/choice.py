"""Whether layers of a model are streamed, and how many stay in memory."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import GenerationConfig, PretrainedConfig

from dynatree.common.engine.kv_budget import free_memory
from dynatree.common.engine.model_settings import DTYPES, ModelSettings
from dynatree.common.engine.streaming.layer_cache import default_folder
from dynatree.common.engine.streaming.streamed_model import StreamedModel, load_streamed, plan_of, skeleton
from dynatree.common.errors import StartupError

log = logging.getLogger(__name__)

WEIGHTS_SHARE = 0.7  # of the free memory; keys and values need some of the rest


def streamed_model(settings: ModelSettings, config: PretrainedConfig, device: str, name: str) -> StreamedModel | None:
    """The model with streamed layers, where some are asked for or do not fit; None where all stay in memory.

    Raises:
        StartupError: They cannot be streamed, or their files are not what was written.
    """
    asked, folder = settings.resident_layers, Path(settings.model)
    if torch.device(device).type != "cpu":
        if asked is not None:
            raise StartupError(f"layers are streamed to CPUs only, and the device is {device}; expected --device cpu")
        return None
    free = free_memory(torch.device("cpu"))
    room = None if free is None else int(WEIGHTS_SHARE * free)
    if asked is None and (room is None or sum(each.stat().st_size for each in folder.glob("*.safetensors")) <= room):
        return None
    dtype = DTYPES.get(settings.dtype) or getattr(config, "dtype", None) or torch.float32
    model = skeleton(config, dtype)
    plan = plan_of(model)
    fitting = plan.layers if room is None else plan.resident(room)
    resident = fitting if asked is None else min(asked, plan.layers)
    if resident == plan.layers:
        return None
    log.info("%s: %d of %d layers stay in memory, the others are streamed", name, resident, plan.layers)
    if not folder.is_dir():
        folder = Path(snapshot_download(settings.model, allow_patterns=["*.safetensors", "*.json"]))
    loaded = load_streamed(model, folder, name, resident, settings.layer_cache or default_folder())
    if (folder / "generation_config.json").exists():
        loaded.model.generation_config = GenerationConfig.from_pretrained(folder)
    loaded.turns.stream.check()
    return loaded
