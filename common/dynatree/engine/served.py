"""Says whether and how a model would be served, by its configuration, its tokenizer and the headers of its files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.native import is_native
from dynatree.engine.cpu.packing import multiplies_natively
from dynatree.engine.device import check_device, chosen_device
from dynatree.engine.examined import Examined, examined, unloadable
from dynatree.engine.kv.budget import KVBudget
from dynatree.engine.model.files import size_text
from dynatree.engine.model.generation_defaults import GenerationDefaults, adopt_generation_config
from dynatree.engine.model.size import parameters_of
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.model.tokenizer import fingerprint, load_tokenizer
from dynatree.engine.model.weight_files import QuantizedFiles
from dynatree.engine.offload.choice import copy_bytes, dtype_of, kv_bytes_of, placement, recurrent_bytes, weight_bytes
from dynatree.engine.quantized.layers import formats_of
from dynatree.engine.quantized.loading import method_of, quantized_model
from dynatree.engine.settings import WEIGHTS, ModelSettings
from dynatree.engine.small_engine import kernels_of
from dynatree.engine.support.explained import explained
from dynatree.engine.support.families import recurrent_size_of


@dataclass(frozen=True)
class Served:
    """How a model would be served.

    Attributes:
        name: The hub name, or the last component of the local path.
        architecture: The transformers architecture.
        parameters: Number of parameters.
        weights: Formats of the weights, such as "Q4_K and Q6_K", "gptq of 4 bits", "int4 and int8" or "bfloat16".
        dtype: Data type of activations, keys and values.
        device: The device.
        computed_by: The kernels, and whether a native program calls them.
        weight_bytes: Bytes of memory that all weights take; 0 if unknown.
        kv_bytes: Bytes of the keys and values of one token; 0 if unknown.
        state_bytes: Bytes that recurrent layers keep for a session and its cached prefix; 0 without such layers.
        context_length: Tokens of the longest sequence.
        bounded: Whether the model itself bounds its context.
        offloaded_layers: Layers that do not fit into the memory that is free now.
        tokenizer_fingerprint: Identifies the tokenizer.
    """

    name: str
    architecture: str
    parameters: int
    weights: str
    dtype: str
    device: str
    computed_by: str
    weight_bytes: int
    kv_bytes: int
    state_bytes: int
    context_length: int
    bounded: bool
    offloaded_layers: int
    tokenizer_fingerprint: str

    def __str__(self) -> str:
        """A line for people."""
        size = f" that take {size_text(self.weight_bytes)} of memory" if self.weight_bytes else ""
        offloaded = f", {self.offloaded_layers} layers offloaded" if self.offloaded_layers else ""
        states = f", {size_text(self.state_bytes)} of states and records a session" if self.state_bytes else ""
        chosen = "" if self.bounded else ". The model itself bounds no context; --max-context sets another bound"
        return (
            f"{self.name}: {self.architecture} of {self.parameters / 1e9:.3g} billion parameters, {self.weights} "
            f"weights{size}{offloaded}, {self.dtype} activations on {self.device} by {self.computed_by}, "
            f"{self.kv_bytes / 1e3:.3g} kB of keys and values a token{states}, "
            f"a context of {self.context_length} tokens{chosen}"
        )


@torch.inference_mode()
def served(settings: ModelSettings) -> Served:
    """Return how a model would be served; no weights are loaded.

    Raises:
        StartupError: It would be refused, with the words of `load_engine`. Only loading finds weights that are not
            finite, and a checkpoint whose own logits differ under tree attention.
    """
    if settings.device != "auto":
        check_device(settings.device)
    found = examined(settings)
    model, files = _unfilled(settings, found)
    with explained(found.name, found.config):
        GenerationDefaults.of(model.generation_config if settings.chooses_tokens else None)
    others = method_of(found.config) if files is None else None
    size = weight_bytes(settings, found.name, model, files)
    weights = _weights(settings, model, files)
    beside = copy_bytes(settings, found.config, found.name)
    placed = None if others else placement(settings, found.config, model, size, beside)
    kv_bytes, recurrent = kv_bytes_of(found.config, model.dtype), recurrent_bytes(settings, recurrent_size_of(model))
    if not others:
        slots = found.context_length + settings.speculative_slots
        taken = placed.weight_bytes if placed else size(model, "")
        where = chosen_device(settings.device)
        KVBudget(settings.sessions, slots, kv_bytes, where, beside, *recurrent, taken).slots(settings.kv_tokens)
    return Served(
        name=found.name,
        architecture=type(model).__name__,
        parameters=parameters_of(model),
        weights=others or weights or _name(model.dtype),
        dtype=_name(model.dtype),
        device=str(chosen_device(settings.device)),
        computed_by=f"transformers with {others} (not tested)"
        if others
        else _computed_by(settings, found, model.dtype, weights),
        weight_bytes=0 if others else size(model, ""),
        kv_bytes=kv_bytes,
        state_bytes=recurrent[0],
        context_length=found.context_length,
        bounded=found.bounded,
        offloaded_layers=placed.layers - placed.resident if placed else 0,
        tokenizer_fingerprint=fingerprint(load_tokenizer(settings.model)),
    )


def _unfilled(settings: ModelSettings, found: Examined) -> tuple[PreTrainedModel, QuantizedFiles | None]:
    """Return the model without weights, and the files of its quantised weights if this project reads them."""
    try:
        quantised = quantized_model(settings, found.config, chosen_device(settings.device), found.name)
        if quantised is not None:
            return quantised.model, quantised.files
        model = skeleton(found.config, dtype_of(settings, found.config))
        adopt_generation_config(model, settings.model)
    except StartupError:
        raise
    except Exception as error:  # as in loading
        raise unloadable(settings.model, found.name, error) from error
    return model, None


def _weights(settings: ModelSettings, model: PreTrainedModel, files: QuantizedFiles | None) -> str:
    """Name the formats of quantised weights; "" if none are quantised."""
    if settings.weights == "auto":
        return "" if files is None else files.formats
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return formats_of(model, WEIGHTS[settings.weights], output)


def _computed_by(settings: ModelSettings, found: Examined, dtype: torch.dtype, quantised: str) -> str:
    if not is_native(chosen_device(settings.device), dtype):
        return "torch, with dequantised weights" if quantised else "torch"
    if not multiplies_natively(dtype, bool(quantised)):
        return "oneDNN's linear layers and native attention"
    return kernels_of(found.config, found.context_length)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
