"""Examines a model's configuration, and refuses a model that cannot be served exactly, before weights are loaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PretrainedConfig

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.engine.device import chosen_device
from dynatree.engine.model.checkpoint import stored_dtype
from dynatree.engine.model.composite import text_config_of
from dynatree.engine.model.files import check_path, folder_of
from dynatree.engine.model.gguf_config import config_of
from dynatree.engine.model.rotary import check_rotary
from dynatree.engine.model.tokenizer import first_line
from dynatree.engine.offload.choice import dtype_of
from dynatree.engine.quantized.loading import method_of
from dynatree.engine.settings import ModelSettings, is_gguf
from dynatree.engine.small_engine import small_engine
from dynatree.engine.support.explained import explained, named
from dynatree.engine.support.families import WITHOUT_KEYS, check_config, recurs
from dynatree.engine.support.generate_cache import check_cache
from dynatree.engine.support.probe import check_computation

WITHOUT_ATTENTION = 2**17  # tokens of the context of a model that bounds none, because only recurrent layers mix tokens


@dataclass(frozen=True)
class Examined:
    """A model whose family and configuration can be served.

    Attributes:
        name: Name of the model, for messages.
        config: Its configuration; of a composite model, that of its language model.
        context_length: Tokens of the longest sequence that is served.
        bounded: Whether the model itself bounds its context.
    """

    name: str
    config: PretrainedConfig
    context_length: int
    bounded: bool = True


def examined(settings: ModelSettings, probes: bool = True) -> Examined:
    """Load a model's configuration and examine it.

    Args:
        settings: Settings of the model.
        probes: Whether a small model of the configuration is probed.

    Raises:
        StartupError: The model is missing or cannot be served.
    """
    name = display_name(settings.model)
    return examined_config(settings, name, _config(settings, name), probes)


def examined_config(settings: ModelSettings, name: str, config: PretrainedConfig, probes: bool = True) -> Examined:
    """Examine a configuration, as `examined` does with that of the model in `settings`."""
    with named(name):
        config = text_config_of(config)
        check_config(config)
        if recurs(config):
            _check_recurrent(settings, config)
    with explained(name, config):
        context_length = _context_length(config, settings)
        check_rotary(config, context_length)
        if probes:
            _check_options(settings, config, check_computation(config, context_length, small_engine))
        check_cache(config, context_length)
    return Examined(name, config, context_length, isinstance(_longest(config), int))


def display_name(model: str) -> str:
    """Return a hub name unchanged, and only the last component of a local path, because messages name no paths."""
    if Path(model) in (embedded.target_path(), embedded.draft_path()):
        return f"embedded-{Path(model).name}"
    return Path(model).resolve().name if Path(model).exists() else model


def unloadable(model: str, name: str, error: Exception) -> StartupError:
    """Return the refusal of a model whose files could not be loaded."""
    where = "" if Path(model).exists() else "it is no local folder; as a hub name: "
    return StartupError(f"model {name!r} could not be loaded: {where}{first_line(error)}")


def _config(settings: ModelSettings, name: str) -> PretrainedConfig:
    check_path(settings.model)
    try:
        config = config_of(settings.model)
        folder = None if is_gguf(settings.model) else folder_of(settings.model)
        if folder is not None and config.dtype is None:
            with suppress(StartupError, OSError, SafetensorError):  # the loader says what its files lack, or gets them
                config.dtype = stored_dtype(folder, name)
        return config
    except StartupError:
        raise
    except Exception as error:  # transformers and the hub client raise their own types here
        raise unloadable(settings.model, name, error) from error


def _check_options(settings: ModelSettings, config: PretrainedConfig, features: tuple[str, ...]) -> None:
    """Refuse features of a model that an option's forward passes do not compute."""
    if settings.tensor_parallel > 1 and features:
        raise StartupError(f"its attention has {' and '.join(features)}, which --tensor-parallel does not compute")


def _check_recurrent(settings: ModelSettings, config: PretrainedConfig) -> None:
    """Refuse options with which recurrent layers are not computed."""
    # Quantised layers round their rows to 8 bits, so a last bit could change the tokens of trees. In bfloat16, rows
    # keep their bits in trees; `tests.campaigns.recurrent_matrix --int8` compares tokens.
    tried = settings.weights == "int8" and dtype_of(settings, config) == torch.bfloat16
    quantised = not (tried or settings.weights == "auto") or method_of(config) is not None or is_gguf(settings.model)
    other = "cannot go back before a state; expected another --draft-model, whose layers all attend, or none"
    refused = (
        (f"a draft {other}", not settings.chooses_tokens),
        (f"--draft-model self:{settings.copy and settings.copy.weights} {other}", settings.copy is not None),
        ("they are computed on a CPU only; expected --device cpu", chosen_device(settings.device).type != "cpu"),
        ("--tensor-parallel does not compute them", settings.tensor_parallel > 1),
        ("--fixed-rows does not compute them", bool(settings.fixed_rows)),
        (
            "with quantised weights a tree could change its tokens; expected weights of 16 or 32 bits, or "
            "--weights int8 with --dtype bfloat16",
            quantised,
        ),
    )
    for reason, given in refused:
        if given:
            raise StartupError(f"{config.model_type} has recurrent layers, and {reason}")


def _context_length(config: PretrainedConfig, settings: ModelSettings) -> int:
    """Return the length of the longest sequence that is served, in tokens.

    Raises:
        StartupError: The configuration does not name the model's context length, or the target's is too short.
    """
    length = _longest(config)
    if not isinstance(length, int):
        kinds = set(getattr(config, "layer_types", None) or ())
        if not kinds or kinds - WITHOUT_KEYS:
            raise StartupError(f"the configuration of {config.model_type} has no max_position_embeddings")
        return settings.max_context or WITHOUT_ATTENTION
    asked = settings.max_context or length
    if asked > length and settings.chooses_tokens:
        raise StartupError(f"--max-context is {asked}, expected at most its context of {length} tokens")
    return min(length, asked)


def _longest(config: PretrainedConfig) -> Any:
    return getattr(config.get_text_config(), "max_position_embeddings", None)
