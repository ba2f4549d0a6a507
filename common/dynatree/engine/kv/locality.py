"""Which earlier tokens a layer's queries see: all of them, a sliding window, or their own chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Locality:
    """Gives the lowest position that a query sees, by the query's own position.

    Attributes:
        window: A query sees this many tokens at most, itself included; None means no limit.
        chunk: Size of a chunk in positions; a query sees the tokens of its own chunk. None means no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def lowest(self, positions: Tensor) -> Tensor:
        """Return the lowest position that the query at each of `positions` sees, in the shape of `positions`."""
        lowest = torch.zeros_like(positions)
        if self.window is not None:
            lowest = torch.maximum(lowest, positions - self.window + 1)
        if self.chunk is not None:
            lowest = torch.maximum(lowest, positions // self.chunk * self.chunk)
        return lowest

    def changes(self, context_length: int) -> bool:
        """Whether a query within a context of `context_length` tokens misses an earlier token."""
        return any(size is not None and size < context_length for size in (self.window, self.chunk))


GLOBAL = Locality()
