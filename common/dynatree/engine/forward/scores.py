"""How a layer turns the products of queries and keys into attention weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """The scores of a layer's attention: `scale * (q @ k)`, optionally capped, and optionally beside a sink.

    Attributes:
        scale: Factor of the products; None means `head_dim ** -0.5`.
        cap: A score `s` becomes `cap * tanh(s / cap)`; None means no cap (Gemma 2).
        sinks: One score of each query head that takes part in the softmax and has no value, `[heads]`; None means
            none (gpt-oss).
    """

    scale: float | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    def factor(self, head_dim: int) -> float:
        """The factor of the products of queries and keys of size `head_dim`."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def capped(self, scores: Tensor) -> Tensor:
        """Return scaled scores with the cap."""
        return scores if self.cap is None else self.cap * (scores / self.cap).tanh()
