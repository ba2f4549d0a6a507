"""Rotary frequencies divided by a factor for each pair of dimensions, as GGUF files hold them.

For Llama 3.1 and later, llama.cpp's converter computes the factors from the parameters of transformers' `llama3`
scaling, which a file does not name. So the factors themselves become a configuration's `rope_parameters`. For Phi-3, it
stores the two sets of factors of `longrope` scaling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dynatree.common.errors import StartupError
from dynatree.engine.model.gguf_header import GGUFHeader

_DIVISORS = "rope_freqs.weight"
# What tells Llama 3.1 and later; files from before August 2024 lack the factors.
_LLAMA_3_1 = {"general.architecture": "llama", "llama.context_length": 131072, "llama.rope.freq_base": 500000.0}
_LLAMA_3_TOKENS = 128256  # at least
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_TYPE = "divided"  # our `rope_type`
# The tensors of factors, by the `rope_type` of a configuration that has them.
_TENSORS = {_TYPE: {_DIVISORS}, "longrope": {_LONG, _SHORT}}


def tensors_of_factors(config: PretrainedConfig) -> set[str]:
    """Return the names of a GGUF file's tensors that its configuration has in place of the model."""
    rope = getattr(config, "rope_parameters", None) or {}
    return _TENSORS.get(rope.get("rope_type", ""), set())


def add_factors(path: Path, header: GGUFHeader, config: PretrainedConfig) -> set[str]:
    """Add the factors of a GGUF file to its configuration, if it has any and its family divides by them.

    Returns:
        The keys of the file, without the name of the architecture, that the configuration has with the factors.

    Raises:
        StartupError: They are missing, or not positive float32 numbers, one for each pair of rotated dimensions.
    """
    architecture: str = header.values["general.architecture"]
    there = {each.name for each in header.tensors}
    is_llama_3_1 = _LLAMA_3_1.items() <= header.values.items()
    if is_llama_3_1 and header.values.get("tokenizer.ggml.tokens", 0) >= _LLAMA_3_TOKENS and _DIVISORS not in there:
        raise StartupError(
            f"model {path.name} cannot be served: by its context, rope.freq_base and vocabulary it is of Llama 3.1 or "
            f"later, but it lacks {_DIVISORS}"
        )
    if architecture == "llama" and _DIVISORS in there:
        factors = _factors(path, header, _DIVISORS, config)
        config.rope_parameters = {**config.rope_parameters, "rope_type": _TYPE, "factors": factors}
    if architecture != "phi3" or not {_LONG, _SHORT} <= there:
        return set()
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": "longrope",
        "long_factor": _factors(path, header, _LONG, config),
        "short_factor": _factors(path, header, _SHORT, config),
        "original_max_position_embeddings": config.original_max_position_embeddings,
        "attention_factor": header.values.get("phi3.rope.scaling.attn_factor", 1.0),
    }
    named = header.values.get("phi3.rope.scaling.type", "longrope") == "longrope"
    return {"rope.scaling.attn_factor", *(["rope.scaling.type"] if named else [])}


def _factors(path: Path, header: GGUFHeader, name: str, config: PretrainedConfig) -> list[float]:
    [tensor] = [each for each in header.tensors if each.name == name]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)) // 2
    if (tensor.kind, tensor.shape) != ("F32", (pairs,)):
        found = f"{tensor.kind} {list(tensor.shape)}, expected F32 [{pairs}]"
        raise StartupError(f"model {path.name} cannot be served: its tensor {name} is {found}")
    factors = np.fromfile(path, "<f4", pairs, offset=tensor.start)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise StartupError(f"model {path.name} cannot be served: its tensor {name} has a number that is not positive")
    numbers: list[float] = factors.tolist()
    return numbers


def _divided(config: Any, device: torch.device | None = None, **_: object) -> tuple[Tensor, float]:
    """Return the inverse frequencies of a configuration with factors, and the scale of cosines and sines."""
    rope = config.rope_parameters
    factors = torch.tensor(rope["factors"], dtype=torch.float32, device=device)
    exponents = torch.arange(len(factors), dtype=torch.float32, device=device) / len(factors)
    return 1.0 / rope["rope_theta"] ** exponents / factors, 1.0


ROPE_INIT_FUNCTIONS[_TYPE] = _divided  # transformers documents the dictionary as open
