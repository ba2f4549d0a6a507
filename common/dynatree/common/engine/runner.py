"""The interface between the engine and whatever computes its forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dynatree.common.engine.segment import Segment


@dataclass(frozen=True)
class Choosing:
    """How the device chooses the tokens after a segment's tokens, and which of those that were drafted it accepts.

    Attributes:
        parents: Of each token the token above it, by its place in the segment; -1 where it was not drafted.
        temperature: 0 for greedy.
        seed: Of the noise, in [0, 2^64).
    """

    parents: Sequence[int]
    temperature: float = 0.0
    seed: int = 0


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


class Decider(Protocol):
    """A runner that also decides what a round commits, on the device."""

    def decide(
        self, segments: Sequence[Segment], choosings: Sequence[Choosing | None]
    ) -> tuple[list[Tensor], list[list[int] | None]] | None:
        """One forward with the decision after it, or None where one does not take all.

        Returns:
            Of each segment the logits of the tokens that it keeps, which the next forward overwrites; and the choices
            after all its tokens, None where it named no way to choose. The accepted tokens' keys and values are in the
            slots of their positions.
        """
        ...
