"""The KV arena: keys and values of every session, in one preallocated tensor."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVShape:
    """The shape of one token's keys, and of its values; every layer has the same."""

    layers: int
    kv_heads: int
    head_dim: int


class KVArena:
    """`sessions` rows of `capacity` slots; a slot holds one token's key and value in every layer.

    A session owns one row. The row's first slots hold the session's committed tokens in order; speculative tokens sit
    behind them. Keys carry their rotary position, so a slot may be moved without changing its meaning.

    Invariant: every number in the arena is finite; zeros are stored in place of others. A mask gives a slot the weight
    0, and 0 times NaN is NaN: a rejected token, or another session's, may overflow in float16 and would spread.

    Attributes:
        shape: Of one token's keys and values.
        capacity: Slots of one row.
        dtype: Of keys and values.
        device: That holds them.
    """

    def __init__(self, shape: KVShape, sessions: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.capacity = capacity
        self.dtype = dtype
        self.device = device
        # [layer, key or value, row, head, slot, dim]
        self._data = _zeros((shape.layers, 2, sessions, shape.kv_heads, capacity, shape.head_dim), dtype, device)
        self._free = list(reversed(range(sessions)))

    @property
    def free_rows(self) -> int:
        """Rows that no session owns."""
        return len(self._free)

    def allocate(self) -> int | None:
        """A free row, or None when every row is owned."""
        return self._free.pop() if self._free else None

    def free(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)

    def write(self, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values `[kv_heads, n, head_dim]` of one layer in slots `start` to `start + n`."""
        stop = start + keys.shape[1]
        for slots, numbers in zip(self._data[layer, :, row, :, start:stop], (keys, values), strict=True):
            torch.nan_to_num(numbers.to(slots.dtype), nan=0.0, posinf=0.0, neginf=0.0, out=slots)

    def put(self, layer: int, row: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values `[kv_heads, n, head_dim]` of one layer in the slots of an index tensor `[n]`.

        Unlike `write` it runs no code that depends on the slots' values, so a CUDA graph can capture it.
        """
        for held, numbers in zip(self._data[layer, :, row], (keys, values), strict=True):
            held.index_copy_(1, slots, numbers.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))

    def read(self, layer: int, row: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's keys and values in slots 0 to `stop`, each `[kv_heads, stop, head_dim]`."""
        return self._data[layer, 0, row, :, :stop], self._data[layer, 1, row, :, :stop]

    def slots(self, row: int, stop: int) -> Tensor:
        """A view of slots 0 to `stop` in every layer: `[layers, 2, kv_heads, stop, head_dim]`."""
        return self._data[:, :, row, :, :stop]

    @torch.inference_mode()
    def move(self, row: int, sources: Sequence[int], start: int) -> None:
        """Copy the slots `sources`, in that order, to slots `start` onwards, in every layer at once."""
        in_place = 0
        while in_place < len(sources) and sources[in_place] == start + in_place:
            in_place += 1
        if in_place == len(sources):
            return
        index = torch.tensor(sources[in_place:], device=self.device)
        slots = self._data[:, :, row]  # [layers, 2, kv_heads, capacity, head_dim]
        # index_select copies first, so overlapping sources and targets are safe
        slots[:, :, :, start + in_place : start + len(sources)] = slots.index_select(3, index)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros, since slots that were never written are read by forwards of static shape.

    On a CPU the memory comes from an anonymous mapping, which the kernel fills page by page at the first write. Torch's
    own allocator may take huge pages, of which a first write fills 2 MiB.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
