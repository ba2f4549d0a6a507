"""The interface between the engine and whatever computes its forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dynatree.common.engine.segment import Segment


class Runner(Protocol):
    """Computes forwards of one model over one KV arena; one thread calls it, in inference mode.

    Every runner keeps the engine's invariant: a token's logits depend on the slots that its mask shows and on nothing
    else in the forward.
    """

    def run(self, segments: Sequence[Segment]) -> list[Tensor]:
        """One forward over segments of different sessions; their keys and values are stored in the arena.

        Returns:
            For each segment the logits of the tokens that it keeps: `[kept, vocabulary]`, in the model's dtype. The
            caller may keep them: no later forward overwrites them.
        """
        ...
