"""Loads models whose files hold quantised weights: GGUF files, and folders with a `quantization_config`."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig, PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.native import is_native
from dynatree.engine.quantized.gguf_model import load_gguf
from dynatree.engine.quantized.packed_model import load_packed, method_of
from dynatree.engine.settings import GGUF, ModelSettings
from dynatree.engine.weights.packed_weights import METHODS

_DTYPE = torch.bfloat16  # of activations, where neither the file nor the user names one


def quantized_model(
    settings: ModelSettings, config: PretrainedConfig, device: torch.device, name: str
) -> PreTrainedModel | None:
    """Load a model with quantised weights; return None if its files hold others, or ones that transformers reads.

    GPTQ, AWQ and compressed-tensors are read on a CPU. On a GPU, and for other methods, transformers and the method's
    packages decide.

    Raises:
        StartupError: The files cannot be served, or options exclude them.
    """
    path = Path(settings.model)
    if path.suffix != GGUF and (device.type != "cpu" or method_of(config) not in METHODS):
        return None
    for option, given in (
        ("--weights", settings.weights != "auto"),
        ("--resident-layers", settings.resident_layers is not None),
        ("--tensor-parallel", settings.tensor_parallel > 1),
    ):
        if given:
            raise StartupError(f"model {name} has quantised weights, which do not go together with {option}")
    dtype = _DTYPE if path.suffix == GGUF or not isinstance(config.dtype, torch.dtype) else config.dtype
    if settings.dtype != "auto":
        dtype = getattr(torch, settings.dtype)
    native = is_native(device, dtype)
    if path.suffix == GGUF:
        model = load_gguf(path, config, dtype, native)
    else:
        if not path.is_dir():
            wanted = ["*.safetensors", "*.json"]
            path = Path(snapshot_download(settings.model, allow_patterns=wanted, ignore_patterns=["*/*"]))
        model = load_packed(path, name, config, dtype, native)
    moved: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
    return moved
