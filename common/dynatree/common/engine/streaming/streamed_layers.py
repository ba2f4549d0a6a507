"""The turns of streamed layers in a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dynatree.common.engine.streaming.stream import Stream


class StreamedLayers:
    """Has each streamed layer in memory while it is computed.

    Attributes:
        first: The model's first streamed layer; all behind it are streamed.
        stream: Of them.
    """

    def __init__(self, stream: Stream, first: int, layers: int) -> None:
        self.stream = stream
        self.first = first
        self._count = layers - first

    @contextmanager
    def layer(self, place: int) -> Iterator[None]:
        """While a streamed layer is computed, counted from the first of them; any other place is in memory anyway.

        Raises:
            LayerStreamError: It cannot be read.
        """
        if not 0 <= place < self._count:
            yield
            return
        self.stream.wait(place)
        try:
            yield
        finally:
            self.stream.release(place)

    def hook(self, layers: nn.ModuleList) -> None:
        """Have the modules of these layers, all of the model's, wait for themselves."""
        for place, layer in enumerate(list(layers)[self.first :]):

            def before(_: nn.Module, __: Any, place: int = place) -> None:
                self.stream.wait(place)

            def after(_: nn.Module, __: Any, ___: Any, place: int = place) -> None:
                self.stream.release(place)

            layer.register_forward_pre_hook(before)
            layer.register_forward_hook(after, always_call=True)
