"""Rotary frequencies divided by a factor for each pair of dimensions, as GGUF files of Llama 3.1 and later have them.

llama.cpp's converter computes the factors from the parameters of transformers' `llama3` scaling, which a file does not
name. So the factors themselves become a configuration's `rope_parameters`.
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

FACTORS = "rope_freqs.weight"  # their tensor
_FAMILY = "llama"  # architecture whose layers all divide by the factors
_TYPE = "divided"  # our `rope_type`


def has_factors(config: PretrainedConfig) -> bool:
    """Whether a configuration has the factors of a GGUF file."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") == _TYPE


def add_factors(path: Path, header: GGUFHeader, config: PretrainedConfig) -> None:
    """Add the factors of a GGUF file to its configuration, if it has any and its family divides by them.

    Raises:
        StartupError: They are not positive float32 numbers, one for each pair of rotated dimensions.
    """
    tensor = next((each for each in header.tensors if each.name == FACTORS), None)
    if tensor is None or header.values["general.architecture"] != _FAMILY:
        return
    pairs = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) // 2
    if (tensor.kind, tensor.shape) != ("F32", (pairs,)):
        found = f"{tensor.kind} {list(tensor.shape)}, expected F32 [{pairs}]"
        raise StartupError(f"model {path.name} cannot be served: its tensor {FACTORS} is {found}")
    factors = np.fromfile(path, "<f4", pairs, offset=tensor.start)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise StartupError(
            f"model {path.name} cannot be served: its tensor {FACTORS} has a number that is not positive"
        )
    config.rope_parameters = {**config.rope_parameters, "rope_type": _TYPE, "factors": factors.tolist()}


def _divided(config: Any, device: torch.device | None = None, **_: object) -> tuple[Tensor, float]:
    """Return the inverse frequencies of a configuration with factors, and the scale of cosines and sines."""
    rope = config.rope_parameters
    factors = torch.tensor(rope["factors"], dtype=torch.float32, device=device)
    exponents = torch.arange(len(factors), dtype=torch.float32, device=device) / len(factors)
    return 1.0 / rope["rope_theta"] ** exponents / factors, 1.0


ROPE_INIT_FUNCTIONS[_TYPE] = _divided  # transformers documents the dictionary as open
