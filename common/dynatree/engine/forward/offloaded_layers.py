"""Loading and releasing of offloaded layers during a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dynatree.engine.forward.layer_source import LayerSource


class OffloadedLayers:
    """Keeps each offloaded layer in memory while it is computed.

    Attributes:
        first: Index of the model's first offloaded layer; all later layers are offloaded too.
        source: Loads the offloaded layers.
    """

    def __init__(self, source: LayerSource, first: int, layers: int) -> None:
        self.source = source
        self.first = first
        self._count = layers - first

    @contextmanager
    def layer(self, place: int) -> Iterator[None]:
        """Hold an offloaded layer in memory; `place` counts from the first one, and other places have no effect.

        Raises:
            OffloadError: The layer cannot be read.
        """
        if not 0 <= place < self._count:
            yield
            return
        self.source.wait(place)
        try:
            yield
        finally:
            self.source.release(place)

    def hook(self, layers: nn.ModuleList) -> None:
        """Hook the offloaded layers among `layers`, all layers of the model, so that each waits until it is loaded."""
        for place, layer in enumerate(list(layers)[self.first :]):

            def before(_: nn.Module, __: Any, place: int = place) -> None:
                self.source.wait(place)

            def after(_: nn.Module, __: Any, ___: Any, place: int = place) -> None:
                self.source.release(place)

            layer.register_forward_pre_hook(before)
            layer.register_forward_hook(after, always_call=True)
