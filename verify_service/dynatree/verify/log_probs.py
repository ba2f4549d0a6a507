"""Log-probabilities under the target's own softmax, before any option."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynatree.common.log_probs import TopLogProbs

_ROWS = 64  # at a time: float32 copies of a whole prompt's logits would take hundreds of megabytes


def log_probs_of(logits: Tensor, token_ids: Sequence[int], top: int) -> tuple[tuple[float, ...], TopLogProbs]:
    """Natural log-probabilities of some tokens, each under the logits of its own place.

    Args:
        logits: `[places, vocabulary]`, any float dtype.
        token_ids: The token in each place, `[places]`.
        top: How many of the likeliest tokens to name in each place.

    Returns:
        For each place its token's log-probability, and the `top` likeliest tokens with theirs, likeliest first; of
        equally likely ones the lowest ids. There are none where `top` is 0, and never more than the vocabulary has.
    """
    values: list[float] = []
    likeliest: list[tuple[tuple[int, float], ...]] = []
    tokens = torch.tensor(token_ids, dtype=torch.long, device=logits.device)
    for start in range(0, len(token_ids), _ROWS):
        rows, chosen = logits[start : start + _ROWS].float(), tokens[start : start + _ROWS]
        log_probs = rows.log_softmax(-1)  # [rows, vocabulary]
        values += log_probs.gather(-1, chosen[:, None])[:, 0].tolist()
        if top:
            ids = _likeliest(rows, min(top, rows.shape[-1]))
            named = zip(ids.tolist(), log_probs.gather(-1, ids).tolist(), strict=True)
            likeliest += [tuple(zip(*each, strict=True)) for each in named]
    return tuple(values), tuple(likeliest)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """The ids of the largest logits of each row `[rows, count]`, largest first; of equal ones the lowest ids.

    `topk` says which logit is the smallest of them, but takes any of those that equal it.
    """
    least = logits.topk(count, dim=-1).values[:, -1:]  # [rows, 1]
    row, ids = (logits >= least).nonzero().unbind(1)  # `count` of each row or more, by row and id
    order = logits[row, ids].sort(descending=True, stable=True).indices
    order = order[row[order].sort(stable=True).indices]  # by row, then the largest first, then by id
    counts = row.bincount(minlength=len(logits))
    starts = counts.cumsum(0) - counts
    return ids[order[starts[:, None] + torch.arange(count, device=logits.device)]]
