"""Loads a model whose weights are quantised as transformers' own model of the dequantised weights, for comparisons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dynatree.engine.model.composite import KEY_MAPPING, text_config_of, without_report
from dynatree.engine.model.files import checkpoint_of
from dynatree.engine.model.gguf_config import config_of, has_own_config
from dynatree.engine.quantized.layers import quantize
from dynatree.engine.quantized.loading import quantized_model, unpacked_here
from dynatree.engine.settings import WEIGHTS, ModelSettings, is_gguf


@torch.inference_mode()
def dequantized_model(settings: ModelSettings, dtype: str, device: torch.device) -> PreTrainedModel | None:
    """Load the dequantised weights of a model in float32; return None if none are quantised.

    transformers reads the GGUF files that it can, and this project the other files.

    Args:
        settings: Settings with which the model is served.
        dtype: Data type in which it is served, and from which its weights are rounded.
        device: Device on which it is served.

    Raises:
        StartupError: The model cannot be served.
    """
    where = checkpoint_of(settings.model)
    is_file = is_gguf(settings.model)
    config = text_config_of(config_of(settings.model))
    if is_file and not has_own_config(settings.model):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=torch.float32)
    elif settings.weights != "auto":
        kind = getattr(torch, dtype)
        with without_report():
            model = AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=kind, key_mapping=KEY_MAPPING)
        output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        quantize(model, WEIGHTS[settings.weights], torch.float32, native=False, output=output)
        model.float()  # type: ignore[no-untyped-call]
    else:
        whole = replace(settings, dtype="float32", resident_layers=None)
        name = Path(settings.model).name
        if not is_file and not unpacked_here(config, device):
            return None
        packed = quantized_model(whole, config, device, name, dequantises=True)
        assert packed is not None
        packed.files.fill(packed.model)
        packed.model.set_attn_implementation("eager")
        model = packed.model
    moved: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
    return moved
