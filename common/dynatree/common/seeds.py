"""Seeds that are derived from one seed, by hashing, so that no two users of neighbouring seeds share their noise."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, *numbers: int) -> int:
    """A seed in [0, 2^64) for each seed and numbers, such as a prompt's.

    It is the BLAKE2b hash of 8 bytes, little-endian, of the numbers in decimal with commas between. A sum would give
    the second prompt of seed 0 and the first of seed 1 the same noise.
    """
    content = ",".join(map(str, (seed, *numbers))).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def completion_seed(seed: int, index: int) -> int:
    """The seed of one of a request's completions; the first keeps the request's own."""
    return derived_seed(seed, index) if index else seed
