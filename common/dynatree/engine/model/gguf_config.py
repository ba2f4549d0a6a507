"""Configurations of GGUF files of the families that transformers reads in part, or not at all.

transformers has no mapping for Gemma and SmolLM3. For Qwen3 it skips the size of a head, and for Phi-3 the sliding
window and the number of rotated dimensions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from dynatree.common.errors import StartupError
from dynatree.engine.model.gguf_header import GGUFHeader, read_header
from dynatree.engine.settings import GGUF

_FAMILIES = frozenset({"gemma", "phi3", "qwen3", "smollm3"})  # the architectures of llama.cpp, and transformers' types
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
_THETA = 10000.0  # llama.cpp's base of the rotary embedding where a file names none


def has_own_config(model: str) -> bool:
    """Whether a model is a GGUF file whose configuration `gguf_config` reads, and not transformers.

    Raises:
        StartupError: The file cannot be read.
    """
    path = Path(model)
    return path.suffix == GGUF and path.is_file() and _family(read_header(path)) in _FAMILIES


def gguf_config(path: Path) -> PretrainedConfig:
    """Read the configuration of a file for which `has_own_config` holds.

    SmolLM3's layers without rotary embedding are every fourth one, as llama.cpp has it: a file does not name them.

    Raises:
        StartupError: The file lacks a value, or has a rotary embedding that is not served.
    """
    header = read_header(path)
    family = _family(header)
    values = {key.removeprefix(f"{family}."): value for key, value in header.values.items()}
    missing = [key for key in _FIELDS if key not in values]
    if missing:
        raise StartupError(f"model {path.name} cannot be served: it has no {missing[0]}")
    fields: dict[str, Any] = {field: values[key] for key, field in _FIELDS.items()}
    head_dim = values.get("attention.key_length", fields["hidden_size"] // fields["num_attention_heads"])
    rotated = values.get("rope.dimension_count", head_dim)
    rope = {"rope_type": "default", "rope_theta": values.get("rope.freq_base", _THETA)}
    if family == "phi3":
        rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise StartupError(f"model {path.name} cannot be served: its heads rotate {rotated} of {head_dim} dimensions")
    scaling = values.get("rope.scaling.type", "none")
    if scaling != "none":
        raise StartupError(f"model {path.name} cannot be served: {scaling} rotary scaling is not read from its file")
    fields |= {
        "head_dim": head_dim,
        "rope_parameters": rope,
        "sliding_window": values.get("attention.sliding_window") or None,
        "tie_word_embeddings": all(each.name != "output.weight" for each in header.tensors),
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
    }
    config: PretrainedConfig = CONFIG_MAPPING[family](**fields)
    return config


def _family(header: GGUFHeader) -> str:
    family: str = header.values["general.architecture"]
    return family
