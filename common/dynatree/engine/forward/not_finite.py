"""NaN and infinity: in weights they are refused, and in keys and values they turn the dependent logits into NaN.

The KV cache stores zeros in place of such keys and values (`KVCache`), so an overflow or a broken device would not
show in the logits. This module sets the logits that depend on them to NaN, so that no token is chosen from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from dynatree.common.errors import StartupError
from dynatree.engine.forward.segment import Segment

_PIECE = 1 << 20  # numbers converted at a time


def check_weights(model: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights that are not finite; a probe does not use every weight, but a prompt may.

    Raises:
        StartupError: A weight is not finite and is not a bias that masks tokens; the message names it.
    """
    for name, weight in weights:
        local = getattr(weight, "to_local", None)  # a DTensor: each rank checks its own part
        own: Tensor = local() if local else weight
        if own.is_floating_point() and not own.is_meta and not _is_finite(own, may_mask=name.endswith("bias")):
            raise StartupError(f"model {model} cannot be served: its weight {name} holds NaN or infinity")


def _is_finite(weight: Tensor, *, may_mask: bool) -> bool:
    """Check the minimum and maximum, at memory bandwidth. A bias may be minus infinity, which masks a token."""
    if not weight.numel():
        return True
    if weight.dtype.itemsize == 1:  # torch has no `aminmax` of float8
        pieces: tuple[Tensor, ...] = weight.flatten().split(_PIECE)  # type: ignore[no-untyped-call]
        return all(_is_finite(piece.float(), may_mask=may_mask) for piece in pieces)
    least, largest = (each.item() for each in weight.aminmax())
    return math.isfinite(largest) and (math.isfinite(least) or (may_mask and least == -math.inf))


def spoil(segments: Sequence[Segment], logits: Sequence[Tensor], faulty: Sequence[int]) -> None:
    """Set to NaN the logits of tokens that see a token with non-finite keys or values.

    The tokens of a causal segment are committed, so all later tokens of the session see them. Therefore the KV range of
    such a segment is marked as broken.

    Args:
        segments: Segments of a forward pass.
        logits: For each segment, the logits of the tokens that it keeps, `[kept, vocabulary]`; changed in place.
        faulty: Places of the tokens with non-finite keys or values, in the row of all segments' tokens.
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
