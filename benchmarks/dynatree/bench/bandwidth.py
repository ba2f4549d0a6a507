"""Measure the rate at which a device reads its memory; no decoding step is faster than reading the weights once."""

from __future__ import annotations

import os
import time

import torch

from dynatree.engine.model.tokenizer import first_line

_BYTES = 1 << 30  # far beyond any cache
_SHARE = 8  # at most 1 / 8 of the machine's memory
_TRIES = 5


def read_bandwidth(device: str | None) -> float:
    """Bytes per second of a sum over 1 GiB (less if memory is short) by all of torch's threads, the best of five.

    Args:
        device: A torch device; None means a GPU if there is one.

    Raises:
        SystemExit: The device cannot be used.
    """
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = min(_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE)
    try:
        numbers = torch.ones(size // torch.float32.itemsize, device=place)
    except RuntimeError as error:
        raise SystemExit(f"device {place} cannot be used: {first_line(error)}") from None
    return size / min(_seconds(numbers) for _ in range(_TRIES))


def _seconds(numbers: torch.Tensor) -> float:
    started = time.perf_counter()
    numbers.sum().item()
    return time.perf_counter() - started
