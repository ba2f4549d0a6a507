"""How the next token is chosen from logits: greedy, or an exact seeded sample.

Logits go through the logit bias, the repetition, frequency and presence penalties, temperature, top-k, top-p and min-p,
in this order: the frequency and presence penalties as OpenAI has them, all else by the rules of transformers'
processors. What comes out is maximised: as it is when greedy, and otherwise with Gumbel noise added. The noise is
counter-based and keyed by (seed, position): the token at a position is `argmax(processed_logits + gumbel(seed,
position))`, an exact sample of the processed distribution. It depends on nothing but the logits, the tokens before it,
the seed and the position, so any draft, tree or batch gives the same tokens (drafter-invariant coupling, Daliri et al.
2024).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from dynatree.common.device_noise import fill_noise, seed_bits
from dynatree.common.errors import InvalidArgumentError
from dynatree.common.gumbel import Stream, gumbel
from dynatree.common.limits import MAX_TEMPERATURE

MAX_PENALTY = 100.0  # of repetition
MAX_COUNT_PENALTY = 2.0  # of frequency and presence, as OpenAI has it
MAX_BIAS = 1000.0
MAX_BIASES = 1024
NOT_CHOSEN = -1  # in place of a token, where the best score is NaN or infinite


class Scheme(Enum):
    """How draft and target draw when the temperature is above 0; values as in `SamplingScheme` of tree.proto."""

    GUMBEL = 1
    INDEPENDENT = 2
    RESIDUAL = 3


@dataclass(frozen=True)
class Sampling:
    """Options of the next token's choice; every default means greedy.

    Raises:
        InvalidArgumentError: An option is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    scheme: Scheme = Scheme.GUMBEL

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0 <= self.temperature <= MAX_TEMPERATURE, f"[0, {MAX_TEMPERATURE:g}]")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "(0, 1]")
        _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "[0, 1]")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 0.0 < penalty <= MAX_PENALTY, f"(0, {MAX_PENALTY:g}]")
        for name in ("frequency_penalty", "presence_penalty"):
            penalty = getattr(self, name)
            _check(name, penalty, abs(penalty) <= MAX_COUNT_PENALTY, f"[{-MAX_COUNT_PENALTY:g}, {MAX_COUNT_PENALTY:g}]")
        if self.top_k < 0:
            raise InvalidArgumentError(f"top_k is {self.top_k}, expected 0 (off) or a positive number")
        if not 0 <= self.seed < 2**64:
            raise InvalidArgumentError(f"seed is {self.seed}, expected a number in [0, 2^64)")
        check_biases(len(self.logit_bias))
        for token, bias in self.logit_bias.items():
            _check(f"logit_bias[{token}]", bias, abs(bias) <= MAX_BIAS, f"[{-MAX_BIAS:g}, {MAX_BIAS:g}]")

    @property
    def greedy(self) -> bool:
        """Whether the choice is the argmax, without noise."""
        return self.temperature == 0.0

    @property
    def residual(self) -> bool:
        """Whether children are drawn, and accepted or replaced from the residual, instead of coupled."""
        return not self.greedy and self.scheme is Scheme.RESIDUAL

    @property
    def is_plain(self) -> bool:
        """Whether the choice is the argmax of the logits, or of those over the temperature with noise, and no more."""
        return not (
            self.residual
            or self.needs_history
            or self.logit_bias
            or (not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0))
        )

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return self.repetition_penalty != 1.0 or self.counts_generated

    @property
    def counts_generated(self) -> bool:
        """Whether the choice depends on how often tokens were generated."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def check_tokens(self, vocab_size: int) -> None:
        """Refuse a bias of a token that the model does not have.

        Raises:
            InvalidArgumentError: `logit_bias` names an id that is not in [0, vocab_size).
        """
        for token in self.logit_bias:
            if token >= vocab_size:
                raise InvalidArgumentError(
                    f"logit_bias names token {token}, the model's vocabulary is [0, {vocab_size})"
                )


def check_biases(count: int) -> None:
    """Refuse more biases than are accepted.

    Raises:
        InvalidArgumentError: There are more.
    """
    if count > MAX_BIASES:
        raise InvalidArgumentError(f"logit_bias has {count} entries, at most {MAX_BIASES} are accepted")


@dataclass(frozen=True)
class Histories:
    """The tokens before each row's choice: those that all rows share, and each row's own after them.

    The last `generated` of the shared ones, and all of a row's own, are the completion's; the others are the prompt's.
    """

    shared: Sequence[int]
    own: Sequence[Sequence[int]]
    generated: int = 0

    def tokens(self, vocab_size: int) -> list[int]:
        """The tokens of the vocabulary that came before any row's choice, by their ids."""
        return sorted({token for tokens in (self.shared, *self.own) for token in tokens if token < vocab_size})

    def counts(self, tokens: Sequence[int], *, prompt: bool) -> Tensor:
        """How often each of `tokens` came before each row's choice, in the prompt or not: float32 `[rows, tokens]`."""
        shared = Counter(self.shared if prompt else self.shared[len(self.shared) - self.generated :])
        counts = np.tile(np.array([shared[token] for token in tokens], dtype=np.float32), (len(self.own), 1))
        columns = {token: column for column, token in enumerate(tokens)}
        for row, own in enumerate(self.own):
            for token in own:
                if token in columns:
                    counts[row, columns[token]] += 1
        return torch.from_numpy(counts)


def adjusted(logits: Tensor, sampling: Sampling, histories: Histories | None = None) -> Tensor:
    """Logits `[rows, vocabulary]` after the bias and the penalties: what greedy decoding maximises.

    The repetition penalty divides positive logits of tokens that came before and multiplies negative ones (Keskar et
    al. 2019, section 4.1). The other two are subtracted: frequency as often as a token was generated, presence once.
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


def _penalised(logits: Tensor, sampling: Sampling, histories: Histories, tokens: Sequence[int]) -> Tensor:
    """The logits of some tokens `[rows, tokens]` after the penalties."""
    if sampling.repetition_penalty != 1.0:
        seen = histories.counts(tokens, prompt=True).to(logits.device) > 0
        # a tensor, as of the temperature: the reciprocal of a small penalty is infinite, and makes NaN of 0
        divisor = torch.full((1,), sampling.repetition_penalty, device=logits.device)
        penalised = torch.where(logits < 0, logits * sampling.repetition_penalty, logits / divisor)
        most = torch.finfo(logits.dtype).max  # a small penalty overflows, and two infinities have no difference
        logits = torch.where(seen & logits.isfinite(), penalised.clamp(-most, most), logits)
    if sampling.counts_generated:
        counts = histories.counts(tokens, prompt=False).to(logits.device)
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return logits


def warped(logits: Tensor, sampling: Sampling) -> Tensor:
    """Adjusted logits over the temperature, then top-k, top-p and min-p: float32, -inf where a token is ruled out.

    Shifted so that the largest is 0: the smallest temperature overflows nothing.
    """
    logits = logits.float()
    # a tensor, since a GPU multiplies by the reciprocal of a number
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


def scores(logits: Tensor, positions: Sequence[int], sampling: Sampling, histories: Histories | None = None) -> Tensor:
    """What the choice maximises: adjusted logits, or warped ones with noise.

    Args:
        logits: `[rows, vocabulary]`, any float dtype.
        positions: The sequence position that each row chooses a token for, `[rows]`.
        sampling: The options.
        histories: The tokens before each choice, where the options ask for them.

    Returns:
        `[rows, vocabulary]`; float32 unless greedy.
    """
    logits = adjusted(logits, sampling, histories)
    if sampling.greedy:
        return logits
    return warped(logits, sampling) + noise(logits, positions, sampling.seed, Stream.CHOICE)


def choose(
    logits: Tensor, positions: Sequence[int], sampling: Sampling, histories: Histories | None = None
) -> list[int]:
    """The chosen token of each row of `logits` `[rows, vocabulary]`. Ties go to the lowest id, as in `generate()`.

    It is `NOT_CHOSEN` where the best score is not finite. NaN counts as the best, so one of them in a row is enough.
    """
    best = scores(logits, positions, sampling, histories).max(-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [token if math.isfinite(score) else NOT_CHOSEN for token, score in pairs]


def noise(logits: Tensor, positions: Sequence[int], seed: int, stream: Stream) -> Tensor:
    """Gumbel noise of the shape `[rows, vocabulary]` of `logits`, one row for each position."""
    device = logits.device
    if device.type != "cuda":
        rows = {position: gumbel(seed, position, logits.shape[-1], stream) for position in set(positions)}
        return torch.stack([rows[position] for position in positions]).to(device)
    drawn = torch.empty(logits.shape, dtype=torch.float32, device=device)
    seeds = torch.full((len(positions),), seed_bits(seed), device=device)
    fill_noise(drawn, seeds, torch.tensor(positions, dtype=torch.int64, device=device), stream)
    return drawn


def _check(name: str, value: float, holds: bool, expected: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"{name} is {value:g}, expected a number in {expected}")
