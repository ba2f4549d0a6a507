"""The recurrent computations of layers, and the argument that hands them to a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dynatree.engine.recurrent.linear_attention import Records


@dataclass(frozen=True)
class Scan:
    """A recurrent computation of a layer.

    Attributes:
        name: Tells apart the scans of one layer.
        compute: Computes outputs `[n, ...]` and the records of `n` new tokens from tensors of these tokens, the records
            of `m` kept tokens, the ancestors (bool `[n, m + n]`, or None for a chain), and the state before the kept
            tokens.
        fold: Computes the state after a chain of tokens, from the state before them and their records.
        start: Makes the state before the first token.
        none: The records of no tokens.
    """

    name: str
    compute: Callable[..., tuple[Tensor, Records]]
    fold: Callable[[Tensor, Records], Tensor]
    start: Callable[[], Tensor]
    none: Records


class Recurring(Protocol):
    """Computes the scans of one forward pass; the model hands it to every recurrent layer."""

    def scan(self, layer: int, scan: Scan, tokens: Sequence[Tensor]) -> Tensor:
        """Compute a scan of a layer for the `n` tokens of the forward pass.

        Args:
            layer: The layer's index.
            scan: The computation.
            tokens: The first arguments of `scan.compute`, each `[n, ...]`.

        Returns:
            `[n, ...]`.
        """
        ...
