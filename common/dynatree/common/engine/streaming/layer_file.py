"""A layer's tensors in one file, as they lie in memory when the layer computes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

PAGE = 4096  # bytes; what is read past the page cache begins and ends at whole pages
_LINE = 64  # bytes of the caches' lines
_PIECE = 1 << 24  # bytes that are checked at a time


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file, in bytes."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """The tensor in memory that holds the file, uint8."""
        return memory[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class LayerFile:
    """One layer's file.

    Attributes:
        path: Of the file.
        size: Of it, in bytes; whole pages.
        checksum: CRC-32 of all of it.
        places: Of each tensor, by its name in the layer.
    """

    path: Path
    size: int
    checksum: int
    places: Mapping[str, Place]


def write_layer(path: Path, tensors: Mapping[str, Tensor]) -> LayerFile:
    """Write tensors to a new file, and to the disk.

    Raises:
        OSError: The disk is full, or fails.
    """
    places: dict[str, Place] = {}
    checksum = at = 0
    with path.open("wb") as file:

        def write(data: bytes | memoryview) -> None:
            nonlocal checksum, at
            file.write(data)
            checksum = crc32(data, checksum)
            at += len(data)

        for name, tensor in tensors.items():
            write(bytes(-at % _LINE))
            places[name] = Place(at, tensor.dtype, tuple(tensor.shape))
            write(_bytes(tensor.detach().contiguous().view(-1).view(torch.uint8)))
        write(bytes(-at % PAGE))
        file.flush()
        os.fsync(file.fileno())
    return LayerFile(path, at, checksum, places)


def checksum_of(memory: Tensor) -> int:
    """CRC-32 of memory that holds a file, uint8."""
    checksum = 0
    for start in range(0, len(memory), _PIECE):
        checksum = crc32(_bytes(memory[start : start + _PIECE]), checksum)
    return checksum


def _bytes(memory: Tensor) -> memoryview:
    return memoryview(memory.numpy())  # type: ignore[arg-type]
