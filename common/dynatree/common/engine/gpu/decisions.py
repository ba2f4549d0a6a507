"""What a round decides, on the device: the target's choices, the accepted path, and its slots in their places.

The choices alone travel to the host, which draws the same conclusions from them (`dynatree.verify.accept`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.gpu.rows import RowBuffers
from dynatree.common.sampling import NOT_CHOSEN


def chosen(logits: Tensor, temperatures: Tensor, noise: Tensor | None) -> Tensor:
    """The token after each row, int64 `[rows]`, or `NOT_CHOSEN`: as `sampling.choose` by plain options.

    Args:
        logits: `[rows, vocabulary]`.
        temperatures: float32 `[rows]`; 0 for greedy.
        noise: float32 `[rows, vocabulary]`; None: all rows are greedy.
    """
    best = (logits if noise is None else ranking(logits, temperatures, noise)).max(-1)
    return best.indices.masked_fill(~best.values.isfinite(), NOT_CHOSEN)


def ranking(logits: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
    """What the choice maximises, float32 `[rows, vocabulary]`: as `sampling.scores` by plain options."""
    logits = logits.float()
    sampled = temperatures[:, None] > 0
    divisors = torch.where(sampled, temperatures[:, None], 1.0)
    perturbed = (logits - logits.amax(-1, keepdim=True)) / divisors + noise
    return torch.where(sampled, perturbed, logits)


def accepted(token_ids: Tensor, parents: Tensor, choices: Tensor) -> Tensor:
    """Which rows the target accepts: those that it chose after their parents, all of whose ancestors it accepts.

    DynaTree section 3.5, for all rows at once: each row asks twice as far up as in the step before.

    Args:
        token_ids: `[rows]`.
        parents: int64 `[rows]`; of a row that was not drafted itself, and such a row is accepted.
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


def put_in_place(arena: KVArena, buffers: RowBuffers, kept: Tensor) -> None:
    """Copy the keys and values of kept rows to the slots that committed tokens have; other rows' go to waste.

    Args:
        arena: It has a slot beyond its ranges, which nobody reads.
        buffers: Of the rows.
        kept: Bool `[rows]`.
    """
    target = torch.where(kept, buffers.homes, arena.size)
    data = arena.data
    # index_select copies first, so that no row overwrites what another is copied from
    data.index_copy_(3, target.long(), data.index_select(3, buffers.plan.slots))
