"""Layers that do not fit on a GPU: copied from the host's memory while the layers before them compute."""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynatree.common.errors import StartupError
from dynatree.engine.forward.layer_source import SLOTS, LayerSource
from dynatree.engine.offload.layer_file import Place, places_of


def blob_of(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Place]]:
    """Copy tensors into one block of host memory, which has its own pages.

    Returns:
        The block, uint8, and each tensor's place in it.
    """
    places, size = places_of(tensors)
    blob = torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    for name, tensor in tensors.items():
        places[name].of(blob).copy_(tensor)
    return blob, places


class HostLayers(LayerSource):
    """Copies layers into slots on a device.

    On a GPU, the host never waits: copies run on a separate CUDA stream, and events order them with the computation. On
    a CPU, which only tests use, a copy is made immediately.
    """

    def __init__(self, blobs: Sequence[Tensor], device: torch.device, slots: int = SLOTS) -> None:
        """Allocate the slots without copying.

        Args:
            blobs: Memory blocks of the layers, in their order.
            device: Device that computes.
            slots: Number of layers on the device.

        Raises:
            StartupError: The blobs' pages cannot be locked for a GPU.
        """
        self._blobs = blobs
        size = max(blob.numel() for blob in blobs)
        count = min(slots, len(blobs))
        slot_memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        super().__init__(sum(blob.numel() for blob in blobs), slot_memory)
        self._order = _CudaOrder(device, count, blobs) if device.type == "cuda" else _HostOrder()
        self._held: list[int | None] = [None] * count  # the layer that each slot holds or receives
        self._next = 0  # the layer that is copied next
        self._sweep_seconds = 0.0

    @property
    def sweep_seconds(self) -> float:
        """Seconds that copying all layers took in `check`."""
        return self._sweep_seconds

    @property
    def sweep_cpu_seconds(self) -> float:
        """Zero, because a GPU copies by DMA."""
        return 0.0

    def wait(self, layer: int) -> None:
        """Order all later computation after the layer's copy."""
        if self._paused:
            return
        slot = layer % len(self._slots)
        if self._held[slot] != layer:  # the first forward pass, or the last one was aborted
            for each in range(len(self._slots)):
                self._order.computed(each)
            self._held = [None] * len(self._slots)
            self._next = layer
            self._copy()
        self._order.computing(slot)

    def release(self, layer: int) -> None:
        """Allow the next copy into the layer's slot after the computation queued so far."""
        slot = layer % len(self._slots)
        if self._paused or self._held[slot] != layer:
            return
        self._order.computed(slot)
        self._held[slot] = None
        self._copy()

    def check(self) -> None:
        """Copy every layer twice, and record the time of the second round, because the first one reads cold memory."""
        for _ in range(2):
            self._order.synchronize()
            began = time.perf_counter()
            for layer in range(len(self._blobs)):
                self.wait(layer)
                self.release(layer)
            self._order.synchronize()
            self._sweep_seconds = time.perf_counter() - began

    def close(self) -> None:
        """Wait for copies into the slots, whose memory may be given to others next, and unlock the blobs' pages."""
        self._order.close()

    def _copy(self) -> None:
        while self._held[slot := self._next % len(self._slots)] is None:
            blob = self._blobs[self._next]
            self._order.copy(slot, self._slots[slot][: blob.numel()], blob)
            self._held[slot] = self._next
            self._next = (self._next + 1) % len(self._blobs)


class _CudaOrder:
    """Copies on a separate CUDA stream, from pages that are locked, so that a GPU copies them by DMA.

    torch's allocator of locked memory is not used: it rounds a block up to a power of two, 157 MB to 268 MB.
    """

    def __init__(self, device: torch.device, slots: int, blobs: Sequence[Tensor]) -> None:
        self._device = device
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in range(slots)]  # type: ignore[no-untyped-call]
        self._computed = [torch.cuda.Event() for _ in range(slots)]  # type: ignore[no-untyped-call]
        self._locked: list[int] = []  # addresses
        try:
            for blob in blobs:
                torch.cuda.check_error(self._runtime.cudaHostRegister(blob.data_ptr(), blob.numel(), 0))
                self._locked.append(blob.data_ptr())
        except RuntimeError as error:
            self.close()
            raise StartupError(
                f"the offloaded layers' memory cannot be locked for the GPU ({error}); expected more --resident-layers"
            ) from error

    def copy(self, slot: int, into: Tensor, blob: Tensor) -> None:
        """Copy into the slot after the computation that uses it."""
        self._copying.wait_event(self._computed[slot])
        with torch.cuda.stream(self._copying):
            into.copy_(blob, non_blocking=True)
        self._copied[slot].record(self._copying)

    def computing(self, slot: int) -> None:
        """Order all later computation after the slot's copy."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[slot])

    def computed(self, slot: int) -> None:
        """Make the slot's next copy wait for the computation queued so far."""
        self._computed[slot].record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Wait for all copies and computation."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Wait, then unlock the pages."""
        self.synchronize()
        while self._locked:
            torch.cuda.check_error(self._runtime.cudaHostUnregister(self._locked.pop()))


class _HostOrder:
    """Copies immediately."""

    def copy(self, slot: int, into: Tensor, blob: Tensor) -> None:
        into.copy_(blob)

    def computing(self, slot: int) -> None:
        pass

    def computed(self, slot: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass
