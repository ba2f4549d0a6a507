"""The interface between offloaded layers and the code that computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

SLOTS = 2  # layer buffers: one in use by the computation, one being filled


class LayerSource(ABC):
    """Loads layers cyclically, in their order, into a few buffers ("slots").

    Layer `i` always lies in slot `i % slots`, so its weights can point there. The computation calls `wait(i)` before
    layer `i` and `release(i)` after it.

    Attributes:
        bytes: Size of all layers, which every forward pass loads.
    """

    def __init__(self, size: int, slots: Sequence[Tensor]) -> None:
        """Initialize with the slots.

        Args:
            size: Bytes of all layers.
            slots: Buffers, each uint8 and as large as the largest layer.
        """
        self.bytes = size
        self._slots = slots
        self._paused = False

    @property
    @abstractmethod
    def sweep_seconds(self) -> float:
        """Seconds to load all layers, estimated from the loads so far."""

    @property
    @abstractmethod
    def sweep_cpu_seconds(self) -> float:
        """CPU seconds that loading all layers takes away from concurrent computation."""

    def memory(self, layer: int) -> Tensor:
        """Return the slot of a layer between `wait` and `release`, uint8."""
        return self._slots[layer % len(self._slots)]

    @abstractmethod
    def wait(self, layer: int) -> None:
        """Wait until a layer is loaded.

        Raises:
            OffloadError: The layer cannot be read.
        """

    @abstractmethod
    def release(self, layer: int) -> None:
        """Free the slot of a computed layer for another layer."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend loading and waiting, so that forward passes over the current slot contents can be timed."""
        self.wait(0)
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self.release(0)

    @abstractmethod
    def check(self) -> None:
        """Load every layer once, which checks them and measures the time of a sweep.

        Raises:
            StartupError: A layer cannot be read, or differs from the layer that was written.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop loading."""
