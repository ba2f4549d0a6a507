"""What the tokens of a segment see in a layer whose queries do not see all earlier tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.locality import Locality


def narrowed(segment: Segment, locality: Locality) -> tuple[Tensor | None, Tensor]:
    """Return what the tokens of a segment see of its slots under a locality.

    A slot before the mask's columns holds the token of its own position. Each later token of a path has the position
    after its parent's. So a column's position follows from the number of visible columns after it.

    Returns:
        The mask without the columns that lie below a token's lowest position (None if the segment has no mask), and
        the lowest slot before the mask's columns that each token sees, int64 `[n]`.
    """
    positions = torch.tensor(segment.positions, dtype=torch.int64)
    lowest = locality.lowest(positions)
    if segment.mask is None:
        return None, lowest
    behind = segment.mask.flip(1).cumsum(1).flip(1)  # visible columns from each column on, itself included
    return segment.mask & (positions[:, None] - behind + 1 >= lowest[:, None]), lowest
