"""A model with some layers resident in memory and the remaining layers offloaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.native import is_native
from dynatree.engine.cpu.packing import pack_linear
from dynatree.engine.forward.layer_source import SLOTS, LayerSource
from dynatree.engine.forward.offloaded_layers import OffloadedLayers
from dynatree.engine.model.checkpoint import Checkpoint
from dynatree.engine.model.fingerprint import sums_of
from dynatree.engine.model.size import parameters_of, step_bytes_of
from dynatree.engine.offload.disk_layers import DiskLayers
from dynatree.engine.offload.host_layers import HostLayers, blob_of
from dynatree.engine.offload.layer_cache import cached_layers
from dynatree.engine.offload.layer_file import Place
from dynatree.engine.offload.layout import bind, bytes_of, fill, tensors_of
from dynatree.engine.quantized.layers import quantize


@dataclass(frozen=True)
class OffloadedModel:
    """A loaded model with offloaded layers.

    Attributes:
        model: The model with all modules; the weights of offloaded layers lie in the source's slots.
        turns: Loads and releases the offloaded layers during a forward pass.
        sums: Sums of the offloaded tensors, for the model's fingerprint.
        parameters: Number of parameters of the whole model.
        step_bytes: Bytes of the weights that a forward pass over one token reads.
    """

    model: PreTrainedModel
    turns: OffloadedLayers
    sums: dict[str, list[Any]]
    parameters: int
    step_bytes: int

    @property
    def apart(self) -> list[nn.Module]:
        """The offloaded layers."""
        return list(layers_of(self.model)[1])[self.turns.first :]


@dataclass(frozen=True)
class LayerPlan:
    """The memory that a model's weights need.

    Attributes:
        layers: Number of layers.
        layer_bytes: Bytes of the largest layer.
        other_bytes: Bytes of all weights outside the layers.
    """

    layers: int
    layer_bytes: int
    other_bytes: int

    @property
    def step_bytes(self) -> int:
        """Bytes of all weights."""
        return self.layers * self.layer_bytes + self.other_bytes

    def resident(self, free: int) -> int:
        """Return the number of layers that fit into `free` bytes beside the other weights and the offloading slots."""
        room = free - self.other_bytes
        if self.layers * self.layer_bytes <= room:
            return self.layers
        return max(min(room // self.layer_bytes - SLOTS, self.layers - 1), 0)


def plan_of(model: PreTrainedModel, bits: int | None) -> LayerPlan:
    """Return the memory plan of a model without weights, whose linear layers are rounded to `bits` if given."""
    _, layers = layers_of(model)
    each = [bytes_of(layer, bits) for layer in layers]
    return LayerPlan(len(layers), max(each), bytes_of(model, bits) - sum(each))


def layers_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name of a model's list of decoder layers, and the list.

    Raises:
        StartupError: The model has no such list.
    """
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise StartupError(f"{model.config.model_type} has no list of {count} layers, so none of them can be offloaded")


def load_offloaded(
    model: PreTrainedModel,
    folder: Path,
    name: str,
    resident: int,
    device: torch.device,
    cache: Path | None,
    bits: int | None = None,
) -> OffloadedModel:
    """Load the weights of a model from its checkpoint and offload its last layers.

    Args:
        model: Model from `skeleton`.
        folder: Folder of the checkpoint.
        name: Name of the model, for messages.
        resident: Number of layers that stay on the device.
        device: Device that computes.
        cache: Folder of the layer caches that layers are read from; None means to copy them from the host's memory.
        bits: Bits to which the weights of linear layers are rounded; None for the checkpoint's own.

    Raises:
        StartupError: The checkpoint or the cache cannot be used.
    """
    parameters = parameters_of(model)  # before packing, which hides weights
    step_bytes = step_bytes_of(model) if bits is None else plan_of(model, bits).step_bytes
    prefix, layers = layers_of(model)
    checkpoint = Checkpoint(folder, name, model, prefix)
    native = is_native(device, model.dtype)
    layout = f"{'panels' if native else 'rows'}{f' of int{bits}' if bits else ''}"

    def build(index: int, given: Mapping[str, Tensor]) -> nn.Module:
        layer = copy.deepcopy(layers[index])
        try:
            fill(layer, given)
        except KeyError as error:
            raise StartupError(f"model {name}: its checkpoint lacks {error} of layer {index}") from error
        if bits is not None:
            quantize(layer, bits, model.dtype, native)
        if native:
            pack_linear(layer)
        return layer

    places: list[Mapping[str, Place]] = []
    sums: dict[str, list[Any]] = {}
    source: LayerSource
    if cache is None:
        blobs = []
        for index in range(resident, len(layers)):
            given = checkpoint.layer(index)
            blob, where = blob_of(tensors_of(build(index, given)), pinned=device.type == "cuda")
            blobs.append(blob)
            places.append(where)
            sums |= {f"{prefix}.{index}.{key}": sums_of(each) for key, each in given.items()}
        source = HostLayers(blobs, device)
    else:
        cached = cached_layers(cache, checkpoint, layout, len(layers), build)
        for index, each in enumerate(cached[resident:], resident):
            places.append(each.file.places)
            sums |= {f"{prefix}.{index}.{key}": value for key, value in each.sums.items()}
        source = DiskLayers([each.file for each in cached[resident:]])
    for index, layer in enumerate(layers):
        if index < resident:
            fill(layer, checkpoint.layer(index))
            if bits is not None:
                sums |= _sums(layer, f"{prefix}.{index}.")
                quantize(layer, bits, model.dtype, native)
        else:
            memory, where = source.memory(index - resident), places[index - resident]
            bind(layer, {name: place.of(memory) for name, place in where.items()})
    _load_others(model, checkpoint)
    if bits is not None:
        sums = _sums(model) | sums
        output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        quantize(model, bits, model.dtype, native, output)
    model.to(device)  # type: ignore[arg-type]
    turns = OffloadedLayers(source, resident, len(layers))
    turns.hook(layers)
    return OffloadedModel(model, turns, sums, parameters, step_bytes)


def _sums(module: nn.Module, prefix: str = "") -> dict[str, list[Any]]:
    """Return the sums of a module's weights before they are rounded, by their names in the model."""
    return {f"{prefix}{name}": sums_of(weight) for name, weight in module.named_parameters(remove_duplicate=False)}


def _load_others(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Load the weights outside the layers; tied weights take the tensor that they are tied to."""
    names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    for name, tensor in checkpoint.read([name for name in names if name in checkpoint]).items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(tensor.clone(), requires_grad=False))
    model.tie_weights()
    # parameters still on the meta device are missing from the checkpoint, so this raises StartupError
    checkpoint.read([name for name, parameter in model.named_parameters() if parameter.is_meta])
