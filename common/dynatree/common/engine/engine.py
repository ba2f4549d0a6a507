"""The engine: a loaded model and its KV arena, run by one flat forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from dynatree.common import embedded
from dynatree.common.device import device_id
from dynatree.common.engine.alike import filled_keys, sums_alike
from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.attention import NAME, Batch, Segment
from dynatree.common.engine.packing import pack
from dynatree.common.engine.static import StaticBatch, StaticForwards, StaticShape
from dynatree.common.engine.support import check_config, check_outputs, record_attention
from dynatree.common.errors import StartupError
from dynatree.common.model_info import ModelInfo
from dynatree.common.tokenizer import check_folder, fingerprint, first_line, load_tokenizer
from dynatree.common.version import version

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSettings:
    """Which model to load, and how.

    `model` is a hub name or a local path. `dtype` is a key of `DTYPES`, or "auto" for the checkpoint's own. `device` is
    a torch device, or "auto" for the first GPU if any. `sessions` is the number of sequences that can be open
    at once, and `scratch` the slots that each has for speculative tokens. With `static_shapes` all forwards but prompts
    are padded to a few sizes, and on a GPU captured as CUDA graphs.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    sessions: int = 4
    scratch: int = 256
    static_shapes: bool = False


class Engine:
    """Runs segments of any number of sessions through a model in one forward.

    Invariant: the logits of a token are those that the model gives for the sequence made of the slots which the token's
    mask shows, in the order of their positions, whatever else is in the forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        arena: KVArena,
        tokenizer: PreTrainedTokenizerBase,
        info: ModelInfo,
        static_shapes: bool = False,
    ) -> None:
        self.model = model
        self.device = model.device  # the model looks for it among its parameters at every call
        self.arena = arena
        self.tokenizer = tokenizer
        self.info = info
        # transformers takes a four-dimensional mask as it is and builds none; the attention function ignores it
        self._placeholder = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        self._alike = _sums_alike(model)
        self._static = None
        if static_shapes:
            self._static = StaticForwards(self._forward_static, arena, model.dtype, model.device)

    @classmethod
    @torch.inference_mode()
    def load(cls, settings: ModelSettings) -> Engine:
        """Load a model, refuse one that cannot be served exactly, and preallocate its arena.

        Raises:
            StartupError: The model is missing or unsupported; one line says which and why.
        """
        name = _display_name(settings.model)
        model = _load_model(settings, name)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        step_bytes = _step_bytes(model)
        tokenizer = load_tokenizer(settings.model)
        with _explained(name):
            if model.device.type == "cpu":
                pack(model)
            shape = record_attention(model).kv_shape()
            context_length = context_length_of(model)
            check_config(model.config, context_length)
        capacity = context_length + settings.scratch
        if _sums_alike(model):  # whatever is read then is within the arena
            capacity = filled_keys(capacity, shape.head_dim, model.dtype)
        try:
            arena = KVArena(shape, settings.sessions, capacity, model.dtype, model.device)
        except (RuntimeError, MemoryError, OSError) as error:
            room = f"{settings.sessions} sessions of {capacity} tokens"
            raise StartupError(f"the KV cache of {name} for {room} does not fit into the device's memory") from error
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
        )
        engine = cls(model, arena, tokenizer, info, settings.static_shapes)
        with _explained(name):
            check_outputs(engine)
        return engine

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """One forward over all segments; their keys and values are stored in the arena.

        Returns:
            For each segment the logits of the tokens it keeps: `[kept, vocabulary]`, in the model's dtype.
        """
        if self._static is not None and len(segments) == 1:
            shape = StaticShape.of(segments[0], self.arena.capacity)
            if shape is not None:
                rows = self._static.run(shape, segments[0])
                keeps = segments[0].keep
                return [rows.clone() if keeps is None else rows[list(keeps)]]
        device = self.device
        kept = [segment.keep if segment.keep is not None else range(len(segment.token_ids)) for segment in segments]
        offsets = [0]
        for segment in segments:
            offsets.append(offsets[-1] + len(segment.token_ids))
        keep = [offset + i for offset, keeps in zip(offsets, kept, strict=False) for i in keeps]
        logits = self.model(
            input_ids=_row(chain.from_iterable(s.token_ids for s in segments), device),
            position_ids=_row(chain.from_iterable(s.positions for s in segments), device),
            attention_mask=self._placeholder,
            use_cache=False,
            logits_to_keep=torch.tensor(keep, dtype=torch.long, device=device),
            dynatree_batch=Batch(segments, self.arena, self.model.dtype, device, self._alike),
        ).logits[0]
        return list(logits.split([len(keeps) for keeps in kept]))

    def _forward_static(self, batch: StaticBatch) -> Tensor:
        logits: Tensor = self.model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            attention_mask=self._placeholder,
            use_cache=False,
            dynatree_batch=batch,
        ).logits[0]
        return logits

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it, so that a clock read next is true."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens at which `generate()` would stop."""
        config = self.model.generation_config
        ids = config.eos_token_id if config is not None else None
        if ids is None:
            return frozenset()
        return frozenset(ids) if isinstance(ids, list) else frozenset({ids})


def context_length_of(model: PreTrainedModel) -> int:
    """The longest sequence the model was made for.

    Raises:
        StartupError: The configuration names none.
    """
    config = model.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise StartupError(f"the configuration of {config.model_type} names no max_position_embeddings")
    return length


def _step_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a forward over one token reads; of an embedding table it reads one row."""
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = output is not None and output.weight is table
    read = sum(weight.nbytes for weight in model.parameters())
    return int(read if tied else read - table.nbytes)


def _sums_alike(model: PreTrainedModel) -> bool:
    return model.device.type == "cpu" and sums_alike(model.dtype)


def _load_model(settings: ModelSettings, name: str) -> PreTrainedModel:
    if settings.dtype not in {"auto", *DTYPES}:
        raise StartupError(f"dtype is {settings.dtype!r}, expected auto, {', '.join(DTYPES)}")
    check_folder(settings.model)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            settings.model,
            config=config,
            dtype=DTYPES.get(settings.dtype, "auto"),
            attn_implementation=NAME,
            use_safetensors=True,
            trust_remote_code=False,
        )
        loaded: PreTrainedModel = model.to(device).eval()  # type: ignore[arg-type]
    except Exception as error:  # transformers, the hub client, safetensors and torch each raise their own types here
        where = "" if Path(settings.model).is_dir() else "it is no local folder; as a hub name: "
        raise StartupError(f"model {name!r} could not be loaded: {where}{first_line(error)}") from error
    return loaded


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Any failure while a model is probed means that it cannot be served; name it."""
    try:
        yield
    except StartupError as error:
        raise StartupError(f"model {name} cannot be served exactly: {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise StartupError(f"model {name} cannot be served: its forward failed: {first_line(error)}") from error


def _display_name(model: str) -> str:
    """A hub name as it is, and only the last component of a local path: messages name no paths."""
    if Path(model) in (embedded.target_path(), embedded.draft_path()):
        return f"embedded-{Path(model).name}"
    return Path(model).resolve().name if Path(model).exists() else model


def _row(values: Iterator[int], device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long, device=device)[None]
