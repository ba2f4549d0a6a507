"""Numbers that are NaN or infinite: in weights, which are refused, and in keys and values, which spoil logits.

The arena holds zeros in place of such keys and values (`arena.KVArena`). So what a broken device or an overflow has
spoiled would show in no logits: those that depend on it are made NaN here, by which no token is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from dynatree.common.engine.segment import Segment
from dynatree.common.errors import StartupError


def check_weights(model: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights that are not finite: a probe does not use every one of them, and a prompt may.

    Raises:
        StartupError: One is not, and is no bias that masks tokens; it is named.
    """
    for name, weight in weights:
        local = getattr(weight, "to_local", None)  # a DTensor: each rank looks at its own part
        own: Tensor = local() if local else weight
        if own.is_floating_point() and not own.is_meta and not _is_finite(own, may_mask=name.endswith("bias")):
            raise StartupError(f"model {model} cannot be served: its weight {name} holds NaN or infinity")


def _is_finite(weight: Tensor, *, may_mask: bool) -> bool:
    """By the least and the largest number: as fast as memory is read. A bias of minus infinity masks a token."""
    if not weight.numel():
        return True
    least, largest = (each.item() for each in weight.aminmax())
    return math.isfinite(largest) and (math.isfinite(least) or (may_mask and least == -math.inf))


def spoil(segments: Sequence[Segment], logits: Sequence[Tensor], faulty: Sequence[int]) -> None:
    """Make NaN of the logits of tokens that see a token whose keys or values were not finite.

    The tokens of a causal segment are committed, and all later ones of its session see them: its range is marked.

    Args:
        segments: Of a forward.
        logits: Of each segment those of the tokens that it keeps, `[kept, vocabulary]`; changed in place.
        faulty: Which tokens they are, by their places in the row of all segments' tokens.
    """
    if not faulty and not any(segment.kv.broken for segment in segments):
        return
    first = 0
    for segment, rows in zip(segments, logits, strict=True):
        size = len(segment.token_ids)
        own = [place - first for place in faulty if first <= place < first + size]
        first += size
        if own and segment.mask is None:
            segment.kv.broken = True
        if segment.kv.broken:
            rows.fill_(math.nan)
        elif own and segment.mask is not None:
            kept = list(range(size) if segment.keep is None else segment.keep)
            columns = [segment.mask.shape[1] - size + index for index in own]
            seen = segment.mask[kept][:, [each for each in columns if each >= 0]].any(1)
            if min(columns) < 0:  # before the mask's first column, which every token sees
                seen.fill_(True)
            rows[seen.to(rows.device)] = math.nan
