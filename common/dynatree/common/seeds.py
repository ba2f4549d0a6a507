"""Seeds derived from one seed by hashing, so that neighbouring seeds do not share their noise."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, *numbers: int) -> int:
    """A seed in [0, 2^64) derived from a seed and further numbers, such as a prompt's index.

    It is the 8-byte BLAKE2b hash, read as little-endian, of the numbers in decimal separated by commas. A sum would
    give the second prompt of seed 0 and the first prompt of seed 1 the same noise.
    """
    content = ",".join(map(str, (seed, *numbers))).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def completion_seed(seed: int, index: int) -> int:
    """The seed of the completion `index` of a request; the first completion keeps the request's seed."""
    return derived_seed(seed, index) if index else seed
