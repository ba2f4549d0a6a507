"""A file with a layer's tensors, in the layout that they have in memory when the layer computes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

PAGE = 4096  # bytes; reads that bypass the page cache begin and end at whole pages
_ALIGNMENT = 256  # bytes; cuBLAS may choose another algorithm for operands that are aligned to less
PIECE = 1 << 23  # bytes that are read and checked at a time


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a file; `offset` is in bytes."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size of the tensor, in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """Return a view of the tensor in memory, uint8, that holds the file."""
        return memory[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class LayerFile:
    """One layer's file.

    Attributes:
        path: Path of the file.
        size: Size of the file in bytes, a multiple of `PAGE`.
        sums: `sum_of` each piece of the file.
        places: Place of each tensor, by its name in the layer.
    """

    path: Path
    size: int
    sums: tuple[int, ...]
    places: Mapping[str, Place]


def named(path: Path) -> str:
    """Return the name of a cache file for messages, which name no other folders of the machine."""
    return f"{path.parent.name}/{path.name} of the layer cache"


def remedy(path: Path) -> str:
    """Return the advice for a cache file that differs from the file that was written, for messages."""
    return f"stop the service, remove {path.parent.name} from the layer cache, and the next start writes it anew"


def places_of(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Place], int]:
    """Place tensors one after another, each aligned to 256 bytes; also return the total bytes, in whole pages."""
    places: dict[str, Place] = {}
    at = 0
    for name, tensor in tensors.items():
        at += -at % _ALIGNMENT
        places[name] = Place(at, tensor.dtype, tuple(tensor.shape))
        at += tensor.nbytes
    return places, at + -at % PAGE


def write_layer(path: Path, tensors: Mapping[str, Tensor]) -> LayerFile:
    """Write tensors to a new file and sync it to the disk.

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
    """Return the XXH3 of a piece, which detects changes of content and order at memory bandwidth."""
    return xxhash.xxh3_64_intdigest(piece)


def _bytes(memory: Tensor) -> memoryview:
    return memoryview(memory.numpy())  # type: ignore[arg-type]
