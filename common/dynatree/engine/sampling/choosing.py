"""Chooses the next token from logits: greedily, or by an exact seeded sample.

Logits are processed by the logit bias, the repetition, frequency and presence penalties, temperature, top-k, top-p and
min-p, in this order. The frequency and presence penalties follow OpenAI, and the other steps follow transformers'
processors. Greedy decoding takes the maximum of the processed logits. Sampling adds Gumbel noise first. The noise is
counter-based and keyed by (seed, position): the token at a position is `argmax(processed_logits + gumbel(seed,
position))`, an exact sample of the processed distribution. It depends only on the logits, the earlier tokens, the seed
and the position, so any draft, tree or batch gives the same tokens (drafter-invariant coupling, Daliri et al. 2024).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dynatree.common.sampling import NOT_CHOSEN, Sampling
from dynatree.engine.sampling.device_noise import fill_noise, seed_bits
from dynatree.engine.sampling.gumbel import NoiseStream, gumbel


@dataclass(frozen=True)
class TokenHistories:
    """The tokens before each row's choice: first the shared tokens of all rows, then each row's own tokens.

    The last `generated` shared tokens and all own tokens belong to the completion; the rest belong to the prompt.
    """

    shared: Sequence[int]
    own: Sequence[Sequence[int]]
    generated: int = 0

    def tokens(self, vocab_size: int) -> list[int]:
        """Return the sorted ids in the vocabulary of all tokens that precede any row's choice."""
        return sorted({token for tokens in (self.shared, *self.own) for token in tokens if token < vocab_size})

    def counts(self, tokens: Sequence[int], *, prompt: bool) -> Tensor:
        """Count `tokens` before each row's choice, float32 `[rows, tokens]`; without `prompt`, only generated ones."""
        shared = Counter(self.shared if prompt else self.shared[len(self.shared) - self.generated :])
        counts = np.tile(np.array([shared[token] for token in tokens], dtype=np.float32), (len(self.own), 1))
        columns = {token: column for column, token in enumerate(tokens)}
        for row, own in enumerate(self.own):
            for token in own:
                if token in columns:
                    counts[row, columns[token]] += 1
        return torch.from_numpy(counts)


def adjusted(logits: Tensor, sampling: Sampling, histories: TokenHistories | None = None) -> Tensor:
    """Return logits `[rows, vocabulary]` after the bias and the penalties; greedy decoding maximises these.

    The repetition penalty divides positive logits of earlier tokens and multiplies negative ones (Keskar et al. 2019,
    section 4.1). The frequency penalty is subtracted once for each time a token was generated. The presence penalty is
    subtracted once if a token was generated at all.
    """
    if not sampling.logit_bias and not sampling.needs_history:
        return logits
    logits = logits.to(torch.float32, copy=True)  # as generate() processes them
    if sampling.logit_bias:
        bias = {token: value for token, value in sampling.logit_bias.items() if token < logits.shape[-1]}
        logits[:, list(bias)] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    if sampling.needs_history:
        assert histories is not None, "a penalty needs the tokens before each choice"
        tokens = histories.tokens(logits.shape[-1])
        columns = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
        logits[:, columns] = _penalised(logits[:, columns], sampling, histories, tokens)
    return logits


def _penalised(logits: Tensor, sampling: Sampling, histories: TokenHistories, tokens: Sequence[int]) -> Tensor:
    """Return the logits of some tokens `[rows, tokens]` after the penalties."""
    if sampling.repetition_penalty != 1.0:
        seen = histories.counts(tokens, prompt=True).to(logits.device) > 0
        # a tensor, because a GPU multiplies by the reciprocal of a number: an infinite reciprocal turns 0 into NaN
        divisor = torch.full((1,), sampling.repetition_penalty, device=logits.device)
        penalised = torch.where(logits < 0, logits * sampling.repetition_penalty, logits / divisor)
        most = torch.finfo(logits.dtype).max  # a small penalty overflows, and inf - inf is NaN
        logits = torch.where(seen & logits.isfinite(), penalised.clamp(-most, most), logits)
    if sampling.counts_generated:
        counts = histories.counts(tokens, prompt=False).to(logits.device)
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return logits


def warped(logits: Tensor, sampling: Sampling) -> Tensor:
    """Divide adjusted logits by the temperature, then apply top-k, top-p and min-p: float32, -inf for excluded tokens.

    The logits are shifted first so that the largest is 0, and even the smallest temperature does not overflow.
    """
    logits = logits.float()
    # a tensor, because a GPU multiplies by the reciprocal of a number
    divisor = torch.full((1,), sampling.temperature, device=logits.device)
    logits = (logits - logits.amax(-1, keepdim=True)) / divisor
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if sampling.top_p < 1.0:
        ascending, order = logits.sort(dim=-1, descending=False)
        drop = ascending.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        drop[..., -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)
    if sampling.min_p > 0.0:
        probabilities = logits.softmax(-1)
        least = sampling.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -math.inf)
    return logits


def scores(
    logits: Tensor, positions: Sequence[int], sampling: Sampling, histories: TokenHistories | None = None
) -> Tensor:
    """Return the scores that the choice maximises: adjusted logits, or warped logits with noise.

    Args:
        logits: `[rows, vocabulary]`, any float dtype.
        positions: The sequence position that each row chooses a token for, `[rows]`.
        sampling: Sampling options.
        histories: The tokens before each choice; required if a penalty needs them.

    Returns:
        `[rows, vocabulary]`; float32 unless greedy.
    """
    logits = adjusted(logits, sampling, histories)
    if sampling.greedy:
        return logits
    return warped(logits, sampling) + noise(logits, positions, sampling.seed, NoiseStream.CHOICE)


def choose(
    logits: Tensor, positions: Sequence[int], sampling: Sampling, histories: TokenHistories | None = None
) -> list[int]:
    """Choose a token for each row of `logits` `[rows, vocabulary]`. Ties go to the lowest id, as in `generate()`.

    The choice is `NOT_CHOSEN` if the best score is not finite. NaN counts as the best, so a single NaN in a row is
    enough.
    """
    best = scores(logits, positions, sampling, histories).max(-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [token if math.isfinite(score) else NOT_CHOSEN for token, score in pairs]


def noise(logits: Tensor, positions: Sequence[int], seed: int, stream: NoiseStream) -> Tensor:
    """Return Gumbel noise with the shape `[rows, vocabulary]` of `logits`, one row for each position."""
    device = logits.device
    if device.type != "cuda":
        rows = {position: gumbel(seed, position, logits.shape[-1], stream) for position in set(positions)}
        return torch.stack([rows[position] for position in positions]).to(device)
    drawn = torch.empty(logits.shape, dtype=torch.float32, device=device)
    seeds = torch.full((len(positions),), seed_bits(seed), device=device)
    fill_noise(drawn, seeds, torch.tensor(positions, dtype=torch.int64, device=device), stream)
    return drawn
