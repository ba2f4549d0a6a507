"""The tree attention mask (DynaTree section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Return the ancestor mask of a tree: bool `[1 + nodes, 1 + nodes]`, with the root in row and column 0.

    An entry is true if the column is the row's node or one of its ancestors (DynaTree section 3.4, matrix A without its
    prefix columns).

    Args:
        parents: Each node's parent, an earlier node or -1 for the root, as in `TokenTree.parents`.
    """
    size = len(parents) + 1
    mask = torch.eye(size, dtype=torch.bool)
    rows = mask.numpy()  # shares memory; row assignment is faster in numpy
    for node, parent in enumerate(parents, start=1):
        rows[node] |= rows[parent + 1]
    return mask
