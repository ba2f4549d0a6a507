"""Forwards of any size, computed as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.attention import SegmentAttending
from dynatree.common.engine.flat_forward import FlatForward
from dynatree.common.engine.not_finite import spoil
from dynatree.common.engine.segment import Segment


class EagerRunner:
    """Runs any number of segments side by side in one forward.

    Args:
        forward: The model's forward.
        arena: Where keys and values are stored.
        attending: Makes of segments what every layer attends with.
    """

    def __init__(
        self, forward: FlatForward, arena: KVArena, attending: Callable[[Sequence[Segment]], SegmentAttending]
    ) -> None:
        self._forward = forward
        self._arena = arena
        self._attending = attending

    def run(self, segments: Sequence[Segment]) -> list[Tensor]:
        """As `Runner.run`."""
        kept = [segment.keep if segment.keep is not None else range(len(segment.token_ids)) for segment in segments]
        offsets = [0]  # of each segment's first token in the row
        for segment in segments:
            offsets.append(offsets[-1] + len(segment.token_ids))
        keep = [offset + index for offset, keeps in zip(offsets, kept, strict=False) for index in keeps]
        attending = self._attending(segments)
        logits = self._forward(
            self._index(chain.from_iterable(segment.token_ids for segment in segments))[None],
            self._index(chain.from_iterable(segment.positions for segment in segments))[None],
            attending,
            self._index(keep),
        )
        split = list(logits.split_with_sizes([len(keeps) for keeps in kept]))
        spoil(segments, split, attending.faulty())
        return split

    def _index(self, numbers: Iterable[int]) -> Tensor:
        """Whole numbers `[n]`, on the arena's device."""
        return torch.tensor(list(numbers), dtype=torch.long, device=self._arena.device)
