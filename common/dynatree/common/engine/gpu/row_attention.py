"""The attention of forwards over rows."""

from __future__ import annotations

from torch import Tensor

from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.gpu.tree_attention import RowPlan, tree_attention


class RowAttention:
    """The attention of one forward over rows; implements `Attending`."""

    def __init__(self, arena: KVArena, plan: RowPlan, longest: int) -> None:
        self._arena = arena
        self._plan = plan
        self._longest = longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store the new keys and values, then attend; as `Attending.attend`."""
        dtype = self._arena.dtype
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        return tree_attention(query, key, value, self._arena.layer(layer), self._plan, self._longest, scale)
