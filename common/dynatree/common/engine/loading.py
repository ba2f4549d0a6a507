"""Loading: from a checkpoint to an engine, or to one line that says why there is none."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from dynatree.common import embedded
from dynatree.common.device import device_id
from dynatree.common.engine.arena import KVArena, KVShape
from dynatree.common.engine.attention import NAME, Attending, Batch
from dynatree.common.engine.batch_invariance import KEY_BLOCK, is_batch_invariant, is_x86
from dynatree.common.engine.eager import EagerRunner
from dynatree.common.engine.engine import Engine
from dynatree.common.engine.flat_forward import FlatForward
from dynatree.common.engine.generation_defaults import GenerationDefaults
from dynatree.common.engine.gpu.fixed_rows import DRAFT_ROWS, with_default_rows, with_fixed_rows
from dynatree.common.engine.huge_pages import use_huge_pages
from dynatree.common.engine.kv_budget import KVBudget, free_memory
from dynatree.common.engine.model_fingerprint import model_fingerprint
from dynatree.common.engine.model_size import parameters_of, step_bytes_of
from dynatree.common.engine.native import is_native
from dynatree.common.engine.native_attention import NativeBatch
from dynatree.common.engine.native_program import program_of
from dynatree.common.engine.native_runner import NativeRunner
from dynatree.common.engine.packing import pack, weights_of
from dynatree.common.engine.parallel.parallel_engine import ParallelArena, ParallelRunner, Plain
from dynatree.common.engine.parallel.ranks import Followers, Ranks, check_plan, end_process
from dynatree.common.engine.runner import Runner
from dynatree.common.engine.segment import Segment
from dynatree.common.engine.streaming.layer_cache import default_folder
from dynatree.common.engine.streaming.streamed_layers import StreamedLayers
from dynatree.common.engine.streaming.streamed_model import StreamedModel, load_streamed, plan_of, skeleton
from dynatree.common.engine.support import check_config, check_family, check_outputs, plain_logits, record_kv_shape
from dynatree.common.engine.timing import measure_forwards
from dynatree.common.errors import StartupError
from dynatree.common.limits import MAX_SESSIONS
from dynatree.common.model_info import ModelInfo
from dynatree.common.tokenizer import check_folder, fingerprint, first_line, load_tokenizer
from dynatree.common.version import version

log = logging.getLogger(__name__)

WEIGHTS_SHARE = 0.7  # of the free memory; keys and values need some of the rest
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSettings:
    """Which model to load, and how.

    Attributes:
        model: A hub name or a local path.
        device: A torch device, or "auto" for the first GPU if any.
        dtype: A key of `DTYPES`, or "auto" for the checkpoint's own.
        sessions: Sequences that can be open at once.
        kv_tokens: Slots of the KV arena; None: what the sessions can need, as far as the memory goes.
        max_context: Longest sequence that is served, in tokens; None: the model's own.
        speculative_slots: KV slots of each session for tokens that are not committed.
        fixed_rows: Numbers of rows that forwards are padded to, and on a GPU captured for. One number makes tokens
            independent of the tree, the batch and its neighbours; none: rows as they come. None means the device's
            default: none on a CPU, and on a GPU the number that its costs suggest.
        measured_rows: Rows of the largest forward whose cost is measured; 0: none is.
        chooses_tokens: Whether the model is a target, whose generation_config is adopted or refused. A draft only
            guesses, so its generation_config does not matter.
        threads: Of the CPU; None: torch's choice.
        resident_layers: That stay in memory; the others are streamed from the disk. None: all, if they fit.
        layer_cache: The folder of layer caches; None: the user's.
        tensor_parallel: Devices over which every layer is cut.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    sessions: int = MAX_SESSIONS
    kv_tokens: int | None = None
    max_context: int | None = None
    speculative_slots: int = 256
    fixed_rows: tuple[int, ...] | None = None
    measured_rows: int = 0
    chooses_tokens: bool = True
    threads: int | None = None
    resident_layers: int | None = None
    layer_cache: Path | None = None
    tensor_parallel: int = 1


@torch.inference_mode()
def load_engine(settings: ModelSettings, ranks: Ranks | None = None) -> Engine:
    """Load a model, refuse one that cannot be served exactly, and preallocate its arena.

    Args:
        settings: Which model, and how.
        ranks: On a process that follows: all of them. What leads starts them itself.

    Raises:
        StartupError: The model is missing or unsupported; one line says which and why.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape, and forwards have many
    name = _display_name(settings.model)
    if settings.tensor_parallel > 1 and ranks is None:
        ranks = _started_ranks(settings, name)
    model, streamed = _load_model(settings, name, ranks)
    if streamed:
        parameters, step_bytes = streamed.parameters, streamed.step_bytes
    else:
        parameters, step_bytes = parameters_of(model), step_bytes_of(model)  # before packing, which hides weights
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)  # of this thread, on which all of the model's work runs
    tokenizer = load_tokenizer(settings.model)
    native = is_native(model.device, model.dtype)
    with _explained(name, model.config):
        defaults = GenerationDefaults.of(model.generation_config if settings.chooses_tokens else None)
        known = streamed.sums if streamed else None
        identity = model_fingerprint(model, defaults, known) if settings.chooses_tokens else ""
        if model.device.type == "cpu" and ranks is None:
            pack(model, native, list(streamed.layers)[streamed.first :] if streamed else ())
            use_huge_pages(weights_of(model), name)
        turns = None
        if streamed:
            streamed.stream.check()
            turns = StreamedLayers(streamed.stream, streamed.first, len(streamed.layers))
            turns.hook(streamed.layers)
        shape = record_kv_shape(model)
        context_length = _context_length(model)
        check_config(model.config, context_length)
        context_length = min(context_length, settings.max_context or context_length)
    if model.device.type == "cpu" and is_x86() and not native:
        log.warning("kernels are torch's: none were compiled at installation, for which a C compiler is needed")
    padded = model.device.type == "cpu" and not native and is_batch_invariant(model.dtype)
    budget = KVBudget(
        settings.sessions,
        context_length + settings.speculative_slots,
        shape.slot_bytes(model.dtype) * (ranks.size if ranks and model.device.type == "cpu" else 1),
        model.device,
    )
    slots = budget.slots(settings.kv_tokens)
    arena = _allocate(
        name,
        shape,
        ranks.agree(slots) if ranks else slots,
        model,
        ranks,
        read_beyond=KEY_BLOCK if padded else 1,  # the padding of a forward of fixed rows is stored behind all ranges
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
        fingerprint=identity,
        streamed_bytes=streamed.stream.bytes if streamed else 0,
    )
    attending = partial(NativeBatch, arena=arena) if native else partial(Batch, arena=arena, batch_invariant=padded)
    runner = _runner(model, arena, attending, native, turns)
    engine = Engine(
        model,
        runner,
        arena,
        tokenizer,
        info,
        defaults.eos_token_ids,
        batch_invariant=isinstance(runner, NativeRunner),
        stream=streamed.stream if streamed else None,
    )
    if ranks:
        if ranks.rank > 0:
            return engine
        return _leading(engine, ranks, name, settings.measured_rows)
    with _explained(name, model.config):
        rows, sizes = settings.fixed_rows, (settings.sessions, budget.session_slots)
        if rows is None and model.device.type == "cuda":
            if settings.chooses_tokens:
                engine = with_default_rows(engine, *sizes)
            else:
                engine = with_fixed_rows(engine, DRAFT_ROWS, *sizes, decides=False)
        elif rows:
            engine = with_fixed_rows(engine, rows, *sizes, settings.chooses_tokens)
        check_outputs(engine)
    return with_forward_costs(engine, settings.measured_rows)


def with_forward_costs(engine: Engine, measured_rows: int) -> Engine:
    """The engine with the measured costs of forwards over up to `measured_rows` tokens in its `info`."""
    if not measured_rows:
        return engine
    return replace(engine, info=replace(engine.info, forward_costs=measure_forwards(engine, measured_rows)))


def _leading(engine: Engine, ranks: Ranks, name: str, measured_rows: int) -> Engine:
    """The engine of rank 0, on which all ranks compute."""

    def plain(model: PreTrainedModel) -> Tensor:
        ranks.say(Plain())
        return plain_logits(model)

    engine = replace(engine, runner=ParallelRunner(engine.runner, ranks))
    with _explained(name, engine.model.config):
        check_outputs(engine, plain)
    return with_forward_costs(engine, measured_rows)


def _started_ranks(settings: ModelSettings, name: str) -> Ranks:
    """All processes of a model that is cut over several devices; this one is the first.

    Raises:
        StartupError: It cannot be cut so.
    """
    size = settings.tensor_parallel
    if find_spec("accelerate") is None:
        raise StartupError("--tensor-parallel needs the package accelerate; install dynatree[parallel]")
    for option, value in (("--resident-layers", settings.resident_layers), ("--fixed-rows", settings.fixed_rows)):
        if value:
            raise StartupError(f"--tensor-parallel and {option} do not go together")
    if settings.device not in ("auto", "cpu", "cuda"):
        raise StartupError(f"--tensor-parallel takes the first devices of a machine, and --device is {settings.device}")
    check_folder(settings.model)
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=False).get_text_config()
    except Exception as error:
        raise StartupError(f"model {name!r} could not be loaded: {first_line(error)}") from error
    heads = config.num_attention_heads
    plan = getattr(config, "base_model_tp_plan", None)
    with _explained(name, config):
        check_plan(config.model_type, plan, heads, getattr(config, "num_key_value_heads", None) or heads, size)
    devices = torch.cuda.device_count() if settings.device in ("auto", "cuda") and torch.cuda.is_available() else None
    if devices is not None and devices < size:
        raise StartupError(f"--tensor-parallel is {size}, and this machine has {devices} GPUs")
    threads = settings.threads or max(torch.get_num_threads() // size, 1)
    torch.set_num_threads(threads)
    followers = Followers(size, replace(settings, threads=threads), end_process)
    atexit.register(followers.end)
    return Ranks(0, size, followers.store)


def _load_model(
    settings: ModelSettings, name: str, ranks: Ranks | None
) -> tuple[PreTrainedModel, StreamedModel | None]:
    """A model, and how its layers are streamed if some are."""
    if settings.dtype not in {"auto", *DTYPES}:
        raise StartupError(f"dtype is {settings.dtype!r}, expected auto, {', '.join(DTYPES)}")
    check_folder(settings.model)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = None
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=False)
        streamed = _streamed(settings, config, device, name) if ranks is None else None
        if streamed:
            return streamed.model, streamed
        parallel = {"distributed_config": DistributedConfig(tp_size=ranks.size)} if ranks else {}
        model = AutoModelForCausalLM.from_pretrained(
            settings.model,
            config=config,
            dtype=DTYPES.get(settings.dtype, "auto"),
            attn_implementation=NAME,
            use_safetensors=True,
            trust_remote_code=False,
            **parallel,
        )
        loaded: PreTrainedModel = (model if ranks else model.to(device)).eval()  # type: ignore[arg-type]
    except StartupError:
        raise
    except Exception as error:  # transformers, the hub client, safetensors and torch each raise their own types here
        if config is not None:
            with _explained(name, config):
                check_family(config)
        where = "" if Path(settings.model).is_dir() else "it is no local folder; as a hub name: "
        raise StartupError(f"model {name!r} could not be loaded: {where}{first_line(error)}") from error
    return loaded, None


def _streamed(settings: ModelSettings, config: PretrainedConfig, device: str, name: str) -> StreamedModel | None:
    """The model with streamed layers, where some are asked for or do not fit; None where all stay in memory.

    Raises:
        StartupError: They cannot be streamed.
    """
    asked, folder = settings.resident_layers, Path(settings.model)
    if torch.device(device).type != "cpu":
        if asked is not None:
            raise StartupError(f"layers are streamed to CPUs only, and the device is {device}; expected --device cpu")
        return None
    free = free_memory(torch.device("cpu"))
    room = None if free is None else int(WEIGHTS_SHARE * free)
    if asked is None and (room is None or sum(each.stat().st_size for each in folder.glob("*.safetensors")) <= room):
        return None
    dtype = DTYPES.get(settings.dtype) or getattr(config, "dtype", None) or torch.float32
    model = skeleton(config, dtype)
    plan = plan_of(model)
    fitting = plan.layers if room is None else plan.resident(room)
    resident = fitting if asked is None else min(asked, plan.layers)
    if resident == plan.layers:
        return None
    log.info("%s: %d of %d layers stay in memory, the others are streamed", name, resident, plan.layers)
    if not folder.is_dir():
        folder = Path(snapshot_download(settings.model, allow_patterns=["*.safetensors", "*.json"]))
    loaded = load_streamed(model, folder, name, resident, settings.layer_cache or default_folder())
    if (folder / "generation_config.json").exists():
        loaded.model.generation_config = GenerationConfig.from_pretrained(folder)
    return loaded


def _allocate(
    name: str, shape: KVShape, slots: int, model: PreTrainedModel, ranks: Ranks | None, **layout: int
) -> KVArena:
    """An arena for a model.

    Raises:
        StartupError: The device has not enough memory.
    """
    try:
        if ranks and ranks.rank == 0:
            return ParallelArena(ranks, shape, slots, model.dtype, model.device, **layout)
        return KVArena(shape, slots, model.dtype, model.device, **layout)
    except (RuntimeError, MemoryError, OSError) as error:
        raise StartupError(
            f"the KV cache of {name} for {slots} tokens does not fit into the device's memory; expected a lower "
            f"--kv-tokens or --max-sessions"
        ) from error


def _runner(
    model: PreTrainedModel,
    arena: KVArena,
    attending: Callable[[Sequence[Segment]], Attending],
    native: bool,
    streamed: StreamedLayers | None,
) -> Runner:
    """The runner of forwards of any size."""
    program = program_of(model) if native else None
    if program is None:
        return EagerRunner(FlatForward(model), arena, attending)
    return NativeRunner(program, arena, streamed)


def _context_length(model: PreTrainedModel) -> int:
    """Tokens of the longest sequence that the model was made for.

    Raises:
        StartupError: The configuration names none.
    """
    config = model.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise StartupError(f"the configuration of {config.model_type} names no max_position_embeddings")
    return length


@contextmanager
def _explained(name: str, config: PretrainedConfig) -> Iterator[None]:
    """Name the model, and its family where that is the reason, in any failure while it is probed."""
    try:
        try:
            yield
        except Exception:
            check_family(config)
            raise
    except StartupError as error:
        raise StartupError(f"model {name} cannot be served exactly: {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise StartupError(f"model {name} cannot be served: its forward failed: {first_line(error)}") from error


def _display_name(model: str) -> str:
    """A hub name as it is, and only the last component of a local path: messages name no paths."""
    if Path(model) in (embedded.target_path(), embedded.draft_path()):
        return f"embedded-{Path(model).name}"
    return Path(model).resolve().name if Path(model).exists() else model
