"""How requests come: from clients that wait for each completion, or at times of their own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class ClosedLoop:
    """Each of `clients` sends `rounds` prompts, the next one when its last completion has ended."""

    clients: int
    rounds: int

    @property
    def requests(self) -> int:
        """Of all clients."""
        return self.clients * self.rounds


@dataclass(frozen=True)
class OpenLoop:
    """`requests` come at `rate` a second, whether or not those before them are done."""

    rate: float
    requests: int

    def arrivals(self, seed: int) -> list[float]:
        """When each request is due, in seconds since the first: a Poisson process, whose shape `seed` alone sets."""
        draws = random.Random(seed)
        gaps = (draws.expovariate(1.0) / self.rate for _ in range(self.requests - 1))
        return list(accumulate(gaps, initial=0.0))


Load = ClosedLoop | OpenLoop


def prompt_number(load: Load, repetition: int, request: int, prompts: int) -> int:
    """The prompt of a load's request: each repetition goes on where the last one ended, and around."""
    return (repetition * load.requests + request) % prompts
