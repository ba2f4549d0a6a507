"""What brings streamed layers, as those that compute them see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

SLOTS = 2  # layers where they are computed: one that computes, one that comes


class Stream(ABC):
    """Brings layers in their order, over and over, into a few slots.

    Layer `i` always lies in the same slot, `i % slots`, so that what computes it can point there. Whoever computes
    calls `wait(i)` before, and `release(i)` after it.

    Attributes:
        bytes: Of all layers: what a forward brings.
    """

    def __init__(self, size: int, slots: Sequence[Tensor]) -> None:
        """Know the slots.

        Args:
            size: Bytes of all layers.
            slots: Each uint8, and as large as the largest layer.
        """
        self.bytes = size
        self._slots = slots
        self._paused = False

    @property
    @abstractmethod
    def sweep_seconds(self) -> float:
        """That bringing all layers takes, by what was brought so far."""

    @property
    @abstractmethod
    def sweep_cpu_seconds(self) -> float:
        """Of the CPU's cores, that bringing all layers takes from what computes meanwhile."""

    def memory(self, layer: int) -> Tensor:
        """Where a layer lies while it may be computed, uint8."""
        return self._slots[layer % len(self._slots)]

    @abstractmethod
    def wait(self, layer: int) -> None:
        """Until a layer is there.

        Raises:
            LayerStreamError: It cannot be read.
        """

    @abstractmethod
    def release(self, layer: int) -> None:
        """A layer is computed: another may take its slot."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nobody waits, and nothing comes: forwards compute with whatever lies in the slots, to be timed."""
        self.wait(0)
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self.release(0)

    @abstractmethod
    def check(self) -> None:
        """Bring every layer, and so learn what a sweep takes.

        Raises:
            StartupError: One cannot be read, or is not what was written.
        """

    @abstractmethod
    def close(self) -> None:
        """Bring no more."""
