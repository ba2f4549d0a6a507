"""The KV arena: keys and values of every session, in one preallocated pool of slots."""

from __future__ import annotations

import math
import mmap
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynatree.common.kv_range import KVRange


@dataclass(frozen=True)
class KVShape:
    """The shape of one token's keys, and of its values; every layer has the same."""

    layers: int
    kv_heads: int
    head_dim: int

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


class KVArena:
    """A pool of slots; a slot holds one token's key and value in every layer. A session owns one contiguous range.

    Keys carry their rotary position, so a slot may be moved without changing its meaning.

    Invariant: every number in the arena is finite; zeros are stored in place of others. A mask gives a slot the weight
    0, and 0 times NaN is NaN: a rejected token, or another session's, may overflow in float16 and would spread. What
    depends on such a token is spoiled by `not_finite.spoil` instead.

    Attributes:
        shape: Of one token's keys and values.
        size: Slots that ranges can have.
        dtype: Of keys and values.
        device: That holds them.
        data: All of them, `[layers, 2, kv_heads, slots, head_dim]`: keys, then values.
    """

    def __init__(
        self,
        shape: KVShape,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        read_beyond: int = 0,
    ) -> None:
        """An arena of zeros.

        Args:
            shape: Of one token's keys and values.
            size: Slots that ranges can have.
            dtype: Of keys and values.
            device: That holds them.
            read_beyond: How many slots past the end of a range a forward may read; what it reads there is masked.
        """
        self.shape = shape
        self.size = size
        self.dtype = dtype
        self.device = device
        self.data = _zeros((shape.layers, 2, shape.kv_heads, size + read_beyond, shape.head_dim), dtype, device)
        self._ranges: list[KVRange] = []  # in the order of their starts

    @property
    def free_slots(self) -> int:
        """Slots that no range owns."""
        return self.size - sum(each.size for each in self._ranges)

    def reserve(self, size: int) -> KVRange | None:
        """A new range for `size` slots, or None where too few are free. Other ranges are moved together if need be."""
        if size > self.free_slots:
            return None
        start = self.gap(size)
        if start is None:
            self._compact()
            start = sum(each.size for each in self._ranges)
        reserved = KVRange(start, size)
        insort(self._ranges, reserved, key=lambda each: each.start)
        return reserved

    def release(self, kv: KVRange) -> None:
        """Give a range back."""
        self._ranges.remove(kv)

    def shrink(self, kv: KVRange, size: int) -> None:
        """Give back all slots of a range but its first `size`."""
        kv.size = size
        kv.used = min(kv.used, kv.size)

    def layer(self, layer: int) -> Tensor:
        """A view of one layer's keys and values of all slots: `[2, kv_heads, slots, dim]`."""
        return self.data[layer]

    def slots(self, kv: KVRange, stop: int) -> Tensor:
        """A view of slots 0 to `stop` in every layer: `[layers, 2, kv_heads, stop, head_dim]`."""
        return self.data[:, :, :, kv.start : kv.start + stop]

    @torch.inference_mode()
    def move(self, kv: KVRange, sources: Sequence[int], start: int) -> None:
        """Copy the slots `sources`, in that order, to slots `start` onwards, in every layer at once."""
        in_place = 0
        while in_place < len(sources) and sources[in_place] == start + in_place:
            in_place += 1
        if in_place == len(sources):
            return
        index = torch.tensor(sources[in_place:], device=self.device)
        slots = self.slots(kv, kv.size)  # [layers, 2, kv_heads, size, head_dim]
        # index_select copies first, so overlapping sources and targets are safe
        slots[:, :, :, start + in_place : start + len(sources)] = slots.index_select(3, index)

    @torch.inference_mode()
    def copy(self, source: KVRange, target: KVRange, stop: int) -> None:
        """Copy slots 0 to `stop` of one range to those of another."""
        self.slots(target, stop).copy_(self.slots(source, stop))
        target.used = stop

    def gap(self, size: int, without: Collection[KVRange] = ()) -> int | None:
        """Where `size` free slots begin, or were free if it were not for some ranges; None where no gap is as large."""
        begin = 0
        for each in [*self._ranges, KVRange(self.size, 0)]:
            if each in without:
                continue
            if each.start - begin >= size:
                return begin
            begin = each.start + each.size
        return None

    @torch.inference_mode()
    def _compact(self) -> None:
        """Move all ranges to the front of the pool, in their order."""
        begin = 0
        for each in self._ranges:
            if each.start > begin:
                step = each.start - begin  # no more slots at a time, so that source and target never overlap
                for offset in range(0, each.used, step):
                    stop = min(offset + step, each.used)
                    moved = KVRange(begin + offset, stop - offset)
                    self.copy(KVRange(each.start + offset, stop - offset), moved, stop - offset)
                each.start = begin
            begin += each.size


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros, since slots that were never written are read by forwards of static shape.

    On a CPU the memory comes from an anonymous mapping, which the kernel fills page by page at the first write. Torch's
    own allocator may take huge pages, of which a first write fills 2 MiB.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
