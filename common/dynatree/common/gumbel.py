"""Counter-based random numbers, and the Gumbel noise that is made of them."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class Stream(IntEnum):
    """Independent streams of random numbers under one seed."""

    CHOICE = 0
    DRAFT = 1
    RESIDUAL = 2


def gumbel(seed: int, position: int, vocab_size: int, stream: Stream = Stream.CHOICE, round_: int = 0) -> Tensor:
    """Standard Gumbel noise `[vocab_size]`, float32: Philox keyed by the seed, its counter by the position.

    The first `n` values do not depend on `vocab_size`, so models padded to different sizes share their noise.
    """
    uniform = random_generator(seed, position, stream, round_).random(vocab_size)
    return torch.from_numpy(-np.log(-np.log(np.maximum(uniform, 2.0**-60)))).float()


def random_generator(seed: int, position: int, stream: Stream, round_: int = 0) -> np.random.Generator:
    """Random numbers that depend on these four alone: each has its own part of Philox's 256-bit counter."""
    key = np.array((seed, 0), dtype=np.uint64)
    counter = np.array((0, position, stream, round_), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
