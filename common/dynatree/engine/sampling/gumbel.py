"""Counter-based random numbers, and Gumbel noise made from them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray
from torch import Tensor


class NoiseStream(IntEnum):
    """Independent streams of random numbers under one seed."""

    CHOICE = 0
    DRAFT = 1
    RESIDUAL = 2


def gumbel(
    seed: int,
    position: int,
    vocab_size: int,
    stream: NoiseStream = NoiseStream.CHOICE,
    *,
    round_: int = 0,
    node: int = 0,
) -> Tensor:
    """Draw standard Gumbel noise `[vocab_size]`, float32, from Philox with the seed as key and position as counter.

    The first `n` values do not depend on `vocab_size`, so models padded to different sizes share their noise.
    """
    uniform = random_generator(seed, position, stream, round_=round_, node=node).random(vocab_size)
    return torch.from_numpy(-np.log(-np.log(np.maximum(uniform, 2.0**-60)))).float()


def random_generator(
    seed: int, position: int, stream: NoiseStream, *, round_: int = 0, node: int = 0
) -> np.random.Generator:
    """Return a generator of random numbers that depend only on the five arguments.

    The seed and the node form Philox's key, and each other argument has its own word of the counter. So generators that
    differ in any argument are independent. `node` is a 64-bit number, as from `node_of`.
    """
    counter = np.array((0, position, stream, round_), dtype=np.uint64)
    key: Any = _Key(seed, node)  # NumPy's annotations name one of its classes only
    return np.random.Generator(np.random.Philox(key, counter=counter))


class _Key(ISeedSequence):
    """Gives Philox its key; with `key=`, NumPy would first read entropy that it does not use, for 5 microseconds."""

    def __init__(self, *words: int) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> NDArray[np.uint64]:
        return np.array(self._words, dtype=np.uint64)


def node_of(path: Iterable[int]) -> int:
    """Return a 64-bit number for the tree node whose path from the root has these tokens.

    The number is a BLAKE2b hash. Two nodes of the same round and depth collide with a probability of 2^-64.
    """
    return int.from_bytes(blake2b(np.array([*path], dtype="<i8").tobytes(), digest_size=8).digest(), "little")
