"""Loads weights from a checkpoint that packs them in 4 or 8 bits (GPTQ, AWQ, compressed-tensors)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.model.checkpoint import Checkpoint
from dynatree.engine.quantized.layers import layer_of
from dynatree.engine.weights.packed_weights import format_of
from dynatree.engine.weights.quantized_weight import QuantizedWeight, format_name


class PackedFiles:
    """The tensors of a checkpoint with packed weights; implements `QuantizedFiles`.

    Attributes:
        name: Name of the model, for messages.
    """

    def __init__(
        self, folder: Path, name: str, settings: Mapping[str, Any], model: PreTrainedModel, native: bool
    ) -> None:
        """Find the tensors.

        Args:
            folder: Folder of the checkpoint.
            name: Name of the model, for messages.
            settings: Its `quantization_config`.
            model: Model from `skeleton`. Its dtype is that of activations, and of weights that are not quantised.
            native: Whether the project's own kernels compute the model.

        Raises:
            StartupError: The format is not served, a tensor is missing, there are scales without codes, or the groups
                of GPTQ are not in order.
        """
        self.name = name
        self._native = native
        self._settings = dict(settings)
        self._dtype = model.dtype
        try:
            self._format = format_of(settings)
        except ValueError as error:
            raise self._refusal(error) from None
        self._checkpoint = Checkpoint(folder, name, model)
        packed = {path: layer for path, layer in model.named_modules() if self._tensors(layer, path)}
        needed = [
            f"{owner}.{self._format.scales}" if last == "weight" and owner in packed else name
            for name, _ in model.named_parameters()
            for owner, _, last in [name.rpartition(".")]
        ]
        missing = [each for each in needed if each not in self._checkpoint]
        if missing:
            mixture = ".experts." in missing[0]
            raise self._refusal(
                f"experts in {self._format.name} weights are not served"
                if mixture
                else f"its checkpoint lacks {missing[0]}"
            )
        for each in self._checkpoint:
            owner, _, last = each.rpartition(".")
            codes = (f"{owner}.{other}" for other in self._format.tensors if other != last)
            if last == self._format.scales and not any(other in self._checkpoint for other in codes):
                raise self._refusal(f"its checkpoint has {each}, but no codes of {owner}")  # of AWQ's activations
        if settings.get("desc_act") and packed:  # one layer shows whether the groups are in order
            self._weight(*next(iter(packed.items())))

    @property
    def formats(self) -> str:
        """See `QuantizedFiles.formats`."""
        return format_name(self._format.name, self._format.bits)

    def identity(self) -> str:
        """See `WeightFiles.identity`; the settings tell how the tensors are read."""
        settings = json.dumps(self._settings, sort_keys=True, default=str)
        return hashlib.sha256(f"{settings} {self._checkpoint.identity()}".encode()).hexdigest()

    def bytes_of(self, module: nn.Module, prefix: str = "") -> int:
        """See `QuantizedFiles.bytes_of`."""
        packed = {prefix + path: layer for path, layer in module.named_modules() if self._tensors(layer, prefix + path)}
        if not self._native:
            packed = {}
        floats = {prefix + name: each for name, each in module.named_parameters()}
        total = sum(each.numel() for name, each in floats.items() if name.removesuffix(".weight") not in packed)
        return total * self._dtype.itemsize + sum(self._bytes(path, layer) for path, layer in packed.items())

    @torch.inference_mode()
    def fill(self, module: nn.Module, prefix: str = "") -> None:
        """See `WeightFiles.fill`."""
        for path, layer in list(module.named_modules()):
            if not self._tensors(layer, prefix + path) or not layer.weight.is_meta:
                continue
            weight = self._weight(prefix + path, layer)
            bias = f"{prefix}{path}.bias"
            loaded = None if layer.bias is None else self._checkpoint.read([bias])[bias]
            module.set_submodule(path, layer_of(weight, loaded, self._dtype, self._native))
        self._checkpoint.fill(module, prefix)

    def _weight(self, path: str, layer: nn.Module) -> QuantizedWeight:
        """Read the weight of the layer at a path in the model."""
        own = self._tensors(layer, path)
        stored = self._checkpoint.stored(own.values())
        try:
            weight = self._format.unpacked({each: stored[full] for each, full in own.items()})
        except KeyError as error:
            raise self._refusal(f"its checkpoint lacks {path}.{error.args[0]}") from None
        except ValueError as error:
            raise self._refusal(f"{path}: {error}") from None
        expected = list(layer.weight.shape)  # type: ignore[arg-type]
        if list(weight.codes.shape) != expected:
            raise self._refusal(f"{path} is {list(weight.codes.shape)}, expected {expected}")
        return weight

    def _tensors(self, layer: nn.Module, path: str) -> dict[str, str]:
        """Return the packed tensors of the layer at a path in the model, by their names in the format."""
        named = {each: f"{path}.{each}" for each in self._format.tensors}
        own = {each: full for each, full in named.items() if full in self._checkpoint}
        return own if type(layer) is nn.Linear and set(own) - {"weight"} else {}

    def _bytes(self, path: str, layer: nn.Module) -> int:
        codes = layer.weight.numel() * self._format.bits // 8  # type: ignore[operator]
        scales = math.prod(self._checkpoint.shape(f"{path}.{self._format.scales}"))
        return int(codes) + scales * self._format.scale_bytes

    def _refusal(self, reason: object) -> StartupError:
        return StartupError(f"model {self.name} cannot be served: {reason}")
