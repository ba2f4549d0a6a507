"""How the next token is chosen from logits: greedy, or an exact seeded sample.

Sampling is drawn by Gumbel-max with counter-based noise keyed by (seed, position): the token at a position is
`argmax(processed_logits + gumbel(seed, position))`, an exact sample of the processed distribution. It depends on
nothing but the logits, the seed and the position, so any draft, tree or batch gives the same tokens
(drafter-invariant coupling, Daliri et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dynatree.common.errors import InvalidArgumentError
from dynatree.v1 import tree_pb2

MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class Sampling:
    """Options of the next token's choice; every default means greedy.

    Raises:
        InvalidArgumentError: An option is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidArgumentError(
                f"temperature is {self.temperature:g}, expected a number in [0, {MAX_TEMPERATURE:g}]"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgumentError(f"top_p is {self.top_p:g}, expected a number in (0, 1]")
        if self.top_k < 0:
            raise InvalidArgumentError(f"top_k is {self.top_k}, expected 0 (off) or a positive number")
        if not 0 <= self.seed < 2**64:
            raise InvalidArgumentError(f"seed is {self.seed}, expected a number in [0, 2^64)")

    @property
    def greedy(self) -> bool:
        """Whether the choice is the plain argmax."""
        return self.temperature == 0.0

    @classmethod
    def from_pb(cls, message: tree_pb2.SamplingOptions, *, default_seed: int) -> Sampling:
        """Options from a message; `default_seed` where it names none."""
        return cls(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            seed=message.seed if message.HasField("seed") else default_seed,
        )

    def to_pb(self) -> tree_pb2.SamplingOptions:
        """The message that carries these options."""
        return tree_pb2.SamplingOptions(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed
        )


def scores(logits: Tensor, positions: Sequence[int], sampling: Sampling) -> Tensor:
    """What the choice maximises: the logits themselves, or the processed and perturbed ones.

    Args:
        logits: `[rows, vocabulary]`, any float dtype.
        positions: The sequence position that each row chooses a token for, `[rows]`.
        sampling: The options.

    Returns:
        `[rows, vocabulary]`; the input itself when greedy, float32 otherwise.
    """
    if sampling.greedy:
        return logits
    processed = _truncate(tempered(logits, sampling), sampling)
    noise = {position: gumbel(sampling.seed, position, logits.shape[-1]) for position in set(positions)}
    return processed + torch.stack([noise[position] for position in positions]).to(logits.device)


def tempered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits over the temperature, shifted so that the largest is 0: the smallest temperature overflows nothing."""
    logits = logits.float()
    return (logits - logits.amax(-1, keepdim=True)) / sampling.temperature


def choose(logits: Tensor, positions: Sequence[int], sampling: Sampling) -> list[int]:
    """The chosen token of each row of `logits` `[rows, vocabulary]`. Ties go to the lowest id, as in `generate()`."""
    tokens: list[int] = scores(logits, positions, sampling).argmax(-1).tolist()
    return tokens


def gumbel(seed: int, position: int, vocab_size: int) -> Tensor:
    """Standard Gumbel noise `[vocab_size]`, float32: Philox keyed by the seed, its counter by the position.

    The first `n` values do not depend on `vocab_size`, so models padded to different sizes share their noise.
    """
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=position << 64)).random(vocab_size)
    return torch.from_numpy(-np.log(-np.log(np.maximum(uniform, 2.0**-60)))).float()


def _truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, then top-p, in the order and with the tie rules of transformers' logits processors."""
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if sampling.top_p < 1.0:
        ascending, order = logits.sort(dim=-1, descending=False)
        drop = ascending.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        drop[..., -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)
    return logits
