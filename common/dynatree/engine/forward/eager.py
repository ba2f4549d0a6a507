"""The runner of forward passes of any size, without padding or capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from dynatree.engine.forward.attention import SegmentAttending
from dynatree.engine.forward.flat_forward import FlatForward
from dynatree.engine.forward.not_finite import spoil
from dynatree.engine.forward.recurrent_batch import RecurrentBatch
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache


class EagerRunner:
    """Runs any number of segments side by side in one forward pass.

    Args:
        forward: The model's forward pass.
        kv_cache: KV cache that stores keys and values.
        attending: Factory of the attention that every layer computes for the given segments.
    """

    def __init__(
        self, forward: FlatForward, kv_cache: KVCache, attending: Callable[[Sequence[Segment]], SegmentAttending]
    ) -> None:
        self._forward = forward
        self._kv_cache = kv_cache
        self._attending = attending

    def run(self, segments: Sequence[Segment]) -> list[Tensor]:
        """See `Runner.run`."""
        split, faulty = self.compute(segments)
        spoil(segments, split, faulty)
        return split

    def compute(self, segments: Sequence[Segment]) -> tuple[list[Tensor], Sequence[int]]:
        """Compute `run` without `spoil`, whose last two arguments are returned."""
        kept = [segment.keep if segment.keep is not None else range(len(segment.token_ids)) for segment in segments]
        offsets = [0]  # place of each segment's first token in the row
        for segment in segments:
            offsets.append(offsets[-1] + len(segment.token_ids))
        keep = [offset + index for offset, keeps in zip(offsets, kept, strict=False) for index in keeps]
        attending = self._attending(segments)
        recurring = None if self._kv_cache.shape.recurrent is None else RecurrentBatch(segments)
        logits = self._forward(
            self._index(chain.from_iterable(segment.token_ids for segment in segments))[None],
            self._index(chain.from_iterable(segment.positions for segment in segments))[None],
            attending,
            self._index(keep),
            recurring,
        )
        split = list(logits.split_with_sizes([len(keeps) for keeps in kept]))
        faulty = attending.faulty()
        if recurring is not None:
            recurring.commit()
            faulty = sorted({*faulty, *recurring.faulty()})
        return split, faulty

    def _index(self, numbers: Iterable[int]) -> Tensor:
        """Return an integer tensor `[n]` on the KV cache's device."""
        return torch.tensor(list(numbers), dtype=torch.long, device=self._kv_cache.device)
