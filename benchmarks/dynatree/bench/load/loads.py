"""Loads: requests from clients that wait for each completion, or requests at random times."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class ClosedLoop:
    """Each of `clients` clients sends `rounds` prompts, each when its previous completion has ended."""

    clients: int
    rounds: int

    @property
    def requests(self) -> int:
        """Number of requests of all clients."""
        return self.clients * self.rounds


@dataclass(frozen=True)
class OpenLoop:
    """`requests` requests arrive at a mean of `rate` per second, whether or not earlier requests are done."""

    rate: float
    requests: int

    def arrivals(self, seed: int) -> list[float]:
        """Due time of each request, in seconds since the first: a Poisson process that `seed` fixes up to its rate."""
        draws = random.Random(seed)
        gaps = (draws.expovariate(1.0) / self.rate for _ in range(self.requests - 1))
        return list(accumulate(gaps, initial=0.0))


Load = ClosedLoop | OpenLoop


def prompt_number(load: Load, repetition: int, request: int, prompts: int) -> int:
    """Number of the prompt of a request: each repetition continues where the last one ended, and wraps around."""
    return (repetition * load.requests + request) % prompts
