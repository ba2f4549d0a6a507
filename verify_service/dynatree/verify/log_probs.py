"""Log-probabilities under the target's softmax, masked by the grammar, before any sampling option is applied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynatree.common.log_probs import TopLogProbs

LEAST_LOG_PROB = -9999.0  # of a token that the grammar forbids, as in OpenAI's API
_ROWS = 64  # rows per chunk: a float32 copy of a whole prompt's logits would take hundreds of megabytes


def log_probs_of(logits: Tensor, token_ids: Sequence[int], top: int) -> tuple[tuple[float, ...], TopLogProbs]:
    """Natural log-probabilities of tokens, each under the logits at its own position.

    Args:
        logits: Logits `[positions, vocabulary]`, any float dtype.
        token_ids: Token at each position, `[positions]`.
        top: Number of the likeliest tokens to return at each position.

    Returns:
        The log-probability of each position's token; and for each position the `top` likeliest tokens (at most the
        vocabulary) with their log-probabilities, likeliest first, lowest id first among equals. The second value is
        empty if `top` is 0.
    """
    values: list[float] = []
    likeliest: list[tuple[tuple[int, float], ...]] = []
    tokens = torch.tensor(token_ids, dtype=torch.long, device=logits.device)
    for start in range(0, len(token_ids), _ROWS):
        rows, chosen = logits[start : start + _ROWS].float(), tokens[start : start + _ROWS]
        log_probs = rows.log_softmax(-1).clamp(min=LEAST_LOG_PROB)  # [rows, vocabulary]; NaN stays
        values += log_probs.gather(-1, chosen[:, None])[:, 0].tolist()
        if top:
            ids = _likeliest(rows, min(top, rows.shape[-1]))
            named = zip(ids.tolist(), log_probs.gather(-1, ids).tolist(), strict=True)
            likeliest += [tuple(zip(*each, strict=True)) for each in named]
    return tuple(values), tuple(likeliest)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest logits of each row, `[rows, count]`, largest first, lowest id first among equals.

    `topk` determines the smallest of these logits, but chooses arbitrarily among logits that equal it. NaN counts as
    the largest.
    """
    largest = logits.topk(count, dim=-1).values
    least = largest[:, -1:]  # [rows, 1]
    if not bool(largest.isfinite().all()):  # minus infinity: a grammar allows fewer tokens, and all others are equal
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    row, ids = (logits >= least).nonzero().unbind(1)  # at least `count` per row, sorted by row and id
    order = logits[row, ids].sort(descending=True, stable=True).indices
    order = order[row[order].sort(stable=True).indices]  # sorted by row, then by descending logit, then by id
    counts = row.bincount(minlength=len(logits))
    starts = counts.cumsum(0) - counts
    return ids[order[starts[:, None] + torch.arange(count, device=logits.device)]]
