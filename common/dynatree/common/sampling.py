"""Sampling options for the choice of the next token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MAX_TEMPERATURE

MAX_PENALTY = 100.0  # repetition penalty
MAX_COUNT_PENALTY = 2.0  # frequency and presence penalty, as in OpenAI's API
MAX_BIAS = 1000.0
MAX_BIASES = 1024
NOT_CHOSEN = -1  # replaces a token if the best score is NaN or infinite


class Scheme(Enum):
    """How draft and target sample at a temperature above 0; values as in `SamplingScheme` of tree.proto."""

    GUMBEL = 1
    INDEPENDENT = 2
    RESIDUAL = 3


@dataclass(frozen=True)
class Sampling:
    """Sampling options for the choice of the next token; the defaults mean greedy decoding.

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
        """Whether drawn children are verified by residual sampling, instead of compared with the target's choice."""
        return not self.greedy and self.scheme is Scheme.RESIDUAL

    @property
    def is_plain(self) -> bool:
        """Whether the choice is a plain argmax: of the logits, or of logits / temperature plus noise."""
        return not (
            self.residual
            or self.needs_history
            or self.logit_bias
            or (not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0))
        )

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.counts_generated

    @property
    def counts_generated(self) -> bool:
        """Whether the choice depends on how often each token was generated."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def check_tokens(self, vocab_size: int) -> None:
        """Refuse a bias for a token outside the model's vocabulary.

        Raises:
            InvalidArgumentError: `logit_bias` names an id that is not in [0, vocab_size).
        """
        for token in self.logit_bias:
            if token >= vocab_size:
                raise InvalidArgumentError(
                    f"logit_bias names token {token}, the model's vocabulary is [0, {vocab_size})"
                )


def check_biases(count: int) -> None:
    """Refuse more logit biases than `MAX_BIASES`.

    Raises:
        InvalidArgumentError: There are too many.
    """
    if count > MAX_BIASES:
        raise InvalidArgumentError(f"logit_bias has {count} entries, at most {MAX_BIASES} are accepted")


def _check(name: str, value: float, holds: bool, expected: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"{name} is {value:g}, expected a number in {expected}")
