"""A layer's tensors in one file, as they lie in memory when the layer computes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

PAGE = 4096  # bytes; what is read past the page cache begins and ends at whole pages
_LINE = 64  # bytes of the caches' lines
PIECE = 1 << 23  # bytes that are read and checked at a time


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
        sums: `sum_of` each piece of it.
        places: Of each tensor, by its name in the layer.
    """

    path: Path
    size: int
    sums: tuple[int, ...]
    places: Mapping[str, Place]


def named(path: Path) -> str:
    """A cache's file for messages, which name no other folders of the machine."""
    return f"{path.parent.name}/{path.name} of the layer cache"


def remedy(path: Path) -> str:
    """What to do about a cache's file that is not what was written, for messages."""
    return f"stop the service, remove {path.parent.name} from the layer cache, and the next start writes it anew"


def places_of(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Place], int]:
    """Where tensors lie one after the other, each at a line of the caches, and the bytes of all, in whole pages."""
    places: dict[str, Place] = {}
    at = 0
    for name, tensor in tensors.items():
        at += -at % _LINE
        places[name] = Place(at, tensor.dtype, tuple(tensor.shape))
        at += tensor.nbytes
    return places, at + -at % PAGE


def write_layer(path: Path, tensors: Mapping[str, Tensor]) -> LayerFile:
    """Write tensors to a new file, and to the disk.

    Raises:
        OSError: The disk is full, or fails.
    """
    places, size = places_of(tensors)
    at = 0
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            file.write(bytes(places[name].offset - at))
            file.write(_bytes(tensor.detach().contiguous().view(-1).view(torch.uint8)))
            at = places[name].offset + places[name].size
        file.write(bytes(size - at))
        file.flush()
        os.fsync(file.fileno())
    return LayerFile(path, size, tuple(_sums(path)), places)


def _sums(path: Path) -> Iterator[int]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield sum_of(memoryview(piece))


def sum_of(piece: memoryview) -> int:
    """XXH3 of a piece, by which any change is seen, also of order: as fast as memory is read."""
    return xxhash.xxh3_64_intdigest(piece)


def _bytes(memory: Tensor) -> memoryview:
    return memoryview(memory.numpy())  # type: ignore[arg-type]
