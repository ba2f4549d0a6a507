"""Computes recurrent layers over segments side by side; each segment continues from its own session's memory.

A forward pass first folds: if many committed tokens of a session have records, their records go into the states. Then
the outputs of all new tokens follow from the states, the records and the ancestors of each token, and the records of
the new tokens are kept. So an accepted path needs no second forward pass: `KVCache.move` keeps its records, and drops
the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dynatree.engine.forward.segment import Segment
from dynatree.engine.recurrent.linear_attention import append
from dynatree.engine.recurrent.memory import KEPT, Key, Memory
from dynatree.engine.recurrent.recorded import Recorded
from dynatree.engine.recurrent.scan import Scan


class RecurrentBatch:
    """Segments side by side in one row of tokens; implements `Recurring`.

    Sums of a session's outputs do not depend on the other segments. Their order depends on where its states were
    folded, and so on the sizes of earlier trees. Therefore scans compute in float64: the order changes bits that
    rounding to the model's dtype almost always drops.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._parts = [_Part(segment) for segment in segments]
        self._counts = [len(segment.token_ids) for segment in segments]
        self._faulty: set[int] = set()

    def scan(self, layer: int, scan: Scan, tokens: Sequence[Tensor]) -> Tensor:
        """See `Recurring.scan`."""
        tokens = [self._finite(each) for each in tokens]
        pieces = zip(*(each.split_with_sizes(self._counts) for each in tokens), strict=True)
        outputs = [part.scan((layer, scan.name), scan, piece) for part, piece in zip(self._parts, pieces, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def faulty(self) -> Sequence[int]:
        """Return the places of the tokens with numbers that were not finite in any scan so far; zeros replaced them."""
        return sorted(self._faulty)

    def commit(self) -> None:
        """Give the sessions their memories after a forward pass that succeeded."""
        for part in self._parts:
            part.commit()

    def _finite(self, tokens: Tensor) -> Tensor:
        """Return tensors of tokens `[n, ...]` with zeros in place of NaN and infinity, as the KV cache stores them."""
        if math.isfinite(tokens.sum().item()):
            return tokens
        finite = tokens.isfinite().flatten(1).all(1)
        self._faulty.update((~finite).nonzero()[:, 0].tolist())
        return tokens.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


class _Part:
    """A segment, the memory before it, and that after it as far as it has been computed."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        memory = segment.kv.memory or Memory()
        if not memory.position <= segment.start <= memory.stop:
            if segment.start:
                raise ValueError(
                    f"a segment starts at slot {segment.start}, but the recurrent layers can continue from slots "
                    f"{memory.position} to {memory.stop} only"
                )
            memory = Memory()
        self._memory = memory
        self._kept = segment.start - memory.position
        self._folds = self._kept > KEPT  # the committed tokens before the segment
        count = len(segment.token_ids)
        # of a prompt's piece, most tokens go into the states at once, because all of its tokens are committed
        self._final = count - KEPT if segment.mask is None and count > KEPT else 0
        self._ancestors = _ancestors(segment, 0 if self._folds else self._kept)
        self._layers: dict[Key, tuple[Tensor, Recorded]] = {}

    def scan(self, key: Key, scan: Scan, tokens: Sequence[Tensor]) -> Tensor:
        """Compute a scan for the tokens of the segment; see `Recurring.scan`."""
        state, recorded = self._memory.layers[key] if self._memory.stop else (scan.start(), Recorded(scan.none))
        recorded = recorded.taken(range(self._kept)).settled()
        if self._folds:
            state, recorded = scan.fold(state, recorded.joined()), Recorded(scan.none)
        kept = recorded.joined()
        outputs, new = scan.compute(*tokens, kept, self._ancestors, state)
        recorded = recorded.followed_by(new)
        if self._final:
            records = append(kept, new)
            final = len(records[0]) - KEPT
            state = scan.fold(state, tuple(each[:final] for each in records))
            recorded = Recorded(tuple(each[final:] for each in records)).settled()
        self._layers[key] = state, recorded
        return outputs

    def commit(self) -> None:
        segment = self._segment
        position = segment.stop - KEPT if self._final else segment.start - (0 if self._folds else self._kept)
        segment.kv.memory = Memory(position, segment.stop - position, self._layers)


def _ancestors(segment: Segment, kept: int) -> Tensor | None:
    """Return the ancestors of a segment's tokens among `kept` earlier tokens and themselves, bool `[n, kept + n]`.

    Raises:
        ValueError: A token does not see a token that is in the states.
    """
    if segment.mask is None:
        return None
    count, columns = segment.mask.shape
    width = kept + count
    before, mask = segment.mask[:, : max(columns - width, 0)], segment.mask[:, max(columns - width, 0) :]
    if not before.all():
        raise ValueError("a token does not see a token that is in the states of the recurrent layers")
    ancestors = torch.ones(count, width, dtype=torch.bool)
    ancestors[:, width - mask.shape[1] :] = mask
    ancestors[:, kept:].fill_diagonal_(False)
    return ancestors
