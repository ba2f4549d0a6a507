"""Rotary embeddings whose frequencies transformers changes with the length of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from dynatree.common.errors import StartupError

_FIXED = "fixed"  # a `rope_type` that transformers never updates


def check_rotary(config: PretrainedConfig, context_length: int) -> None:
    """Refuse a context within which the frequencies change.

    With `longrope` scaling they change for all tokens once a sequence outgrows the original context. With `dynamic`
    scaling they do so beyond `max_position_embeddings`, which no served context exceeds.

    Raises:
        StartupError: The original context is shorter than `context_length` tokens.
    """
    for rope in _longropes(vars(config)):
        original = rope["original_max_position_embeddings"]
        if original < context_length:
            raise StartupError(
                f"its longrope rotary scaling changes with the sequence length beyond {original} tokens, and the "
                f"context is {context_length}; expected --max-context of at most {original}"
            )


def fix_rotary(model: PreTrainedModel) -> None:
    """Keep the frequencies of the original context, also when cosines and sines are computed in advance beyond it."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            module.rope_type = {layers: _fixed(kind) for layers, kind in kinds.items()}  # type: ignore[assignment]
        elif isinstance(kinds, str):
            module.rope_type = _fixed(kinds)  # type: ignore[assignment]


def _fixed(kind: str) -> str:
    return _FIXED if kind == "longrope" or "dynamic" in kind else kind


def _longropes(values: object) -> Iterator[dict[str, Any]]:
    """Yield the parameters of longrope scaling anywhere in a configuration."""
    if isinstance(values, dict):
        if "longrope" in (values.get("rope_type"), values.get("type")):
            yield values
        for value in values.values():
            yield from _longropes(value)
