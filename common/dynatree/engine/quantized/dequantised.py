"""Loads a model whose weights are quantised as transformers' own model of the dequantised weights, for comparisons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dynatree.engine.model.files import checkpoint_of
from dynatree.engine.quantized.layers import quantize
from dynatree.engine.quantized.loading import quantised_model, unpacked_here
from dynatree.engine.settings import GGUF, WEIGHTS, ModelSettings


@torch.inference_mode()
def dequantised_model(settings: ModelSettings, dtype: str, device: torch.device) -> PreTrainedModel | None:
    """Load the dequantised weights of a model in float32; return None if none are quantised.

    transformers reads GGUF files, and this project the other formats.

    Args:
        settings: Settings with which the model is served.
        dtype: Data type in which it is served, and from which its weights are rounded.
        device: Device on which it is served.

    Raises:
        StartupError: The model cannot be served.
    """
    where = checkpoint_of(settings.model)
    if settings.model.endswith(GGUF):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    elif settings.weights != "auto":
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
        output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        quantize(model, WEIGHTS[settings.weights], torch.float32, native=False, output=output)
        model.float()  # type: ignore[no-untyped-call]
    else:
        config = AutoConfig.from_pretrained(**where, trust_remote_code=False)
        whole = replace(settings, dtype="float32", resident_layers=None)
        name = Path(settings.model).name
        packed = unpacked_here(config, device) and quantised_model(whole, config, device, name, dequantises=True)
        if not packed:
            return None
        packed.files.fill(packed.model)
        packed.model.set_attn_implementation("eager")
        model = packed.model
    moved: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
    return moved
