"""Configurations of models, also of GGUF files that transformers reads in part, or not at all.

transformers has no mapping for Gemma, Mixtral and SmolLM3. For Qwen3 it skips the size of a head, for mixtures that of
an expert, for Phi-3 the sliding window and the rotated dimensions with their factors, and for Gemma 2 and 3 the caps
and scales. In all files it passes over keys that it does not know.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from dynatree.common.errors import StartupError
from dynatree.engine.model.files import checkpoint_of
from dynatree.engine.model.gguf_families import FAMILIES, THETA, Values, family_of
from dynatree.engine.model.gguf_header import GGUFHeader, Length, read_header
from dynatree.engine.model.gguf_tokenizer import check_split
from dynatree.engine.model.rope_factors import add_factors
from dynatree.engine.settings import is_gguf

# Keys of a file, without the name of its architecture, and the fields of a configuration.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "tokenizer.ggml.tokens": "vocab_size",  # a header has the lengths of arrays
}
# More keys that are read, compared with the configuration, or without effect on a model's numbers.
_KNOWN = frozenset({"vocab_size", "rope.freq_base", "rope.dimension_count", "rope.scaling.original_context_length"})
_KNOWN |= {
    "expert_weights_norm",
    "attention.key_length",
    "attention.value_length",
    "attention.causal",
    "attention.layer_norm_epsilon",
}
_KNOWN |= {"tensor_data_layout", "rope.scaling.finetuned", *_FIELDS}


def has_own_config(model: str) -> bool:
    """Whether a model is a GGUF file whose configuration is read here, and not by transformers.

    Raises:
        StartupError: The file cannot be read.
    """
    return is_gguf(model) and family_of(read_header(Path(model)).values) is not None


def config_of(model: str) -> PretrainedConfig:
    """Return the configuration of a model: of its GGUF file, or as transformers reads it.

    Raises:
        StartupError: A GGUF file's configuration lacks a value, or has one that is not read.
        Exception: transformers and the hub client raise types of their own.
    """
    path = Path(model)
    header = read_header(path) if is_gguf(model) else None
    family = family_of(header.values) if header else None
    if header and family:
        config, read = _own_config(path.name, header, family)
    else:
        config = AutoConfig.from_pretrained(**checkpoint_of(model), trust_remote_code=False)
        mapping: Any = GGUF_CONFIG_MAPPING.get(_architecture(header), {}) if header else {}
        read = {key for key, field in mapping.items() if field}
    if header:
        check_split(path.name, header.values)
        read |= add_factors(path, header, config)
        _check_keys(path.name, header, config, read)
    return config


def _check_keys(name: str, header: GGUFHeader, config: PretrainedConfig, read: set[str]) -> None:
    """Refuse a file with a key that changes the model's numbers, and that its configuration does not have.

    Args:
        name: Name of the file.
        header: Its header.
        config: The configuration.
        read: Keys, without the name of the architecture, whose values the configuration has.
    """
    architecture = _architecture(header)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    same = dict.fromkeys(("attention.key_length", "attention.value_length"), head_dim)
    same["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    same |= {"attention.causal": True, "expert_weights_norm": getattr(config, "norm_topk_prob", True)}
    unread = {"rope.freq_base": rope.get("rope_theta", THETA), "attention.layer_norm_epsilon": _epsilon_of(config)}
    same |= {key: value for key, value in unread.items() if key not in read and value is not None}
    for full, value in header.values.items():
        key = full.removeprefix(f"{architecture}.")
        if key == full:  # about the file or its tokenizer
            continue
        if key in same and not (isinstance(value, (int, float)) and math.isclose(value, same[key], rel_tol=1e-6)):
            reason = f"expected {same[key]}"
        elif isinstance(value, Length) and value:
            reason = "the length of an array, expected a number"
        elif key not in read and key not in _KNOWN and not _is_neutral(key, value):
            reason = "which is not read from GGUF files"
        else:
            continue
        raise StartupError(f"model {name} cannot be served: its {full} is {value!r:.40}, {reason}")


def _epsilon_of(config: PretrainedConfig) -> float | None:
    """Return the number that a model's norms with means add to variances."""
    names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)


def _is_neutral(key: str, value: object) -> bool:
    """Whether a value changes nothing: none or zero, or one of a scale or factor."""
    return value in (0, "none", "") or (value == 1 and key.endswith(("scale", "factor")))


def _own_config(name: str, header: GGUFHeader, family: str) -> tuple[PretrainedConfig, set[str]]:
    """Read the configuration of a file of one of `FAMILIES`, and return it with the keys that it has.

    SmolLM3's layers without rotary embedding are every fourth one, as llama.cpp has it: a file does not name them.

    Raises:
        StartupError: The file lacks a value.
    """
    prefix = f"{_architecture(header)}."
    values = {key.removeprefix(prefix): value for key, value in header.values.items()}
    missing = [key for key in _FIELDS if key not in values]
    if missing:
        raise StartupError(f"model {name} cannot be served: it has no {missing[0]}")
    fields: dict[str, Any] = {field: values[key] for key, field in _FIELDS.items()}
    fields |= {
        "head_dim": values.get("attention.key_length", fields["hidden_size"] // fields["num_attention_heads"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": values.get("rope.freq_base", THETA)},
        "sliding_window": None,
        "tie_word_embeddings": all(each.name != "output.weight" for each in header.tensors),
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
    }
    kind, more = FAMILIES[family]
    asked = Values(values)
    try:
        fields |= more(fields, asked)
    except LookupError as error:
        raise StartupError(f"model {name} cannot be served: it has no {prefix}{error}") from None
    config: PretrainedConfig = CONFIG_MAPPING[kind](**fields)
    return config, asked.read | {"rope.freq_base"}


def _architecture(header: GGUFHeader) -> str:
    architecture: str = header.values["general.architecture"]
    return architecture
