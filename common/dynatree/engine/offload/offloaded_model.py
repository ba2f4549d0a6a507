"""A model with some layers resident in memory and the remaining layers offloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
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
from dynatree.engine.model.fingerprint import sums_of
from dynatree.engine.model.size import parameters_of, step_bytes_of
from dynatree.engine.model.weight_files import WeightFiles
from dynatree.engine.offload.disk_layers import DiskLayers
from dynatree.engine.offload.host_layers import HostLayers, blob_of
from dynatree.engine.offload.layer_cache import cached_layers
from dynatree.engine.offload.layer_file import Place
from dynatree.engine.offload.layout import bind, tensors_of
from dynatree.engine.quantized.layers import quantize


@dataclass(frozen=True)
class OffloadedModel:
    """A loaded model with offloaded layers.

    Attributes:
        model: The model with all modules; the weights of offloaded layers lie in the source's slots.
        turns: Loads and releases the offloaded layers during a forward pass.
        sums: Sums of the layers' tensors before they are rounded, for the model's fingerprint.
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
    def least(self) -> int:
        """Bytes in memory while all layers are offloaded."""
        return self.other_bytes + SLOTS * self.layer_bytes

    def resident(self, free: int) -> int:
        """Return the number of layers that fit into `free` bytes beside the other weights and the offloading slots."""
        room = free - self.other_bytes
        if self.layers * self.layer_bytes <= room:
            return self.layers
        return max(min(room // self.layer_bytes - SLOTS, self.layers - 1), 0)


def plan_of(model: PreTrainedModel, bytes_of: Callable[[nn.Module, str], int]) -> LayerPlan:
    """Return the memory plan of a model without weights.

    Args:
        model: Model from `skeleton`.
        bytes_of: Returns the bytes of a module's weights, of the module and the beginning of its weights' names.
    """
    prefix, layers = layers_of(model)
    each = [bytes_of(layer, f"{prefix}.{index}.") for index, layer in enumerate(layers)]
    return LayerPlan(len(layers), max(each), bytes_of(model, "") - sum(each))


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


def fill_rounded(model: PreTrainedModel, files: WeightFiles, bits: int, native: bool) -> dict[str, list[Any]]:
    """Load the layers of a model and round each at once, so that the memory never holds the floats of two layers.

    Args:
        model: Model from `skeleton`.
        files: Files of its weights.
        bits: 8 or 4.
        native: Whether the project's own kernels compute the layers.

    Returns:
        The sums of the layers' tensors before they are rounded, for the model's fingerprint.

    Raises:
        StartupError: The files cannot be used.
    """
    prefix, layers = layers_of(model)
    sums: dict[str, list[Any]] = {}
    for index, layer in enumerate(layers):
        own = _filled(layer, files, f"{prefix}.{index}.", model.dtype, bits, native)
        sums |= {f"{prefix}.{index}.{name}": each for name, each in own.items()}
    return sums


def _filled(
    layer: nn.Module, files: WeightFiles, prefix: str, dtype: torch.dtype, bits: int | None, native: bool
) -> dict[str, list[Any]]:
    """Load a layer, and return the sums of its tensors before they are rounded."""
    files.fill(layer, prefix)
    sums = {name: sums_of(each) for name, each in layer.state_dict().items()}
    if bits is not None:
        quantize(layer, bits, dtype, native)
    return sums


def _structure(layers: nn.ModuleList) -> list[Any]:
    """Return the names, shapes and dtypes of the weights of all layers, which a version or a configuration changes."""
    return [[(name, *each.shape, each.dtype) for name, each in layer.named_parameters()] for layer in layers]


def load_offloaded(
    model: PreTrainedModel,
    files: WeightFiles,
    resident: int,
    device: torch.device,
    cache: Path | None,
    bits: int | None = None,
) -> OffloadedModel:
    """Load the weights of a model and offload its last layers.

    Args:
        model: Model from `skeleton`.
        files: Files of its weights.
        resident: Number of layers that stay on the device.
        device: Device that computes.
        cache: Folder of the layer caches that layers are read from; None means to copy them from the host's memory.
        bits: Bits to which the weights of linear layers are rounded; None for the files' own.

    Raises:
        StartupError: The files or the cache cannot be used.
    """
    parameters = parameters_of(model)  # before packing, which hides weights
    prefix, layers = layers_of(model)
    native = is_native(device, model.dtype)
    # Files of 4 bits that an earlier version rounded, to one end only, have another name.
    rounding = {None: "", 8: " of int8", 4: " of int4, to either end"}[bits]
    layout = f"{'panels' if native else 'rows'}{rounding} of {_structure(layers)}"

    def filled(index: int, layer: nn.Module) -> dict[str, list[Any]]:
        return _filled(layer, files, f"{prefix}.{index}.", model.dtype, bits, native)

    def build(index: int) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
        layer = copy.deepcopy(layers[index])
        sums = filled(index, layer)
        if native:
            pack_linear(layer)
        return tensors_of(layer), sums

    places: list[Mapping[str, Place]] = []
    sums: dict[str, list[Any]] = {}
    source: LayerSource
    if cache is None:
        blobs = []
        for index in range(resident, len(layers)):
            tensors, own = build(index)
            blob, where = blob_of(tensors)
            blobs.append(blob)
            places.append(where)
            sums |= {f"{prefix}.{index}.{name}": each for name, each in own.items()}
        source = HostLayers(blobs, device)
    else:
        cached = cached_layers(cache, files, layout, len(layers), build)
        for index, each in enumerate(cached[resident:], resident):
            places.append(each.file.places)
            sums |= {f"{prefix}.{index}.{name}": value for name, value in each.sums.items()}
        source = DiskLayers([each.file for each in cached[resident:]])
    try:
        for index, layer in enumerate(layers):
            if index < resident:
                sums |= {f"{prefix}.{index}.{name}": each for name, each in filled(index, layer).items()}
            else:
                memory, where = source.memory(index - resident), places[index - resident]
                bind(layer, {name: place.of(memory) for name, place in where.items()})
        files.fill(model)
        if bits is not None:
            sums |= {name: sums_of(each) for name, each in model.state_dict().items() if name not in sums}
            output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
            quantize(model, bits, model.dtype, native, output, apart=list(layers))
        model.to(device)  # type: ignore[arg-type]
    except BaseException:
        source.close()
        raise
    turns = OffloadedLayers(source, resident, len(layers))
    turns.hook(layers)
    return OffloadedModel(model, turns, sums, parameters, step_bytes_of(model))
