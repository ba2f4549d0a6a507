"""The figures of runs, each with its definition: what tables and plots show, without how they show it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles
from typing import TypeVar

from dynatree.bench.methods import PLAIN
from dynatree.bench.record import Report, Run

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

TRANSFORMERS = "transformers"  # the label of its plain `generate`
SIXTEEN_BIT = ("bfloat16", "float16")


@dataclass(frozen=True)
class Spread:
    """The median of some values and their quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Sample:
    """A run beside those of the same prompt, repetition and temperature that it is held against."""

    run: Run
    plain: Run | None
    transformers: Run | None

    @property
    def label(self) -> str:
        """The method's."""
        return self.run["label"]

    @property
    def rate(self) -> float:
        """New tokens / wall-clock seconds, the prompt's forward included."""
        return rate(self.run)

    @property
    def speedup(self) -> float | None:
        """Its rate / that of plain decoding through the same services."""
        return self.rate / rate(self.plain) if self.plain else None

    @property
    def over_transformers(self) -> float | None:
        """Its rate / that of transformers' own generate()."""
        return self.rate / rate(self.transformers) if self.transformers else None

    @property
    def round_cost(self) -> float | None:
        """The mean time of its rounds / plain decoding's time per token after the first, its TPOT."""
        step = tpot(self.plain) if self.plain else None
        seconds = round_seconds(self.run)
        return seconds / step if step and seconds is not None else None

    def speedup_until(self, tokens: int) -> float | None:
        """As `speedup`, of the rates until so many tokens had come."""
        return _ratio(rate_until(self.run, tokens), self.plain and rate_until(self.plain, tokens))

    def over_transformers_until(self, tokens: int) -> float | None:
        """As `over_transformers`, of the rates until so many tokens had come."""
        return _ratio(rate_until(self.run, tokens), self.transformers and rate_until(self.transformers, tokens))


def samples(report: Report) -> list[Sample]:
    """Every run of a report, in order."""
    plain = {_place(run): run for run in report["runs"] if run["label"] == PLAIN.label}
    transformers = {_place(run): run for run in report["runs"] if run["label"] == TRANSFORMERS}
    return [Sample(run, plain.get(_place(run)), transformers.get(_place(run))) for run in report["runs"]]


def _place(run: Run) -> tuple[float, int, int]:
    return run["temperature"], run["prompt"], run["repetition"]


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base


def rate(run: Run) -> float:
    """New tokens / wall-clock seconds at the client."""
    return run["tokens"] / run["wall_seconds"]


def rate_until(run: Run, tokens: int) -> float | None:
    """The tokens / seconds of the first arrival by which so many tokens had come; None where they never had."""
    return next((came / seconds for came, seconds in _arrivals(run) if came >= tokens), None)


def ttft(run: Run) -> float | None:
    """Seconds from the call to the first arrival."""
    arrivals = _arrivals(run)
    return arrivals[0][1] if arrivals else None


def tpot(run: Run) -> float | None:
    """(last arrival - first) / tokens after the first arrival, in seconds.

    By the server's clock where no arrivals were kept; None where nothing was, or a single arrival brought it all.
    """
    arrivals = _arrivals(run)
    tokens = run["tokens"] - (arrivals[0][0] if arrivals else 1)
    seconds = _decode_seconds(run)
    return seconds / tokens if tokens and seconds is not None else None


def token_gaps(run: Run) -> list[float]:
    """For each token after the first arrival, its share of the seconds since the arrival before its own."""
    arrivals = _arrivals(run)
    return [
        (seconds - before) / (came - had)
        for (had, before), (came, seconds) in pairwise(arrivals)
        for _ in range(came - had)
    ]


def round_seconds(run: Run) -> float | None:
    """The mean time of a round: from the first arrival to the last / rounds."""
    statistics, seconds = run["statistics"], _decode_seconds(run)
    return seconds / statistics["rounds"] if statistics and statistics["rounds"] and seconds is not None else None


def _decode_seconds(run: Run) -> float | None:
    arrivals, statistics = _arrivals(run), run["statistics"]
    if arrivals:
        return arrivals[-1][1] - arrivals[0][1]
    if statistics and "total_seconds" in statistics:
        return float(statistics["total_seconds"] - statistics["time_to_first_token_seconds"])
    return None


def _arrivals(run: Run) -> list[tuple[int, float]]:
    """The arrivals that brought tokens: (tokens by then, seconds since the call)."""
    arrivals: list[tuple[int, float]] = []
    for came, seconds in run.get("arrivals", ()):
        if not arrivals or came > arrivals[-1][0]:
            arrivals.append((came, seconds))
    return arrivals


def peak_memory(runs: Iterable[Run], process: str) -> int | None:
    """The largest resident size, in bytes, of "draft", "verify" or "client" in any of the runs."""
    peaks = [(run.get("peak_memory") or {}).get(process) for run in runs]
    return max((peak for peak in peaks if peak is not None), default=None)


def statistic(runs: Iterable[Run], name: str) -> list[float]:
    """A figure of `dynatree.client.Statistics` of every run that has statistics."""
    return [run["statistics"][name] for run in runs if run["statistics"]]


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of those values that are there; None where none is."""
    known = [value for value in values if value is not None]
    return quartiles_of(known) if known else None


def quartiles_of(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The value that `percent` of 100 do not pass, interpolated; None of no values."""
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items in groups of equal keys, in the order in which the keys first appear."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def unequal(runs: Iterable[Run]) -> list[Run]:
    """The runs whose tokens should be those of plain decoding, and are not."""
    return [run for run in runs if run["equal"] is False]
