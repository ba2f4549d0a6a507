"""The interface of the files that hold a model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn
from transformers import PreTrainedModel


class WeightFiles(Protocol):
    """The files that hold a model's weights; each module can be loaded by itself."""

    @property
    def name(self) -> str:
        """Name of the model, for messages."""
        ...

    def identity(self) -> str:
        """Return a hash that differs if the files differ, or are read in another dtype."""
        ...

    def fill(self, module: nn.Module, prefix: str = "") -> None:
        """Load those weights of a module that are on the meta device.

        Args:
            module: The model or a part of it, changed in place.
            prefix: Name of the part in the model and a dot; empty for the model itself.

        Raises:
            StartupError: A weight is missing, has another shape, or is not finite.
        """
        ...


class QuantizedFiles(WeightFiles, Protocol):
    """Files that hold weights of 8 and 4 bits."""

    @property
    def formats(self) -> str:
        """Names of the formats of the weights that stay quantised, see `format_names`."""
        ...

    def bytes_of(self, module: nn.Module, prefix: str = "") -> int:
        """Return the bytes of memory that the weights of a module take once `fill` has loaded them."""
        ...


@dataclass(frozen=True)
class Unfilled:
    """A model without weights, and the files that hold them."""

    model: PreTrainedModel
    files: QuantizedFiles
