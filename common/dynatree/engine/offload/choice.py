"""Decides whether layers of a model are offloaded, and how many layers stay in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.native import is_native
from dynatree.engine.cpu.native_experts import fused_experts
from dynatree.engine.device import chosen_device
from dynatree.engine.kv.budget import CPU_SHARE, GPU_SHARE, free_memory
from dynatree.engine.kv.kv_cache import KVShape
from dynatree.engine.model.checkpoint import Checkpoint, check_scales
from dynatree.engine.model.files import size_text
from dynatree.engine.model.generation_defaults import adopt_generation_config
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.model.weight_files import QuantizedFiles, Unfilled, WeightFiles
from dynatree.engine.offload.layer_cache import default_folder
from dynatree.engine.offload.offloaded_model import OffloadedModel, load_offloaded, plan_of
from dynatree.engine.quantized.layers import bytes_of
from dynatree.engine.quantized.loading import method_of, quantized_model
from dynatree.engine.recurrent.memory import RecurrentSize
from dynatree.engine.settings import WEIGHTS, ModelSettings
from dynatree.engine.support.explained import named
from dynatree.engine.support.families import WITHOUT_KEYS, recurrent_size_of

log = logging.getLogger(__name__)

# Shares of the free memory for weights. A target that nearly fills the memory is better kept whole, with a small KV
# cache, because offloading costs seconds for each forward pass. Once layers are offloaded, a few more cost little, and
# free memory is worth more.
WHOLE_SHARE = 0.85
WEIGHTS_SHARE = 0.7
GPU_WEIGHTS_SHARE = 0.9  # in both cases on a GPU, where nothing else runs
_LOADED_SHARE = 0.97  # loading leaves some memory in use besides the weights

BytesOf = Callable[[nn.Module, str], int]


@dataclass(frozen=True)
class Placement:
    """How many of a model's layers stay in memory.

    Attributes:
        resident: Layers in memory.
        layers: All layers.
        layer_bytes: Bytes of the largest layer.
        weight_bytes: Bytes of all weights in memory.
    """

    resident: int
    layers: int
    layer_bytes: int
    weight_bytes: int


def weight_bytes(settings: ModelSettings, name: str, model: PreTrainedModel, files: QuantizedFiles | None) -> BytesOf:
    """Return the function for the bytes of memory that the weights of a part of a model take.

    Args:
        settings: Settings of the model.
        name: Name of the model, for messages.
        model: Model from `skeleton`.
        files: Files of its quantised weights; None if the checkpoint has others.

    Raises:
        StartupError: The weights cannot be rounded as requested.
    """
    if files is not None and settings.weights == "auto":
        return files.bytes_of
    bits = WEIGHTS.get(settings.weights)
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    with named(name):
        bytes_of(model, bits, output)
    kept = bits if is_native(chosen_device(settings.device), model.dtype) else None
    return lambda part, _: bytes_of(part, kept, output)


def copy_bytes(settings: ModelSettings, config: PretrainedConfig, name: str) -> int:
    """Return the bytes that the weights of a model's own copy take on the model's device; 0 without a copy there.

    Logs the memory of both.

    Raises:
        StartupError: The copy cannot be made, does not fit, or would be as slow as the model.
    """
    copy = settings.copy
    if copy is None:
        return 0
    where = chosen_device(copy.device)
    files = quantized_model(copy, config, where, name)
    model = skeleton(config, dtype_of(copy, config)) if files is None else files.model
    if not is_native(where, model.dtype):
        raise StartupError(
            f"the {copy.weights} copy of {name} would be dequantised on {where}, and as slow as {name}: only x86 CPUs "
            "with compiled kernels compute with rounded weights; expected another draft model"
        )
    size, free = weight_bytes(copy, name, model, None)(model, ""), free_memory(where)
    if free is not None and size > _share(where, WHOLE_SHARE) * free:
        raise StartupError(
            f"the {copy.weights} copy of {name} takes {size / 1e9:.3g} GB, but only {free / 1e9:.3g} GB of memory are "
            "free; expected another draft model"
        )
    own = quantized_model(settings, config, chosen_device(settings.device), name)
    whole = weight_bytes(settings, name, model, own.files if own else None)(own.model if own else model, "")
    log.info(
        "%s: %s of weights, and %s in its %s copy, which drafts; %.3g kB of keys and values a token in each",
        name,
        size_text(whole),
        size_text(size),
        copy.weights,
        kv_bytes_of(config, model.dtype) / 1e3,
    )
    return size if where.type == chosen_device(settings.device).type else 0


def placement(
    settings: ModelSettings, config: PretrainedConfig, model: PreTrainedModel, size: BytesOf, beside: int = 0
) -> Placement | None:
    """Decide how many layers stay in memory; return None if all do.

    Args:
        settings: Settings of the model.
        config: Its configuration.
        model: Model from `skeleton`.
        size: Function from `weight_bytes`.
        beside: Bytes from `copy_bytes`.

    Raises:
        StartupError: Offloading is requested, but impossible, or the copy leaves too little memory.
    """
    asked, where = settings.resident_layers, chosen_device(settings.device)
    if where.type not in ("cpu", "cuda"):
        if asked is not None:
            raise StartupError(f"layers can be offloaded on a CPU or a CUDA GPU, but the device is {settings.device}")
        return None
    free = free_memory(where)
    if free is not None:
        free -= beside
    if asked is None and (free is None or size(model, "") <= _share(where, WHOLE_SHARE) * free):
        return None
    if asked is None and not settings.chooses_tokens:  # reading a draft from the disk would take longer than it saves
        raise StartupError(
            f"the draft model's weights take {size_text(size(model, ''))}, too much beside {size_text(free or 0)} of "
            "free memory; expected a smaller draft, or --draft-model none"
        )
    plan = plan_of(model, size)
    fitting = plan.layers
    if asked is None and beside and free is not None and plan.least > free:
        raise StartupError(
            f"the model's own copy leaves {free / 1e9:.3g} GB of memory, but the model takes {plan.least / 1e9:.3g} GB "
            "with all layers offloaded; expected another draft model"
        )
    if free is not None:
        room = _session_bytes(settings, config, model) / (CPU_SHARE if where.type == "cpu" else GPU_SHARE)
        room *= 2 if beside else 1  # as `KVBudget.slots`
        fitting = plan.resident(int(min(_share(where, WEIGHTS_SHARE) * free, _LOADED_SHARE * free - room)))
    resident = fitting if asked is None else min(asked, plan.layers)
    if resident == plan.layers:
        return None
    if is_native(where, model.dtype) and any(fused_experts(model)):  # offloaded, torch would compute the experts
        raise StartupError(
            "the layers of a mixture of experts cannot be offloaded on this CPU; expected more free memory than the "
            f"{size_text(size(model, ''))} of its weights, or fewer bytes of them, by --weights"
        )
    return Placement(resident, plan.layers, plan.layer_bytes, plan.least + resident * plan.layer_bytes)


def offloaded_model(
    settings: ModelSettings, config: PretrainedConfig, name: str, quantised: Unfilled | None, beside: int = 0
) -> OffloadedModel | None:
    """Load the model with offloaded layers if requested or if it does not fit; return None if all layers are resident.

    On a CPU, offloaded layers are read from the disk. On a GPU, they are copied from the host's memory.

    Args:
        settings: Settings of the model.
        config: Its configuration.
        name: Its name, for messages.
        quantised: The model without weights if its files hold quantised ones that this project reads.
        beside: Bytes from `copy_bytes`.

    Raises:
        StartupError: The layers cannot be offloaded, or their files differ from the files that were written.
    """
    if quantised is None and method_of(config) is not None:
        return None  # only transformers reads these weights
    model = skeleton(config, dtype_of(settings, config)) if quantised is None else quantised.model
    size = weight_bytes(settings, name, model, quantised.files if quantised else None)
    log.info("%s: its weights take %s of memory", name, size_text(size(model, "")))
    placed = placement(settings, config, model, size, beside)
    if placed is None:
        return None
    if settings.fixed_rows_file is not None:
        raise StartupError(
            f"only {placed.resident} of {placed.layers} layers stay in memory, and with offloaded layers no number of "
            "rows is measured that --fixed-rows-file could keep"
        )
    where = chosen_device(settings.device)
    cache = None if _from_memory(where) else settings.layer_cache or default_folder()
    if cache is None:
        _check_host((placed.layers - placed.resident) * placed.layer_bytes)
        if settings.fixed_rows:
            raise StartupError("on a GPU, --fixed-rows cannot be combined with offloaded layers")
    log.info(
        "%s: %d of %d layers stay in memory, the others are offloaded from %s",
        name,
        placed.resident,
        placed.layers,
        cache or "the host's memory",
    )
    files: WeightFiles = checkpoint_of(settings, name, model) if quantised is None else quantised.files
    loaded = load_offloaded(model, files, placed.resident, where, cache, WEIGHTS.get(settings.weights))
    try:
        loaded.turns.source.check()
    except BaseException:
        loaded.turns.source.close()
        raise
    return loaded


def checkpoint_of(settings: ModelSettings, name: str, model: PreTrainedModel) -> Checkpoint:
    """Return the tensors of a model's checkpoint, downloaded if need be, and give the model its generation_config.

    Raises:
        StartupError: There are no safetensors files.
    """
    folder = Path(settings.model)
    if not folder.is_dir():
        wanted, others = ["*.safetensors", "*.json"], ["*/*", "consolidated*"]  # the same weights in other forms
        folder = Path(snapshot_download(settings.model, allow_patterns=wanted, ignore_patterns=others))
    adopt_generation_config(model, folder)
    checkpoint = Checkpoint(folder, name, model)
    check_scales(name, set(checkpoint) - model.state_dict().keys())
    return checkpoint


def dtype_of(settings: ModelSettings, config: PretrainedConfig) -> torch.dtype:
    """Return the dtype of a checkpoint in which no weights are quantised."""
    named: torch.dtype | None = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return named or getattr(config, "dtype", None) or torch.float32


def kv_bytes_of(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values; 0 if the configuration lacks the usual attribute names."""
    text = config.get_text_config()
    layers = list(getattr(text, "per_layer_config", ())) or [text]
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    attending = sum(kind not in WITHOUT_KEYS for kind in kinds)
    shape = KVShape(attending, max(map(_kv_heads, layers)), max(map(_head_dim, layers)))
    return shape.slot_bytes(dtype)


def _kv_heads(layer: PretrainedConfig) -> int:
    return _size(layer, "num_key_value_heads") or _size(layer, "num_attention_heads")


def _head_dim(layer: PretrainedConfig) -> int:
    """Return the size of a layer's largest key or value; the keys of DeepSeek-V2 have a part with rotary positions."""
    heads = _size(layer, "num_attention_heads")
    size = _size(layer, "head_dim") or (layer.hidden_size // heads if heads else 0)
    return max(size, _size(layer, "v_head_dim"), _size(layer, "qk_nope_head_dim") + _size(layer, "qk_rope_head_dim"))


def _size(layer: PretrainedConfig, name: str) -> int:
    return getattr(layer, name, None) or 0


def _share(device: torch.device, of_cpu: float) -> float:
    return of_cpu if device.type == "cpu" else GPU_WEIGHTS_SHARE


def _from_memory(device: torch.device) -> bool:
    return device.type == "cuda"


def _check_host(needed: int) -> None:
    free = free_memory(torch.device("cpu"))
    if free is not None and needed > free:
        raise StartupError(
            f"the layers that do not fit on the GPU take {needed / 1e9:.1f} GB of the host's memory, but only "
            f"{free / 1e9:.1f} GB are free"
        )


def recurrent_bytes(settings: ModelSettings, size: RecurrentSize | None) -> tuple[int, int]:
    """Return the bytes that recurrent layers keep for a session, and those that they keep of a forward pass."""
    if size is None:
        return 0, 0
    rows = max(settings.speculative_slots + 1, settings.measured_rows)  # of one tree, and of all trees in a pass
    return size.session_bytes(settings.prefix_cache), size.pass_bytes(rows)


def _session_bytes(settings: ModelSettings, config: PretrainedConfig, model: PreTrainedModel) -> int:
    """Return the bytes of a session's keys, values and states, as far as the configuration tells."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    slots = min(context, settings.max_context or context) + settings.speculative_slots
    return slots * kv_bytes_of(config, model.dtype) + sum(recurrent_bytes(settings, recurrent_size_of(model)))
