"""Finds the quantised weights of a model: in a GGUF file, or in a folder with a `quantization_config`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from dynatree.common.errors import StartupError
from dynatree.common.limits import ALL_LAYERS
from dynatree.engine.cpu.native import is_native
from dynatree.engine.model.files import check_rounding
from dynatree.engine.model.generation_defaults import adopt_generation_config
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.model.weight_files import Unfilled
from dynatree.engine.quantized.gguf_file import GGUFFile
from dynatree.engine.quantized.packed_files import PackedFiles
from dynatree.engine.settings import ModelSettings, is_gguf
from dynatree.engine.weights.packed_weights import METHODS

_DTYPE = torch.bfloat16  # of activations, where neither the file nor the user names one


def method_of(config: PretrainedConfig) -> str | None:
    """Return the method of a configuration's quantised weights, or None if they are not quantised."""
    return _quantization(config).get("quant_method")


def unpacked_here(config: PretrainedConfig, device: torch.device) -> bool:
    """Whether a checkpoint has packed weights that this project reads, and not transformers with other packages."""
    return device.type == "cpu" and method_of(config) in METHODS


def quantized_model(
    settings: ModelSettings, config: PretrainedConfig, device: torch.device, name: str, *, dequantises: bool = False
) -> Unfilled | None:
    """Find the quantised weights of a model; return None if its files hold others, or ones that transformers reads.

    GPTQ, AWQ and compressed-tensors are read on a CPU. On a GPU, and for other methods, transformers and the method's
    packages decide.

    Args:
        settings: Settings of the model.
        config: Its configuration.
        device: Device that computes.
        name: Name of the model, for messages.
        dequantises: Whether all weights are dequantised even where the project's own kernels are available.

    Raises:
        StartupError: The files cannot be served, or options exclude them.
    """
    path, is_file = Path(settings.model), is_gguf(settings.model)
    check_rounding(settings.model, settings.weights)
    if not is_file and method_of(config) is None:
        return None
    knows: Any = AutoHfQuantizer.supports_quant_method
    if not is_file and not knows(_quantization(config)):
        raise StartupError(
            f"model {name} cannot be served: transformers does not know its quant_method, {method_of(config)!r}, and "
            "would ignore the scales of its weights"
        )
    ours = is_file or unpacked_here(config, device)
    if not ours and settings.resident_layers not in (None, ALL_LAYERS):
        raise StartupError(f"model {name} has quantised weights, which do not go together with --resident-layers")
    if not ours:
        return None
    dtype = _DTYPE if is_file or not isinstance(config.dtype, torch.dtype) else config.dtype
    if settings.dtype != "auto":
        dtype = getattr(torch, settings.dtype)
    native = is_native(device, dtype) and not dequantises
    if is_file:
        model = skeleton(config, dtype)
        keeps = native and settings.weights == "auto"  # else blocks are dequantised, and rounded by the caller
        return Unfilled(model, GGUFFile(path, model, keeps))
    if not path.is_dir():
        wanted = ["*.safetensors", "*.json"]
        path = Path(snapshot_download(settings.model, allow_patterns=wanted, ignore_patterns=["*/*"]))
    plain = copy.deepcopy(config)
    del plain.quantization_config
    model = skeleton(plain, dtype)
    adopt_generation_config(model, path)
    return Unfilled(model, PackedFiles(path, name, _quantization(config), model, native))


def _quantization(config: PretrainedConfig) -> dict[str, Any]:
    settings: Any = getattr(config, "quantization_config", None) or {}
    return dict(settings if isinstance(settings, dict) else settings.to_dict())
