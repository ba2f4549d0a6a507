"""Fingerprint of all that decides a service's tokens: the weights, their dtype, the configuration and the numerics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynatree.engine.model.generation_defaults import GenerationDefaults

# Location, authoring tool and library metadata of a checkpoint, on which no token depends.
NAMES_ONLY = ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures")
CHUNKS = 64  # chunks of a tensor with separate sums, which detect weights that changed places


def model_fingerprint(
    model: PreTrainedModel, defaults: GenerationDefaults, known: Mapping[str, list[object]] | None = None
) -> str:
    """Return the SHA-256, in hexadecimal, of the configuration, the adopted generation_config and the weights.

    For each tensor, it covers the name, dtype, shape, and the sums of 64 chunks of its bits, at memory bandwidth. It
    distinguishes checkpoints, but it does not protect against a forged one.

    Args:
        model: Model with its weights in memory, except the tensors in `known`.
        defaults: Adopted defaults of its generation_config.
        known: `sums_of` the tensors that are not in memory, by their names in the model.
    """
    digest = hashlib.sha256()
    config = json.loads(model.config.to_json_string(use_diff=False))
    for name in NAMES_ONLY:
        config.pop(name, None)
    parts: list[object] = [config, sorted(defaults.eos_token_ids), defaults.repetition_penalty]
    known = known or {}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in known}
    sums = {**known, **{name: sums_of(tensor) for name, tensor in state.items()}}
    parts += [[name, *each] for name, each in sorted(sums.items())]
    for part in parts:
        digest.update(json.dumps(part, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def with_numerics(fingerprint: str, numerics: str) -> str:
    """Combine a target's fingerprint with the name of its numerics; SHA-256 in hexadecimal."""
    return hashlib.sha256(f"{fingerprint}\n{numerics}".encode()).hexdigest()


def sums_of(tensor: Tensor) -> list[object]:
    """Return a tensor's dtype, its shape, and the sums of chunks of its bits."""
    gather = getattr(tensor, "full_tensor", None)  # a DTensor; all ranks call this in the same order
    whole: Tensor = gather() if gather else tensor
    return [str(whole.dtype), list(whole.shape), _sums(whole)]


def _sums(tensor: Tensor) -> list[int]:
    """Return the wrapping sums of chunks of the bits as 64-bit integers, then the remaining bytes."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // (8 * CHUNKS) * 8 * CHUNKS
    words = raw[:whole].view(torch.int64).reshape(CHUNKS, -1)
    return [*words.sum(dim=1).tolist(), *raw[whole:].tolist()]
