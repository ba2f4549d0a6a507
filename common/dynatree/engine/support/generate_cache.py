"""Refuses a configuration with which `generate()` computes later tokens otherwise than a pass over the whole text."""

from __future__ import annotations

import math

from transformers import DynamicCache, PretrainedConfig

from dynatree.common.errors import StartupError
from dynatree.engine.support.families import record_kv_shape
from dynatree.engine.support.small_model import small_model


def check_cache(config: PretrainedConfig, context_length: int) -> None:
    """Refuse a configuration with which transformers' KV cache holds other tokens than the attention sees.

    With a window of 1 token, the cache keeps all of them. It obeys keys such as `sliding_window` even for families
    whose attention ignores them. `generate()` then gives tokens that differ from those of whole sequences. So it does
    where `time_step_limit` bounds the steps of Mamba-2: it obeys the bound in its prompt only.

    Raises:
        StartupError: A layer of the cache keeps fewer tokens than its attention sees within the context, or more; or
            the steps of recurrent layers are bounded.
    """
    limit = getattr(config, "time_step_limit", None)
    if limit and tuple(map(float, limit)) != (0.0, math.inf):
        raise StartupError(f"its time_step_limit is {list(limit)}, which generate() obeys in the prompt only")
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
