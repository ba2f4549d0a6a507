"""A policy's settings of the draft model's distribution, and of the draws from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drawing:
    """Settings of the draft's distribution; the target's distribution does not depend on them.

    Attributes:
        temperature: Temperature of the draft's distribution; None: the request's. If it is set for a request of
            temperature 0, trees are made of draws, while the target still decodes greedily: the output is the same as
            of greedy decoding.
        candidates: Number of likeliest tokens that draws are made from; the rest of the distribution is dropped.
        replacement: Whether continuations are drawn with replacement.
    """

    temperature: float | None = None
    candidates: int = 32
    replacement: bool = False


DEFAULT_DRAWING = Drawing()
