"""Loads an engine from a checkpoint, or refuses the checkpoint with a one-line reason."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from dynatree.common.errors import StartupError
from dynatree.common.model_info import ModelInfo
from dynatree.common.version import version
from dynatree.engine.adapters.registry import adapt, prepare
from dynatree.engine.cpu.huge_pages import use_huge_pages
from dynatree.engine.cpu.native import is_native
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.cpu.packing import pack, weights_of
from dynatree.engine.device import check_device, chosen_device, device_id
from dynatree.engine.engine import Engine
from dynatree.engine.examined import display_name, examined, unloadable
from dynatree.engine.forward.attention import NAME
from dynatree.engine.forward.batch_invariance import KEY_BLOCK, is_batch_invariant, is_x86
from dynatree.engine.forward.not_finite import check_weights
from dynatree.engine.gpu.fixed_rows import DRAFT_ROWS, with_default_rows, with_fixed_rows
from dynatree.engine.gpu.kept_rows import KeptRows, default_path
from dynatree.engine.kv.budget import KVBudget
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.model.checkpoint import check_scales
from dynatree.engine.model.composite import KEY_MAPPING, without_report
from dynatree.engine.model.fingerprint import model_fingerprint, with_numerics
from dynatree.engine.model.generation_defaults import GenerationDefaults
from dynatree.engine.model.gguf_tokenizer import end_tokens
from dynatree.engine.model.rotary import fix_rotary
from dynatree.engine.model.size import parameters_of, step_bytes_of
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.model.tokenizer import fingerprint, load_tokenizer
from dynatree.engine.model.weight_files import WeightFiles
from dynatree.engine.numerics import numerics_of
from dynatree.engine.offload.choice import checkpoint_of, copy_bytes, dtype_of, offloaded_model, recurrent_bytes
from dynatree.engine.offload.offloaded_model import OffloadedModel, fill_rounded
from dynatree.engine.parallel.parallel_engine import ParallelKVCache
from dynatree.engine.parallel.ranks import Ranks
from dynatree.engine.parallel.starting import leading, started_ranks
from dynatree.engine.quantized.layers import check_groups, quantize
from dynatree.engine.quantized.loading import method_of, quantized_model
from dynatree.engine.runners import runner_of
from dynatree.engine.settings import DTYPES, WEIGHTS, ModelSettings, is_gguf
from dynatree.engine.support.explained import explained
from dynatree.engine.support.families import check_family, record_kv_shape
from dynatree.engine.support.probe import check_outputs
from dynatree.engine.timing import measure_forwards

log = logging.getLogger(__name__)


@torch.inference_mode()
def load_engine(settings: ModelSettings, ranks: Ranks | None = None) -> Engine:
    """Load a model, refuse one that cannot be served exactly, and preallocate its KV cache.

    Args:
        settings: The model to load and how to load it.
        ranks: The ranks of tensor parallelism, given on a following process; the leading process starts them itself.

    Raises:
        StartupError: The model is missing or unsupported; one line says which and why.
    """
    if settings.device != "auto":
        check_device(settings.device)
    if settings.fixed_rows_file is not None and chosen_device(settings.device).type != "cuda":
        raise StartupError("--fixed-rows-file keeps a number that is measured on a GPU only, and torch finds none here")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.dtype not in {"auto", *DTYPES}:
        raise StartupError(f"dtype is {settings.dtype!r}, expected auto, {', '.join(DTYPES)}")
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans each new shape, and forward passes have many
    name = display_name(settings.model)
    if settings.tensor_parallel > 1 and ranks is None:
        ranks = started_ranks(settings, name)
    begun = time.monotonic()
    found = examined(settings, probes=ranks is None or ranks.rank == 0)
    config, context_length = found.config, found.context_length
    if settings.weights != "auto" and method_of(config) is None:
        with explained(name, config):
            check_groups(skeleton(config, torch.float32), WEIGHTS[settings.weights])
    beside = copy_bytes(settings, config, name)
    tokenizer = load_tokenizer(settings.model)  # before the weights, which take longer
    model, offloaded, sums = _load_model(settings, name, config, ranks, beside)
    log.info("%s: loaded after %.1f s; testing its outputs and its speed", name, time.monotonic() - begun)
    try:
        return _engine_of(settings, name, context_length, ranks, tokenizer, model, offloaded, sums, beside)
    except BaseException:
        if offloaded:
            offloaded.turns.source.close()
        raise


def _engine_of(
    settings: ModelSettings,
    name: str,
    context_length: int,
    ranks: Ranks | None,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    offloaded: OffloadedModel | None,
    sums: Mapping[str, list[Any]],
    beside: int,
) -> Engine:
    """Allocate the KV cache of a loaded model, check the model's outputs, and measure its costs.

    Raises:
        StartupError: The model cannot be served exactly, or does not fit.
    """
    if offloaded:
        parameters, step_bytes = offloaded.parameters, offloaded.step_bytes
    else:
        check_weights(name, model.named_parameters())
        parameters, step_bytes = parameters_of(model), step_bytes_of(model)  # before packing, which hides weights
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)  # for this thread, which runs all of the model's work
    native = is_native(model.device, model.dtype)
    with explained(name, model.config):
        defaults = GenerationDefaults.of(model.generation_config if settings.chooses_tokens else None)
        if settings.chooses_tokens and is_gguf(settings.model):
            ends = defaults.eos_token_ids | end_tokens(tokenizer, Path(settings.model))
            defaults = replace(defaults, eos_token_ids=ends)
        identity = model_fingerprint(model, defaults, sums) if settings.chooses_tokens else ""
        if settings.weights != "auto" and offloaded is None:
            output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
            quantize(model, WEIGHTS[settings.weights], model.dtype, native, output)
            step_bytes = step_bytes_of(model)
        if model.device.type == "cpu" and ranks is None:
            pack(model, native, offloaded.apart if offloaded else ())
            use_huge_pages(weights_of(model), name)
        shape = record_kv_shape(model, context_length)
    if model.device.type == "cpu" and is_x86() and not native:
        log.warning("using torch's kernels: DynaTree's own were not compiled at installation, which needs a C compiler")
    padded = model.device.type == "cpu" and not native and is_batch_invariant(model.dtype)
    budget = KVBudget(
        settings.sessions,
        context_length + settings.speculative_slots,
        shape.slot_bytes(model.dtype) * (ranks.size if ranks and model.device.type == "cpu" else 1),
        model.device,
        beside,
        *recurrent_bytes(settings, shape.recurrent),
    )
    slots = budget.slots(settings.kv_tokens)
    kv_cache = _allocate(
        name,
        shape,
        ranks.agree(slots) if ranks else slots,
        model,
        ranks,
        read_beyond=KEY_BLOCK if padded else 1,  # padding rows are stored after all KV ranges
    )
    info = ModelInfo(
        name=name,
        architecture=type(model).__name__,
        parameters=parameters,
        vocab_size=model.get_input_embeddings().num_embeddings,  # type: ignore[arg-type]
        context_length=context_length,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        tokenizer_fingerprint=fingerprint(tokenizer),
        version=version(),
        device_id=device_id(model.device),
        step_bytes=step_bytes,
        repetition_penalty=defaults.repetition_penalty,
        streamed_bytes=offloaded.turns.source.bytes if offloaded else 0,
    )
    turns = offloaded.turns if offloaded else None
    runner = runner_of(model, kv_cache, native=native, padded=padded, offloaded=turns)
    engine = Engine(
        model,
        runner,
        kv_cache,
        tokenizer,
        info,
        defaults.eos_token_ids,
        batch_invariant=isinstance(runner, NativeRunner),
        source=offloaded.turns.source if offloaded else None,
        most_sessions=budget.fitting_sessions,
    )
    if ranks and ranks.rank > 0:
        return engine
    with explained(name, model.config):
        if ranks:
            engine = leading(engine, ranks)
        else:
            engine = _with_rows(engine, settings, budget.session_slots, identity)
            check_outputs(engine, context_length)
    numerics = numerics_of(engine, ranks.size if ranks else 1, settings.weights)
    log.info("%s: numerics: %s", name, numerics)
    info = replace(engine.info, numerics=numerics, fingerprint=identity and with_numerics(identity, numerics))
    return with_forward_costs(replace(engine, info=info), settings.measured_rows)


def _with_rows(engine: Engine, settings: ModelSettings, longest: int, identity: str) -> Engine:
    """Give the engine forward passes of fixed rows if they are requested or the GPU's default.

    A target's default is kept by its weights, `identity`, and its numerics without rows, which name the GPU.
    """
    rows, sizes = settings.fixed_rows, (settings.sessions, longest)
    if rows:
        return with_fixed_rows(engine, rows, *sizes, settings.chooses_tokens)
    if rows is not None or engine.kv_cache.device.type != "cuda" or engine.source is not None:
        return engine
    if settings.chooses_tokens:
        key = with_numerics(identity, numerics_of(engine, weights=settings.weights))
        return with_default_rows(engine, *sizes, KeptRows(settings.fixed_rows_file or default_path(), key))
    return with_fixed_rows(engine, DRAFT_ROWS, *sizes, decides=False)


def with_forward_costs(engine: Engine, measured_rows: int) -> Engine:
    """Return the engine with the measured costs of forward passes up to `measured_rows` tokens in its `info`."""
    if not measured_rows:
        return engine
    return replace(engine, info=replace(engine.info, forward_costs=measure_forwards(engine, measured_rows)))


def _load_model(
    settings: ModelSettings, name: str, config: PretrainedConfig, ranks: Ranks | None, beside: int = 0
) -> tuple[PreTrainedModel, OffloadedModel | None, dict[str, list[Any]]]:
    """Load a model.

    Returns:
        The model; its offloading, which is None if all layers are resident; and `sums_of` tensors that were rounded.
    """
    device = chosen_device(settings.device)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        quantised = quantized_model(settings, config, device, name)
        offloaded = offloaded_model(settings, config, name, quantised, beside) if ranks is None else None
        if offloaded:
            return offloaded.model, offloaded, offloaded.sums
        unfilled: tuple[PreTrainedModel, WeightFiles] | None
        unfilled = (quantised.model, quantised.files) if quantised else None
        if unfilled is None and ranks is None:
            unfilled = _to_round(settings, name, config, device)
        if unfilled:
            model, files = unfilled
            bits, native = WEIGHTS.get(settings.weights), is_native(device, model.dtype)
            sums = fill_rounded(model, files, bits, native) if bits else {}
            files.fill(model)
            return model.to(device), None, sums  # type: ignore[arg-type]
        parallel = {"distributed_config": DistributedConfig(tp_size=ranks.size)} if ranks else {}
        loader: Any = AutoModelForCausalLM  # its annotations do not cover the result of from_pretrained
        prepare(config.model_type)
        with without_report():
            model, found = loader.from_pretrained(
                settings.model,
                config=config,
                dtype=settings.dtype,
                attn_implementation=NAME,
                key_mapping=KEY_MAPPING,
                output_loading_info=True,
                use_safetensors=True,
                trust_remote_code=False,
                **parallel,
            )
        if method_of(config) is None:
            check_scales(name, found["unexpected_keys"])
        if found["missing_keys"]:  # transformers gave these tensors random numbers
            raise StartupError(f"model {name} cannot be served: its checkpoint lacks {min(found['missing_keys'])}")
        fix_rotary(model)
        adapt(model)
        loaded: PreTrainedModel = (model if ranks else model.to(device)).eval()
    except StartupError:
        raise
    except Exception as error:  # transformers, the hub client, safetensors and torch each raise their own types here
        with explained(name, config):
            check_family(config)
        raise unloadable(settings.model, name, error) from error
    return loaded, None, {}


def _to_round(
    settings: ModelSettings, name: str, config: PretrainedConfig, device: torch.device
) -> tuple[PreTrainedModel, WeightFiles] | None:
    """Return a model without weights whose layers can be loaded and rounded one by one, and its files.

    It is None if its weights are not to be rounded, if the kernels do not compute it, or if only transformers can turn
    its checkpoint into its layers.
    """
    dtype = dtype_of(settings, config)
    if settings.weights == "auto" or not is_native(device, dtype):
        return None
    model = skeleton(config, dtype)
    files = checkpoint_of(settings, name, model)
    return (model, files) if all(each in files for each, _ in model.named_parameters()) else None


def _allocate(
    name: str, shape: KVShape, slots: int, model: PreTrainedModel, ranks: Ranks | None, **layout: int
) -> KVCache:
    """Allocate the KV cache of a model.

    Raises:
        StartupError: The device does not have enough memory.
    """
    try:
        if ranks and ranks.rank == 0:
            return ParallelKVCache(ranks, shape, slots, model.dtype, model.device, **layout)
        return KVCache(shape, slots, model.dtype, model.device, **layout)
    except (RuntimeError, MemoryError, OSError) as error:
        raise StartupError(
            f"the KV cache of {name} for {slots} tokens does not fit into the device's memory; expected a lower "
            f"--kv-tokens or --max-sessions"
        ) from error
