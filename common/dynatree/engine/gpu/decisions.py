"""What the device decides by logits: a target's choices and accepted path, and a draft's best continuations.

A target's round copies only its choices to the host. The host derives the same accepted path from them
(`dynatree.verify.accept`). On a GPU, a decision is five launches and a ranking two. Greedy rows draw no noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynatree.common.sampling import NOT_CHOSEN
from dynatree.engine.gpu.rows import RowBuffers
from dynatree.engine.gpu.tree_attention import padded
from dynatree.engine.kv.kv_cache import KVCache
from dynatree.engine.sampling.device_noise import fill_noise
from dynatree.engine.sampling.gumbel import NoiseStream

_PART = 1024  # tokens of a row that a program reads; four times a power of two, because noise is drawn by fours
_ROWS = 256  # rows whose paths are walked at a time
_STREAM = int(NoiseStream.CHOICE)
FAULTY = NOT_CHOSEN - 1  # replaces the choice after a row whose key or value is not finite


def decide(logits: Tensor, buffers: RowBuffers, kv_cache: KVCache) -> Tensor:
    """Choose the token after each row, and move the keys and values of accepted rows to the slots of committed tokens.

    Args:
        logits: `[rows, vocabulary]`.
        buffers: Buffers of the rows.
        kv_cache: KV cache of the rows, with a spare slot beyond its ranges.

    Returns:
        int64 `[rows]`: `chosen`, or `FAULTY`.
    """
    of_rows = (buffers.token_ids, buffers.parents, buffers.plan.slots, buffers.homes)
    drawn = (buffers.temperatures, buffers.seeds, buffers.positions)
    choices: Tensor = torch.ops.dynatree.decide(logits, kv_cache.data, *of_rows, *drawn, buffers.faulty)
    return choices


@torch.library.custom_op("dynatree::decide", mutates_args={"data"})
def _decide(
    logits: Tensor,
    data: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    slots: Tensor,
    homes: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    faulty: Tensor,
) -> Tensor:
    if logits.is_cuda:
        choices = choices_by_triton(logits, temperatures, seeds, positions, faulty)
        move_by_triton(data, moves_by_triton(token_ids, parents, slots, homes, choices))
        return choices
    choices = chosen(logits, temperatures, _drawn(logits, temperatures, seeds, positions))
    choices.masked_fill_(faulty > 0, FAULTY)
    drafted = parents != torch.arange(len(parents), device=parents.device)
    kept = (accepted(token_ids, parents.long(), choices) & drafted).nonzero()[:, 0]
    # index_select copies first, so no row overwrites the source of another row
    data.index_copy_(3, homes[kept].long(), data.index_select(3, slots[kept]))
    return choices


@_decide.register_fake
def _(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.int64)


def rank(
    logits: Tensor, limits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, breadth: int
) -> tuple[Tensor, Tensor]:
    """Return the best continuations of each row and their log-probabilities, `[rows, breadth]` each.

    The first log-probability of a row is NaN if its best logit is not finite.

    Args:
        logits: `[rows, vocabulary]`.
        limits: int32 `[rows]`; only smaller tokens are continuations.
        temperatures: float32 `[rows]`; 0 means greedy.
        seeds: int64 `[rows]`.
        positions: `[rows]`; of the row's own token.
        breadth: Number of continuations.
    """
    ids, chances = torch.ops.dynatree.rank(logits, limits, temperatures, seeds, positions, breadth)
    return ids, chances


@torch.library.custom_op("dynatree::rank", mutates_args=())
def _rank(
    logits: Tensor, limits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, breadth: int
) -> tuple[Tensor, Tensor]:
    if logits.is_cuda:
        return ranks_by_triton(logits, limits, temperatures, seeds, positions, breadth)
    tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    ranks = logits.float().masked_fill(tokens >= limits[:, None], -torch.inf)
    noise = _drawn(ranks, temperatures, seeds, positions)
    if noise is not None:
        ranks = ranking(ranks, temperatures, noise)
    best = ranks.topk(breadth)
    return best.indices.int(), best.values - ranks.logsumexp(-1, keepdim=True)


@_rank.register_fake
def _(logits: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    shape = (len(logits), given[-1])
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def _drawn(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor | None:
    """Draw the noise of the next positions on a CPU; None if all rows are greedy."""
    if not (temperatures > 0).any():
        return None
    noise = torch.empty(logits.shape, dtype=torch.float32)
    fill_noise(noise, seeds, positions + 1, _STREAM)
    return noise


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


def choices_by_triton(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, faulty: Tensor | None = None
) -> Tensor:
    """Compute `chosen` with Triton kernels, which draw the noise of the next positions; `FAULTY` after faulty rows."""
    from dynatree.engine.gpu import choosing_kernels as kernels

    rows, vocab_size = logits.shape
    parts = -(-vocab_size // _PART)
    highest, best = logits.new_empty(2, rows, parts, dtype=torch.float32)
    places = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    choices = torch.empty(rows, dtype=torch.int64, device=logits.device)
    for noisy, scores in ((False, highest), (True, best)):
        kernels.best_of_parts[rows, parts](
            *(logits, highest, temperatures, seeds, positions, scores, places),
            *(vocab_size, logits.stride(0), _STREAM, parts),
            noisy=noisy,
            size=_PART,
            padded_parts=padded(parts),
            enable_fp_fusion=False,
        )
    kernels.choices_of_rows[rows,](
        *(best, places, faulty, choices, parts),
        none=NOT_CHOSEN,
        fault=FAULTY,
        padded_parts=padded(parts),
    )
    return choices


def moves_by_triton(token_ids: Tensor, parents: Tensor, slots: Tensor, homes: Tensor, choices: Tensor) -> Tensor:
    """List the moves of accepted rows, for `move_by_triton`.

    A row's home is before or at its slot, and the slots of a session's rows ascend, so no home is a later row's slot.
    """
    from dynatree.engine.gpu import choosing_kernels as kernels

    rows = len(token_ids)
    moves = torch.empty(1 + 2 * rows, dtype=torch.int32, device=token_ids.device)
    block = min(padded(rows), _ROWS)
    kernels.accepted_moves[1,](token_ids, parents, choices, slots, homes, moves, rows, block=block)
    return moves


def move_by_triton(data: Tensor, moves: Tensor) -> None:
    """Copy the slots of `moves`, the number of copies and then source and destination of each, one after the other."""
    from dynatree.engine.gpu import choosing_kernels as kernels

    *heads, _, dim = data.shape
    kernels.move_slots[torch.Size(heads).numel(),](
        data, moves, data.stride(2), dim=dim, padded_dim=padded(dim), num_warps=1
    )


def ranks_by_triton(
    logits: Tensor, limits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, breadth: int
) -> tuple[Tensor, Tensor]:
    """Compute `rank` with Triton kernels."""
    from dynatree.engine.gpu import choosing_kernels as kernels

    rows, vocab_size = logits.shape
    parts = -(-vocab_size // _PART)
    part_ids = torch.empty(rows, parts, breadth, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, parts, breadth, dtype=torch.float32, device=logits.device)
    bases, sums = logits.new_empty(2, rows, parts, dtype=torch.float32)
    kernels.ranked_parts[rows, parts](
        *(logits, limits, temperatures, seeds, positions, part_ids, values, bases, sums),
        *(vocab_size, logits.stride(0), _STREAM, parts),
        breadth=breadth,
        size=_PART,
        enable_fp_fusion=False,
    )
    ids = torch.empty(rows, breadth, dtype=torch.int32, device=logits.device)
    chances = torch.empty(rows, breadth, dtype=torch.float32, device=logits.device)
    kernels.merged_ranks[rows,](
        part_ids, values, bases, sums, ids, chances, parts, breadth=breadth, padded_parts=padded(parts)
    )
    return ids, chances
