"""The KV cache: the keys and values of all sessions in preallocated slots."""

from __future__ import annotations

import math
import mmap
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.kv.locality import GLOBAL, Locality
from dynatree.engine.recurrent.memory import RecurrentSize

FORGOTTEN_AT_ONCE = 256  # slots; fewer are not worth the system calls


@dataclass(frozen=True)
class KVShape:
    """The shape of one token's keys and values, which is the same in every layer, and what each layer sees of them.

    Layers may differ: a layer with fewer key-value heads stores each of them several times, and smaller keys or values
    are padded with zeros. Layers that do not attend have no keys and values.

    Attributes:
        layers: Number of layers that attend.
        kv_heads: Number of key-value heads of the layer with the most.
        head_dim: Size of the largest key or value.
        localities: What a query of each layer sees; empty means that all layers see every earlier token.
        features: Names of the features of its attention beyond softmax(query @ key) @ value over all earlier tokens.
        indices: The model's indices of the layers that attend; empty means that all layers do.
        recurrent: Size of what its recurrent layers keep; None without such layers.
    """

    layers: int
    kv_heads: int
    head_dim: int
    localities: tuple[Locality, ...] = ()
    features: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    recurrent: RecurrentSize | None = None

    def place(self, layer: int) -> int:
        """The place in the KV cache of the model's layer with the index `layer`."""
        return self.indices.index(layer) if self.indices else layer

    def locality(self, layer: int) -> Locality:
        """What a query of a layer sees."""
        return self.localities[layer] if self.localities else GLOBAL

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


class KVCache:
    """Preallocated slots; each holds one token's key and value in every layer. A session owns one contiguous range.

    Keys include their rotary position, so a slot may be moved without changing its meaning.

    Invariant: every number in the KV cache is finite; zeros replace NaN and infinity. A masked slot has weight 0, and 0
    times NaN is NaN. So a rejected token, or a token of another session, that overflows in float16 would turn other
    tokens into NaN. Instead, `not_finite.spoil` sets only the logits that depend on such a token to NaN.

    Attributes:
        shape: Shape of one token's keys and values.
        size: Number of slots available to ranges.
        dtype: Data type of keys and values.
        device: Device that holds the KV cache.
        data: Keys and values, in this order: `[layers, 2, kv_heads, slots, head_dim]`.
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
        """Allocate a KV cache of zeros.

        Args:
            shape: Shape of one token's keys and values.
            size: Number of slots available to ranges.
            dtype: Data type of keys and values.
            device: Device that holds the KV cache.
            read_beyond: Number of slots past the end of a range that a forward pass may read; they are masked.
        """
        self.shape = shape
        self.size = size
        self.dtype = dtype
        self.device = device
        self._local = [layer for layer, locality in enumerate(shape.localities) if locality != GLOBAL]
        self._localities = {shape.localities[layer] for layer in self._local}
        self._memory: mmap.mmap | None = None
        sizes = (shape.layers, 2, shape.kv_heads, size + read_beyond, shape.head_dim)
        if device.type == "cpu":
            # An anonymous mapping, which the kernel fills page by page at the first write. Torch's allocator may use
            # huge pages, where the first write fills 2 MiB.
            count = math.prod(sizes)  # 0 without layers that attend, and a mapping is not empty
            self._memory = mmap.mmap(-1, max(count, 1) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.data = torch.frombuffer(self._memory, dtype=dtype)[:count].view(sizes)
        else:  # zeros, because forward passes of static shape read slots that were never written
            self.data = torch.zeros(sizes, dtype=dtype, device=device)
        self._ranges: list[KVRange] = []  # sorted by start

    @property
    def free_slots(self) -> int:
        """Slots that no range owns."""
        return self.size - sum(each.size for each in self._ranges)

    def reserve(self, size: int) -> KVRange | None:
        """Reserve a range of `size` slots, or return None if too few are free. May move other ranges to make room."""
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
        """Free a range."""
        self._ranges.remove(kv)

    def shrink(self, kv: KVRange, size: int) -> None:
        """Free all slots of a range except its first `size`."""
        kv.size = size
        kv.used = min(kv.used, kv.size)
        kv.memory, kv.checkpoint = (
            None if each is None or each.position > size else each.cut(size) for each in (kv.memory, kv.checkpoint)
        )

    def layer(self, layer: int) -> Tensor:
        """Return a view of one layer's keys and values: `[2, kv_heads, slots, dim]`."""
        return self.data[layer]

    def slots(self, kv: KVRange, stop: int) -> Tensor:
        """Return a view of slots 0 to `stop` in every layer: `[layers, 2, kv_heads, stop, head_dim]`."""
        return self.data[:, :, :, kv.start : kv.start + stop]

    @torch.inference_mode()
    def move(self, kv: KVRange, sources: Sequence[int], start: int) -> None:
        """Copy the slots `sources`, in that order, to slots `start` onwards, in every layer at once.

        Recurrent layers keep nothing after these slots.
        """
        if kv.memory is not None:
            kv.memory = kv.memory.moved(sources, start)
        in_place = 0
        while in_place < len(sources) and sources[in_place] == start + in_place:
            in_place += 1
        if in_place == len(sources):
            return
        index = torch.tensor(sources[in_place:], device=self.device)
        slots = self.slots(kv, kv.size)  # [layers, 2, kv_heads, size, head_dim]
        # index_select copies first, so overlapping sources and destinations are safe
        slots[:, :, :, start + in_place : start + len(sources)] = slots.index_select(3, index)

    @torch.inference_mode()
    def copy(self, source: KVRange, destination: KVRange, stop: int) -> None:
        """Copy slots 0 to `stop` of one range to another range."""
        destination.used, destination.forgotten = stop, min(source.forgotten, stop)
        memory = source.memory_of(stop)
        destination.memory = None if memory is None else memory.cut(stop)
        if not source.forgotten:
            self.slots(destination, stop).copy_(self.slots(source, stop))
            return
        for layer in range(self.shape.layers):  # zeros are not written, because they would take memory
            first = destination.forgotten if layer in self._local else 0
            to, held = (self.slots(each, stop)[layer, :, :, first:] for each in (destination, source))
            to.copy_(held)

    def reach(self, kv: KVRange, stop: int) -> int:
        """Return how many of the first `stop` slots of a range hold all that the token after them sees."""
        if self.shape.recurrent is not None:
            memory = kv.memory_of(stop)
            stop = 0 if memory is None else min(memory.stop, stop)
        return stop if kv.forgotten <= self.lowest(stop) else 0

    def lowest(self, position: int) -> int:
        """Return the lowest position that a query at `position` sees in the layers that do not see all positions."""
        return min((int(each.lowest(torch.tensor(position))) for each in self._localities), default=0)

    def forget(self, kv: KVRange, position: int) -> None:
        """Return the memory of slots that no query from `position` on sees, in the layers that do not see all of them.

        The slots stay reserved, and read as zeros. Only whole pages are returned, and only on a CPU.
        """
        lowest = self.lowest(position)
        if self._memory is not None and lowest - kv.forgotten >= FORGOTTEN_AT_ONCE:
            self._return(kv, kv.forgotten, lowest)
            kv.forgotten = lowest

    def _return(self, kv: KVRange, first: int, stop: int) -> None:
        """Return the memory of the slots `first` to `stop` of a range in the layers with a locality."""
        assert self._memory is not None, "the KV cache is in a mapping"
        slot, page = self.shape.head_dim * self.dtype.itemsize, mmap.PAGESIZE
        for layer in self._local:
            for head in range(2 * self.shape.kv_heads):  # the heads of the keys, then those of the values
                start = (layer * 2 * self.shape.kv_heads + head) * self.data.stride(2) * self.dtype.itemsize
                start += kv.start * slot
                begin = -(-start // page) * page  # the first page that is the range's alone
                begin = max(begin, (start + first * slot) // page * page)
                length = (start + stop * slot) // page * page - begin
                if length > 0:
                    self._memory.madvise(mmap.MADV_DONTNEED, begin, length)

    def gap(self, size: int, without: Collection[KVRange] = ()) -> int | None:
        """Return the start of `size` free slots, counting those of `without` as free; None if no gap fits."""
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
        """Move all ranges to the front of the KV cache and keep their order."""
        begin = 0
        for each in self._ranges:
            if each.start > begin:
                step = each.start - begin  # copied at a time, so that source and destination never overlap
                for offset in range(0, each.used, step):
                    stop = min(offset + step, each.used)
                    moved = KVRange(begin + offset, stop - offset)
                    self.copy(KVRange(each.start + offset, stop - offset), moved, stop - offset)
                each.start = begin
                if each.forgotten:  # the copies are zeros that take memory
                    self._return(each, 0, each.forgotten)
            begin += each.size
