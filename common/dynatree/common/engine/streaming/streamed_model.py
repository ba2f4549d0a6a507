"""A model of which some layers are in memory, and the others come and go."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dynatree.common.engine.attention import NAME
from dynatree.common.engine.model_fingerprint import sums_of
from dynatree.common.engine.model_size import parameters_of, step_bytes_of
from dynatree.common.engine.native import is_native
from dynatree.common.engine.packing import pack_linear
from dynatree.common.engine.streaming.checkpoint import Checkpoint
from dynatree.common.engine.streaming.layer_cache import cached_layers
from dynatree.common.engine.streaming.layer_file import Place
from dynatree.common.engine.streaming.layer_stream import LayerStream
from dynatree.common.engine.streaming.layout import bind, bytes_of, fill, tensors_of
from dynatree.common.engine.streaming.memory_stream import MemoryStream, blob_of
from dynatree.common.engine.streaming.stream import SLOTS, Stream
from dynatree.common.engine.streaming.streamed_layers import StreamedLayers
from dynatree.common.errors import StartupError


@dataclass(frozen=True)
class StreamedModel:
    """What was loaded.

    Attributes:
        model: Whole, as far as its modules can tell; a streamed layer's weights lie in the stream's memory.
        turns: Of the layers that are not in memory.
        sums: Of the streamed tensors, for the model's fingerprint.
        parameters: Of the whole model.
        step_bytes: Of the weights that a forward over one token reads.
    """

    model: PreTrainedModel
    turns: StreamedLayers
    sums: dict[str, list[Any]]
    parameters: int
    step_bytes: int

    @property
    def apart(self) -> list[nn.Module]:
        """The layers that are not in memory."""
        return list(layers_of(self.model)[1])[self.turns.first :]


@dataclass(frozen=True)
class LayerPlan:
    """What a model's memory would hold.

    Attributes:
        layers: Their number.
        layer_bytes: Of the largest.
        other_bytes: Of all other weights.
    """

    layers: int
    layer_bytes: int
    other_bytes: int

    def resident(self, free: int) -> int:
        """How many layers fit into so many bytes, with all other weights and the slots of those that are streamed."""
        room = free - self.other_bytes
        if self.layers * self.layer_bytes <= room:
            return self.layers
        return max(min(room // self.layer_bytes - SLOTS, self.layers - 1), 0)


def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model without weights: its parameters are on the meta device, what it computes itself is not."""
    with _parameters_on_meta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
        )
    model.tie_weights()
    model.train(False)
    return model


def plan_of(model: PreTrainedModel) -> LayerPlan:
    """What a model without weights would take."""
    _, layers = layers_of(model)
    whole = bytes_of(model)
    return LayerPlan(len(layers), max(map(bytes_of, layers)), whole - sum(map(bytes_of, layers)))


def layers_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """A model's decoder layers, and the name of their list.

    Raises:
        StartupError: It has none.
    """
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise StartupError(f"{model.config.model_type} has no list of {count} layers, so none of them can be streamed")


def load_streamed(
    model: PreTrainedModel, folder: Path, name: str, resident: int, device: torch.device, cache: Path | None
) -> StreamedModel:
    """Load a model without weights from its checkpoint, all but its last layers, which are streamed.

    Args:
        model: From `skeleton`.
        folder: Of the checkpoint.
        name: For messages.
        resident: Layers that stay on the device.
        device: That computes.
        cache: The folder of layer caches, from which layers are read; None: they are copied from the host's memory.

    Raises:
        StartupError: The checkpoint or the cache cannot be used.
    """
    parameters, step_bytes = parameters_of(model), step_bytes_of(model)  # before layers are laid out, which hides them
    prefix, layers = layers_of(model)
    checkpoint = Checkpoint(folder, name, model, prefix)
    native = is_native(device, model.dtype)

    def build(index: int, given: Mapping[str, Tensor]) -> nn.Module:
        layer = copy.deepcopy(layers[index])
        try:
            fill(layer, given)
        except KeyError as error:
            raise StartupError(f"model {name}: its checkpoint lacks {error} of layer {index}") from error
        if native:
            pack_linear(layer)
        return layer

    places: list[Mapping[str, Place]] = []
    sums: dict[str, list[Any]] = {}
    stream: Stream
    if cache is None:
        blobs = []
        for index in range(resident, len(layers)):
            given = checkpoint.layer(index)
            blob, where = blob_of(tensors_of(build(index, given)), pinned=device.type == "cuda")
            blobs.append(blob)
            places.append(where)
            sums |= {f"{prefix}.{index}.{key}": sums_of(each) for key, each in given.items()}
        stream = MemoryStream(blobs, device)
    else:
        cached = cached_layers(cache, checkpoint, "panels" if native else "rows", len(layers), build)
        for index, each in enumerate(cached[resident:], resident):
            places.append(each.file.places)
            sums |= {f"{prefix}.{index}.{key}": value for key, value in each.sums.items()}
        stream = LayerStream([each.file for each in cached[resident:]])
    for index, layer in enumerate(layers):
        if index < resident:
            fill(layer, checkpoint.layer(index))
        else:
            memory, where = stream.memory(index - resident), places[index - resident]
            bind(layer, {name: place.of(memory) for name, place in where.items()})
    _load_others(model, checkpoint)
    model.to(device)  # type: ignore[arg-type]
    turns = StreamedLayers(stream, resident, len(layers))
    turns.hook(layers)
    return StreamedModel(model, turns, sums, parameters, step_bytes)


def _load_others(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Load what is no layer; weights that are tied to others are found there."""
    names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    for name, tensor in checkpoint.read([name for name in names if name in checkpoint]).items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(tensor.clone(), requires_grad=False))
    model.tie_weights()
    # whatever is left is not there, as reading it says
    checkpoint.read([name for name, parameter in model.named_parameters() if parameter.is_meta])


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter that a module gets is one without memory."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            empty: Tensor = parameter.to("meta")
            parameter = nn.Parameter(empty, requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
