"""The decision of a round on the device: the target's choices, the accepted path, and the move of its KV slots.

Only the choices are copied to the host, which derives the same accepted path from them (`dynatree.verify.accept`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynatree.common.sampling import NOT_CHOSEN
from dynatree.engine.gpu.rows import RowBuffers
from dynatree.engine.kv.kv_cache import KVCache


def chosen(logits: Tensor, temperatures: Tensor, noise: Tensor | None) -> Tensor:
    """Choose the token after each row, int64 `[rows]`, or `NOT_CHOSEN`, like `sampling.choose` with plain options.

    Args:
        logits: `[rows, vocabulary]`.
        temperatures: float32 `[rows]`; 0 means greedy.
        noise: float32 `[rows, vocabulary]`; None means that all rows are greedy.
    """
    best = (logits if noise is None else ranking(logits, temperatures, noise)).max(-1)
    return best.indices.masked_fill(~best.values.isfinite(), NOT_CHOSEN)


def ranking(logits: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
    """Return the scores that the choice maximises, float32 `[rows, vocabulary]`; see `sampling.scores`."""
    logits = logits.float()
    sampled = temperatures[:, None] > 0
    divisors = torch.where(sampled, temperatures[:, None], 1.0)
    perturbed = (logits - logits.amax(-1, keepdim=True)) / divisors + noise
    return torch.where(sampled, perturbed, logits)


def accepted(token_ids: Tensor, parents: Tensor, choices: Tensor) -> Tensor:
    """Find the rows that the target accepts: it chose the row after its parent, and accepts all ancestors.

    This is DynaTree section 3.5 for all rows at once, by pointer doubling: each step looks twice as far up the tree.

    Args:
        token_ids: `[rows]`.
        parents: int64 `[rows]`; the parent of an undrafted row is the row itself, which is always accepted.
        choices: `[rows]`, from `chosen`.

    Returns:
        Bool `[rows]`.
    """
    own = torch.arange(len(parents), device=parents.device)
    holds = (token_ids == choices[parents]) | (parents == own)
    reached = 1
    while reached < len(parents):
        holds = holds & holds[parents]
        parents = parents[parents]
        reached *= 2
    return holds


def put_in_place(kv_cache: KVCache, buffers: RowBuffers, kept: Tensor) -> None:
    """Copy the keys and values of kept rows to the slots of committed tokens, and those of other rows to a spare slot.

    Args:
        kv_cache: KV cache with a spare slot beyond its ranges, which is never read.
        buffers: Buffers of the rows.
        kept: Bool `[rows]`.
    """
    destination = torch.where(kept, buffers.homes, kv_cache.size)
    data = kv_cache.data
    # index_select copies first, so no row overwrites the source of another row
    data.index_copy_(3, destination.long(), data.index_select(3, buffers.plan.slots))
