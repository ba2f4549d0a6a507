"""Refuses a configuration with which `generate()` forgets tokens that the model's attention sees."""

from __future__ import annotations

from transformers import DynamicCache, PretrainedConfig

from dynatree.common.errors import StartupError
from dynatree.engine.support.families import record_kv_shape
from dynatree.engine.support.small_model import small_model


def check_cache(config: PretrainedConfig, context_length: int) -> None:
    """Refuse a configuration with which transformers' KV cache holds other tokens than the attention sees.

    With a window of 1 token, the cache keeps all of them. It obeys keys such as `sliding_window` even for families
    whose attention ignores them. `generate()` then gives tokens that differ from those of whole sequences.

    Raises:
        StartupError: A layer of the cache keeps fewer tokens than its attention sees within the context, or more.
    """
    kept = {}
    for layer, each in enumerate(DynamicCache(config=config).layers):
        window = getattr(each, "sliding_window", None)
        if window is not None and window < context_length:
            kept[layer] = window
    if not kept:
        return
    if min(kept.values()) == 1:
        raise StartupError("its sliding window is 1 token long, and generate() then sees earlier ones")
    shape = record_kv_shape(small_model(config, 0, seed=0), context_length)  # a context of 0 shortens no span
    for layer, window in kept.items():
        if not shape.locality(shape.place(layer)).changes(window + 1):
            raise StartupError(
                f"by its configuration generate() keeps a sliding window of {window} tokens, shorter than the context "
                f"of {context_length}, but its attention sees more of them"
            )
