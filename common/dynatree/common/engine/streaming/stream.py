"""What brings streamed layers, as those that compute them see it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

SLOTS = 2  # layers where they are computed: one that computes, one that comes


class Stream(Protocol):
    """Brings layers in their order, over and over, into a few slots.

    Layer `i` always lies in the same slot, `i % slots`, so that what computes it can point there. Whoever computes
    calls `wait(i)` before, and `release(i)` after it.

    Attributes:
        bytes: Of all layers: what a forward brings.
    """

    bytes: int

    @property
    def sweep_seconds(self) -> float:
        """That bringing all layers takes."""

    @property
    def sweep_cpu_seconds(self) -> float:
        """Of the CPU's cores, that bringing all layers takes from what computes meanwhile."""

    def memory(self, layer: int) -> Tensor:
        """Where a layer lies while it may be computed, uint8."""

    def wait(self, layer: int) -> None:
        """Until a layer is there.

        Raises:
            LayerStreamError: It cannot be read.
        """

    def release(self, layer: int) -> None:
        """A layer is computed: another may take its slot."""

    def paused(self) -> AbstractContextManager[None]:
        """Nobody waits, and nothing comes: forwards compute with whatever lies in the slots, to be timed."""

    def check(self) -> None:
        """Bring every layer once.

        Raises:
            StartupError: One cannot be read, or is not what was written.
        """

    def close(self) -> None:
        """Bring no more."""
