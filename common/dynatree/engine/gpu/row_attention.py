"""The attention of forward passes over rows."""

from __future__ import annotations

from torch import Tensor

from dynatree.engine.forward.scores import Scores
from dynatree.engine.gpu.tree_attention import RowPlan, tree_attention
from dynatree.engine.kv.kv_cache import KVCache


class RowAttention:
    """The attention of one forward pass over rows; implements `Attending`."""

    def __init__(self, kv_cache: KVCache, plan: RowPlan, longest: int) -> None:
        self._kv_cache = kv_cache
        self._plan = plan
        self._longest = longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Store the new keys and values, then attend; see `Attending.attend`."""
        dtype = self._kv_cache.dtype
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        slots, locality = self._kv_cache.layer(layer), self._kv_cache.shape.locality(layer)
        return tree_attention(query, key, value, slots, self._plan, self._longest, scores, locality)
