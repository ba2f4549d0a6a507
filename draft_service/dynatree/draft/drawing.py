"""How a policy has the draft model's distribution made, and its continuations drawn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drawing:
    """Settings of the draft's distribution; the target's distribution does not depend on them.

    Attributes:
        temperature: Of the draft's distribution; None: the request's. A request of temperature 0 with one of the
            draft's own gets trees of draws, which the target's own choices walk: its output is greedy decoding's.
        candidates: The likeliest tokens that draws are made from; the rest of the distribution's mass is dropped.
        replacement: Whether continuations are drawn with replacement.
    """

    temperature: float | None = None
    candidates: int = 32
    replacement: bool = False


DEFAULT_DRAWING = Drawing()
