"""What two services must share to give the same tokens: weights, their dtype, configuration, numerics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynatree.common.engine.generation_defaults import GenerationDefaults

# Where a checkpoint lies, who wrote it, and what other libraries make of it: no token depends on these.
NAMES_ONLY = ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures")
CHUNKS = 64  # of a tensor that are summed apart, so that weights that changed places are seen


def model_fingerprint(
    model: PreTrainedModel, defaults: GenerationDefaults, known: Mapping[str, list[object]] | None = None
) -> str:
    """SHA-256, in hexadecimal, over the configuration, what is adopted of generation_config, and the weights.

    Of a tensor it covers name, dtype, shape, and the sums of 64 chunks of its bits: as fast as memory is read. That
    tells checkpoints apart; it is no protection against somebody who makes one up.

    Args:
        model: Whose weights are in memory, but for those that are known.
        defaults: What is adopted of its generation_config.
        known: `sums_of` other tensors, by their names in the model.
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
    """The fingerprint of a target whose forwards are computed so; SHA-256 in hexadecimal."""
    return hashlib.sha256(f"{fingerprint}\n{numerics}".encode()).hexdigest()


def sums_of(tensor: Tensor) -> list[object]:
    """A tensor's dtype, its shape, and the sums of chunks of its bits."""
    gather = getattr(tensor, "full_tensor", None)  # a DTensor; all ranks come here, in one order
    whole: Tensor = gather() if gather else tensor
    return [str(whole.dtype), list(whole.shape), _sums(whole)]


def _sums(tensor: Tensor) -> list[int]:
    """Sums of the bits, taken as 64-bit integers, that wrap; and what is left over."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // (8 * CHUNKS) * 8 * CHUNKS
    words = raw[:whole].view(torch.int64).reshape(CHUNKS, -1)
    return [*words.sum(dim=1).tolist(), *raw[whole:].tolist()]
