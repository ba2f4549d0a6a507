"""Loads an engine from a checkpoint, or refuses the checkpoint with a one-line reason."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.common.model_info import ModelInfo
from dynatree.common.version import version
from dynatree.engine.cpu.huge_pages import use_huge_pages
from dynatree.engine.cpu.native import is_native
from dynatree.engine.cpu.native_attention import NativeBatch
from dynatree.engine.cpu.native_program import program_of
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.cpu.packing import pack, weights_of
from dynatree.engine.device import check_device, device_id
from dynatree.engine.engine import Engine
from dynatree.engine.forward.attention import NAME, Batch, SegmentAttending
from dynatree.engine.forward.batch_invariance import KEY_BLOCK, is_batch_invariant, is_x86
from dynatree.engine.forward.eager import EagerRunner
from dynatree.engine.forward.flat_forward import FlatForward
from dynatree.engine.forward.not_finite import check_weights
from dynatree.engine.forward.offloaded_layers import OffloadedLayers
from dynatree.engine.forward.runner import Runner
from dynatree.engine.forward.segment import Segment
from dynatree.engine.gpu.fixed_rows import DRAFT_ROWS, with_default_rows, with_fixed_rows
from dynatree.engine.kv.budget import KVBudget
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.model.files import check_path, checkpoint_of
from dynatree.engine.model.fingerprint import model_fingerprint, with_numerics
from dynatree.engine.model.generation_defaults import GenerationDefaults
from dynatree.engine.model.size import parameters_of, step_bytes_of
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.model.tokenizer import fingerprint, first_line, load_tokenizer
from dynatree.engine.numerics import numerics_of
from dynatree.engine.offload.choice import offloaded_model
from dynatree.engine.offload.offloaded_model import OffloadedModel
from dynatree.engine.parallel.parallel_engine import ParallelKVCache
from dynatree.engine.parallel.ranks import Ranks
from dynatree.engine.parallel.starting import leading, started_ranks
from dynatree.engine.quantized.layers import check_groups, quantize
from dynatree.engine.quantized.loading import quantized_model
from dynatree.engine.settings import DTYPES, WEIGHTS, ModelSettings
from dynatree.engine.support.explained import explained, named
from dynatree.engine.support.families import check_cache, check_config, check_family, record_kv_shape
from dynatree.engine.support.probe import check_computation, check_outputs
from dynatree.engine.support.small_model import towers
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
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.dtype not in {"auto", *DTYPES}:
        raise StartupError(f"dtype is {settings.dtype!r}, expected auto, {', '.join(DTYPES)}")
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans each new shape, and forward passes have many
    name = _display_name(settings.model)
    if settings.tensor_parallel > 1 and ranks is None:
        ranks = started_ranks(settings, name)
    begun = time.monotonic()
    config = _config(settings, name)
    with named(name):
        check_config(config)
    with explained(name, config):
        context_length = _context_length(config, settings)
        if ranks is None or ranks.rank == 0:
            check_computation(config, context_length, small_engine)
        check_cache(config, context_length)
        if settings.weights != "auto":
            check_groups(skeleton(config, torch.float32), WEIGHTS[settings.weights])
    tokenizer = load_tokenizer(settings.model)  # before the weights, which take longer
    model, offloaded = _load_model(settings, name, config, ranks)
    log.info("%s: loaded after %.1f s; testing its outputs and its speed", name, time.monotonic() - begun)
    try:
        return _engine_of(settings, name, context_length, ranks, tokenizer, model, offloaded)
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
        known = offloaded.sums if offloaded else None
        identity = model_fingerprint(model, defaults, known) if settings.chooses_tokens else ""
        if settings.weights != "auto" and offloaded is None:
            output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
            quantize(model, WEIGHTS[settings.weights], model.dtype, native, output)
            step_bytes = step_bytes_of(model)
        if model.device.type == "cpu" and ranks is None:
            pack(model, native, offloaded.apart if offloaded else ())
            use_huge_pages(weights_of(model), name)
        shape = record_kv_shape(model, context_length)
    if model.device.type == "cpu" and is_x86() and not native:
        log.warning("using torch's kernels, because none were compiled at installation, which requires a C compiler")
    padded = model.device.type == "cpu" and not native and is_batch_invariant(model.dtype)
    budget = KVBudget(
        settings.sessions,
        context_length + settings.speculative_slots,
        shape.slot_bytes(model.dtype) * (ranks.size if ranks and model.device.type == "cpu" else 1),
        model.device,
    )
    slots = budget.slots(settings.kv_tokens)
    kv_cache = _allocate(
        name,
        shape,
        ranks.agree(slots) if ranks else slots,
        model,
        ranks,
        read_beyond=KEY_BLOCK if padded else 1,  # padding rows are stored behind all KV ranges
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
    attending = (
        partial(NativeBatch, kv_cache=kv_cache) if native else partial(Batch, kv_cache=kv_cache, batch_invariant=padded)
    )
    runner = _runner(model, context_length, kv_cache, attending, native, offloaded.turns if offloaded else None)
    engine = Engine(
        model,
        runner,
        kv_cache,
        tokenizer,
        info,
        defaults.eos_token_ids,
        batch_invariant=isinstance(runner, NativeRunner),
        source=offloaded.turns.source if offloaded else None,
    )
    if ranks and ranks.rank > 0:
        return engine
    with explained(name, model.config):
        if ranks:
            engine = leading(engine, ranks)
        else:
            engine = _with_rows(engine, settings, budget.session_slots)
            check_outputs(engine, context_length)
    numerics = numerics_of(engine, ranks.size if ranks else 1)
    told = replace(engine.info, numerics=numerics, fingerprint=identity and with_numerics(identity, numerics))
    return with_forward_costs(replace(engine, info=told), settings.measured_rows)


def _with_rows(engine: Engine, settings: ModelSettings, longest: int) -> Engine:
    """Give the engine forward passes of fixed rows if they are requested or the GPU's default."""
    rows, sizes = settings.fixed_rows, (settings.sessions, longest)
    if rows:
        return with_fixed_rows(engine, rows, *sizes, settings.chooses_tokens)
    if rows is not None or engine.kv_cache.device.type != "cuda" or engine.source is not None:
        return engine
    if settings.chooses_tokens:
        return with_default_rows(engine, *sizes)
    return with_fixed_rows(engine, DRAFT_ROWS, *sizes, decides=False)


def with_forward_costs(engine: Engine, measured_rows: int) -> Engine:
    """Return the engine with the measured costs of forward passes up to `measured_rows` tokens in its `info`."""
    if not measured_rows:
        return engine
    return replace(engine, info=replace(engine.info, forward_costs=measure_forwards(engine, measured_rows)))


def _config(settings: ModelSettings, name: str) -> PretrainedConfig:
    """Load a model's configuration.

    Raises:
        StartupError: The configuration is missing or cannot be read.
    """
    check_path(settings.model)
    try:
        where = checkpoint_of(settings.model)
        config: PretrainedConfig = AutoConfig.from_pretrained(**where, trust_remote_code=False)
    except Exception as error:  # transformers and the hub client raise their own types here
        raise _unloadable(settings, name, error) from error
    return config


def _load_model(
    settings: ModelSettings, name: str, config: PretrainedConfig, ranks: Ranks | None
) -> tuple[PreTrainedModel, OffloadedModel | None]:
    """Load a model; the second value describes its offloading and is None if all layers are resident."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        quantised = quantized_model(settings, config, torch.device(device), name)
        if quantised is not None:
            return quantised, None
        offloaded = offloaded_model(settings, config, device, name) if ranks is None else None
        if offloaded:
            return offloaded.model, offloaded
        parallel = {"distributed_config": DistributedConfig(tp_size=ranks.size)} if ranks else {}
        model = AutoModelForCausalLM.from_pretrained(
            settings.model,
            config=config,
            dtype=settings.dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            trust_remote_code=False,
            **parallel,
        )
        loaded: PreTrainedModel = (model if ranks else model.to(device)).eval()  # type: ignore[arg-type]
    except StartupError:
        raise
    except Exception as error:  # transformers, the hub client, safetensors and torch each raise their own types here
        with explained(name, config):
            check_family(config)
        raise _unloadable(settings, name, error) from error
    return loaded, None


def _unloadable(settings: ModelSettings, name: str, error: Exception) -> StartupError:
    where = "" if Path(settings.model).exists() else "it is no local folder; as a hub name: "
    return StartupError(f"model {name!r} could not be loaded: {where}{first_line(error)}")


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


def _runner(
    model: PreTrainedModel,
    context_length: int,
    kv_cache: KVCache,
    attending: Callable[[Sequence[Segment]], SegmentAttending],
    native: bool,
    offloaded: OffloadedLayers | None,
) -> Runner:
    """Return the runner for forward passes of any size."""
    program = program_of(model) if native else None
    if program is None:
        return EagerRunner(FlatForward(model, context_length), kv_cache, attending)
    return NativeRunner(program, kv_cache, offloaded)


@dataclass(frozen=True, eq=False)
class SmallEngine:
    """Computes the forward passes of a model that no session uses; implements `Probed`."""

    model: PreTrainedModel
    kv_cache: KVCache
    runner: Runner

    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """See `Engine.forward`."""
        return self.runner.run(segments)


def small_engine(model: PreTrainedModel, shape: KVShape, context_length: int) -> SmallEngine:
    """Make an engine for a small model that runs on the CPU the way large ones do, with room for two sessions."""
    native = is_native(model.device, model.dtype)
    pack(model, native, towers(model))
    kv_cache = KVCache(shape, 2 * context_length + 8, model.dtype, model.device)
    attending = partial(NativeBatch, kv_cache=kv_cache) if native else partial(Batch, kv_cache=kv_cache)
    return SmallEngine(model, kv_cache, _runner(model, context_length, kv_cache, attending, native, None))


def _context_length(config: PretrainedConfig, settings: ModelSettings) -> int:
    """Return the length of the longest sequence that is served, in tokens.

    Raises:
        StartupError: The configuration does not name the model's context length.
    """
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise StartupError(f"the configuration of {config.model_type} has no max_position_embeddings")
    return min(length, settings.max_context or length)


def _display_name(model: str) -> str:
    """Return a hub name unchanged, and only the last component of a local path, because messages name no paths."""
    if Path(model) in (embedded.target_path(), embedded.draft_path()):
        return f"embedded-{Path(model).name}"
    return Path(model).resolve().name if Path(model).exists() else model
