"""Layers that a GPU has no room for: copied from the host's memory while the layers before them compute."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dynatree.common.engine.streaming.layer_file import Place, places_of
from dynatree.common.engine.streaming.stream import SLOTS, Stream


def blob_of(tensors: Mapping[str, Tensor], pinned: bool) -> tuple[Tensor, Mapping[str, Place]]:
    """Tensors in one piece of the host's memory, uint8, and where each lies in it.

    Args:
        tensors: By name.
        pinned: Whether the memory is locked, so that a GPU copies it by itself.
    """
    places, size = places_of(tensors)
    blob = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    for name, tensor in tensors.items():
        places[name].of(blob).copy_(tensor)
    return blob, places


class MemoryStream(Stream):
    """Copies layers into slots on a device.

    On a GPU the host waits for nothing: copies have a CUDA stream of their own, and events order them with what
    computes. On a CPU, which only tests use, a copy is made at once.
    """

    def __init__(self, blobs: Sequence[Tensor], device: torch.device, slots: int = SLOTS) -> None:
        """Make the slots, and copy nothing.

        Args:
            blobs: Of the layers, in their order.
            device: That computes.
            slots: Layers on the device.
        """
        self._blobs = blobs
        size = max(blob.numel() for blob in blobs)
        count = min(slots, len(blobs))
        slot_memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        super().__init__(sum(blob.numel() for blob in blobs), slot_memory)
        self._order = _CudaOrder(device, count) if device.type == "cuda" else _HostOrder()
        self._held: list[int | None] = [None] * count  # of each slot: the layer that it holds, or that is under way
        self._next = 0  # the layer that is copied next
        self._sweep_seconds = 0.0

    @property
    def sweep_seconds(self) -> float:
        """That copying all layers took when they were checked."""
        return self._sweep_seconds

    @property
    def sweep_cpu_seconds(self) -> float:
        """None: a GPU copies by itself."""
        return 0.0

    def wait(self, layer: int) -> None:
        """Have what is computed from here on come behind the layer's copy."""
        if self._paused:
            return
        slot = layer % len(self._slots)
        if self._held[slot] != layer:  # the first forward, or the one before was broken off
            for each in range(len(self._slots)):
                self._order.computed(each)
            self._held = [None] * len(self._slots)
            self._next = layer
            self._copy()
        self._order.computing(slot)

    def release(self, layer: int) -> None:
        """A layer's computing is under way: its slot may be copied over when it has ended."""
        slot = layer % len(self._slots)
        if self._paused or self._held[slot] != layer:
            return
        self._order.computed(slot)
        self._held[slot] = None
        self._copy()

    def check(self) -> None:
        """Copy every layer twice, and note the time of the second round: the first finds cold memory."""
        for _ in range(2):
            self._order.synchronize()
            began = time.perf_counter()
            for layer in range(len(self._blobs)):
                self.wait(layer)
                self.release(layer)
            self._order.synchronize()
            self._sweep_seconds = time.perf_counter() - began

    def close(self) -> None:
        """Copy no more: nothing does unless it is asked to."""

    def _copy(self) -> None:
        while self._held[slot := self._next % len(self._slots)] is None:
            blob = self._blobs[self._next]
            self._order.copy(slot, self._slots[slot][: blob.numel()], blob)
            self._held[slot] = self._next
            self._next = (self._next + 1) % len(self._blobs)


class _CudaOrder:
    """Copies on a CUDA stream of their own."""

    def __init__(self, device: torch.device, slots: int) -> None:
        self._device = device
        self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in range(slots)]  # type: ignore[no-untyped-call]
        self._computed = [torch.cuda.Event() for _ in range(slots)]  # type: ignore[no-untyped-call]

    def copy(self, slot: int, into: Tensor, blob: Tensor) -> None:
        """Behind what computes with the slot."""
        self._copying.wait_event(self._computed[slot])
        with torch.cuda.stream(self._copying):
            into.copy_(blob, non_blocking=True)
        self._copied[slot].record(self._copying)

    def computing(self, slot: int) -> None:
        """What computes from here on comes behind the slot's copy."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[slot])

    def computed(self, slot: int) -> None:
        """What was asked to compute so far is all that the slot's next copy waits for."""
        self._computed[slot].record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Wait for all."""
        torch.cuda.synchronize(self._device)


class _HostOrder:
    """Copies at once."""

    def copy(self, slot: int, into: Tensor, blob: Tensor) -> None:
        into.copy_(blob)

    def computing(self, slot: int) -> None:
        pass

    def computed(self, slot: int) -> None:
        pass

    def synchronize(self) -> None:
        pass
