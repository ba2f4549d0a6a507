"""Counter-based random numbers, and the Gumbel noise that is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor


class Stream(IntEnum):
    """Independent streams of random numbers under one seed."""

    CHOICE = 0
    DRAFT = 1
    RESIDUAL = 2


def gumbel(
    seed: int, position: int, vocab_size: int, stream: Stream = Stream.CHOICE, *, round_: int = 0, node: int = 0
) -> Tensor:
    """Standard Gumbel noise `[vocab_size]`, float32: Philox keyed by the seed, its counter by the position.

    The first `n` values do not depend on `vocab_size`, so models padded to different sizes share their noise.
    """
    uniform = random_generator(seed, position, stream, round_=round_, node=node).random(vocab_size)
    return torch.from_numpy(-np.log(-np.log(np.maximum(uniform, 2.0**-60)))).float()


def random_generator(
    seed: int, position: int, stream: Stream, *, round_: int = 0, node: int = 0
) -> np.random.Generator:
    """Random numbers that depend on these five alone.

    The seed and the node are Philox's key, and the others have a word of its counter each, so two that differ in any of
    them are independent. `node` is a number of 64 bits, as from `node_of`.
    """
    key = np.array((seed, node), dtype=np.uint64)
    counter = np.array((0, position, stream, round_), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def node_of(path: Iterable[int]) -> int:
    """A number of 64 bits for the node of a tree whose path from the root has these tokens.

    It is a hash (BLAKE2b). Two nodes of one round and depth share it with a probability of 2^-64.
    """
    return int.from_bytes(blake2b(np.array([*path], dtype="<i8").tobytes(), digest_size=8).digest(), "little")
