"""The KV arena: keys and values of every session in one preallocated tensor."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVShape:
    """What one token's keys and values look like, the same in every layer."""

    layers: int
    kv_heads: int
    head_dim: int


class KVArena:
    """`sessions` rows of `capacity` slots; a slot holds one token's key and value in every layer.

    A session owns one row. Its first slots are its committed tokens in order; speculative tokens sit behind them.
    Keys carry their rotary position, so a slot may be moved without changing what it says.

    Every number in it is finite. A mask keeps a slot's numbers out of attention, but no NaN, and in float16 a token
    that is not accepted, or another session's, may overflow: then zeros are stored.
    """

    def __init__(self, shape: KVShape, sessions: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.capacity = capacity
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
        """Store keys and values `[kv_heads, n, head_dim]` of one layer in the slots of an index tensor `[n]`."""
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
        index = torch.tensor(sources[in_place:], device=self._data.device)
        slots = self._data[:, :, row]
        # index_select copies first, so overlapping sources and targets are safe
        slots[:, :, :, start + in_place : start + len(sources)] = slots.index_select(3, index)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: static shapes read slots that were never written.

    On a CPU, memory that is paid for page by page as it is first written; torch's own may come in huge pages.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
