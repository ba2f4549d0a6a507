"""Loads a model whose checkpoint holds packed weights of 4 or 8 bits (GPTQ, AWQ, compressed-tensors)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.model.checkpoint import files_of, names_in
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.quantized.layers import layer_of
from dynatree.engine.weights.packed_weights import PackedFormat, format_of


def method_of(config: PretrainedConfig) -> str | None:
    """Return the method of a configuration's quantised weights, or None if they are not quantised."""
    return _settings(config).get("quant_method")


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    settings: Any = getattr(config, "quantization_config", None) or {}
    return dict(settings if isinstance(settings, dict) else settings.to_dict())


@torch.inference_mode()
def load_packed(folder: Path, name: str, config: PretrainedConfig, dtype: torch.dtype, native: bool) -> PreTrainedModel:
    """Load a model.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the model, for messages.
        config: Its configuration, with a `quantization_config`.
        dtype: Data type of activations, and of weights that are not quantised.
        native: Whether the project's own kernels compute the model.

    Raises:
        StartupError: The format is not served, or the tensors do not go together.
    """
    try:
        packed = format_of(_settings(config))
        plain = copy.deepcopy(config)
        del plain.quantization_config
        model = skeleton(plain, dtype)
        _load(model, folder, name, packed, native)
    except ValueError as error:
        raise StartupError(f"model {name} cannot be served: {error}") from error
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _load(model: PreTrainedModel, folder: Path, name: str, packed: PackedFormat, native: bool) -> None:
    files = files_of(folder, name)
    by_name = {ours: theirs for theirs, ours in names_in(model, files).items()}
    opened = {file: safe_open(folder / file, "pt") for file in set(files.values())}

    def read(ours: str) -> Tensor:
        theirs = by_name[ours]
        tensor: Tensor = opened[files[theirs]].get_tensor(theirs)  # type: ignore[no-untyped-call]
        return tensor

    def parameter_of(ours: str, expected: Tensor) -> nn.Parameter:
        loaded = read(ours)
        if loaded.shape != expected.shape or not loaded.is_floating_point():
            raise ValueError(f"{ours} is {loaded.dtype} {list(loaded.shape)}, expected {list(expected.shape)}")
        return nn.Parameter(loaded.to(model.dtype), requires_grad=False)

    quantised = {}
    for path, layer in model.named_modules():
        own = {each: f"{path}.{each}" for each in packed.tensors if f"{path}.{each}" in by_name}
        if type(layer) is nn.Linear and own and set(own) != {"weight"}:
            quantised[path] = own
    stored = {*by_name, *(f"{path}.weight" for path in quantised)}
    missing = [full for full, _ in model.named_parameters() if full not in stored]
    if missing:
        raise ValueError(f"its checkpoint lacks {missing[0]}")
    for path, own in quantised.items():
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        bias = parameter_of(f"{path}.bias", layer.bias) if layer.bias is not None else None
        try:
            weight = packed.unpacked({each: read(full) for each, full in own.items()})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if weight.codes.shape != layer.weight.shape:
            raise ValueError(f"{path} is {list(weight.codes.shape)}, expected {list(layer.weight.shape)}")
        model.set_submodule(path, layer_of(weight, bias, model.dtype, native))
    for full, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, last = full.rpartition(".")
            setattr(model.get_submodule(owner), last, parameter_of(full, parameter))
    model.tie_weights()
