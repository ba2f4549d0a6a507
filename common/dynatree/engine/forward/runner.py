"""The interface between the engine and the runners of its forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dynatree.engine.forward.segment import Segment


@dataclass(frozen=True)
class Choosing:
    """How the device chooses the token after each token of a segment, and accepts drafted tokens.

    Attributes:
        parents: Each token's parent, by its place in the segment; -1 if the token was not drafted.
        temperature: Sampling temperature; 0 means greedy.
        seed: Seed of the noise, in [0, 2^64).
    """

    parents: Sequence[int]
    temperature: float = 0.0
    seed: int = 0


class Runner(Protocol):
    """Computes forward passes of one model over one KV cache; one thread calls it, in inference mode.

    Every runner keeps the engine's invariant: a token's logits depend only on the KV slots visible in its mask, and on
    nothing else in the forward pass.
    """

    def run(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Run one forward pass over segments of different sessions and store their keys and values in the KV cache.

        Returns:
            For each segment, the logits of the tokens that it keeps: `[kept, vocabulary]`, in the model's dtype. The
            caller may keep them: no later forward pass overwrites them.
        """
        ...


class Decider(Protocol):
    """A runner that also decides on the device which tokens a round commits."""

    def decide(
        self, segments: Sequence[Segment], choosings: Sequence[Choosing | None]
    ) -> tuple[list[Tensor], list[list[int] | None]] | None:
        """Run one forward pass with the decision after it; return None if one forward pass cannot hold all segments.

        Returns:
            For each segment, the logits of the tokens that it keeps, which the next forward pass overwrites; and the
            chosen token after each of its tokens, or None if its `choosings` entry is None. The keys and values of
            accepted tokens are then in the slots of their positions.
        """
        ...
