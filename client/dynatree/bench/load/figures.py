"""The figures of loads, each with its definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynatree.bench.figures import Spread, by, percentile, spread, token_gaps, ttft
from dynatree.bench.record import REFUSED, Failure, Place, Report, Run


@dataclass(frozen=True)
class LoadRuns:
    """All requests of one method under one load, over all repetitions; those that failed apart."""

    clients: int | None
    rate: float | None
    label: str
    runs: Sequence[Run]
    failures: Sequence[Failure]

    @property
    def rates(self) -> list[float]:
        """For each repetition, the tokens of its completions / the seconds until its last request had ended."""
        tokens = by(self.runs, lambda run: run["repetition"])
        return [
            sum(run["tokens"] for run in tokens.get(repetition, ())) / seconds
            for repetition, seconds in self._seconds().items()
        ]

    @property
    def throughput(self) -> Spread | None:
        """The spread of `rates`, in tokens a second."""
        return spread(self.rates)

    @property
    def refused(self) -> int:
        """The requests that the services had no room for."""
        return sum(failure["code"] == REFUSED for failure in self.failures)

    @property
    def failed(self) -> int:
        """The requests that ended in any other error."""
        return len(self.failures) - self.refused

    def ttft(self, percent: int) -> float | None:
        """A percentile over requests of the seconds from when one was due to its first token."""
        return percentile([first for first in map(ttft, self.runs) if first is not None], percent)

    def tpot(self, percent: int) -> float | None:
        """A percentile over tokens of `token_gaps`, in seconds."""
        return percentile([gap for run in self.runs for gap in token_gaps(run)], percent)

    def latency(self, percent: int) -> float | None:
        """A percentile over requests of the seconds from when one was due to its end."""
        return percentile([run["wall_seconds"] for run in self.runs], percent)

    def queue(self, percent: int) -> float | None:
        """A percentile over requests of `queue_seconds`."""
        return percentile(self._statistic("queue_seconds"), percent)

    @property
    def queue_max(self) -> float | None:
        """The longest of `queue_seconds`."""
        return max(self._statistic("queue_seconds"), default=None)

    def per_pass(self, name: str) -> float | None:
        """`sessions_per_pass` or `rows_per_pass`: the mean over all rounds."""
        return self._over(sum(each["rounds"] * each[name] for each in self._statistics()), "rounds")

    def per_round(self, name: str) -> float | None:
        """A count of `dynatree.client.Statistics` over all requests / their rounds."""
        return self._over(sum(self._statistic(name)), "rounds")

    @property
    def acceptance(self) -> float | None:
        """Nodes accepted / nodes drafted, over all requests."""
        return self._over(sum(self._statistic("draft_n_accepted")), "draft_n")

    @property
    def cached_tokens(self) -> float:
        """Tokens of prompts that the target had cached, over all requests."""
        return sum(self._statistic("cached_tokens"))

    @property
    def kv_cache_usage(self) -> float:
        """The highest of any request; 0 in records from before it was there."""
        return max((statistics.get("kv_cache_usage", 0.0) for statistics in self._statistics()), default=0.0)

    def _over(self, total: float, name: str) -> float | None:
        base = sum(self._statistic(name))
        return total / base if base else None

    def _statistic(self, name: str) -> list[float]:
        return [statistics[name] for statistics in self._statistics()]

    def _statistics(self) -> list[dict[str, float]]:
        return [run["statistics"] for run in self.runs if run["statistics"]]

    def _seconds(self) -> dict[int, float]:
        """How long each repetition took."""
        ends: dict[int, float] = {}
        for run in self.runs:
            _stretch(ends, run["repetition"], run["load"]["start_seconds"] + run["wall_seconds"])
        for failure in self.failures:
            _stretch(ends, failure["repetition"], failure["load"]["start_seconds"] + failure["seconds"])
        return ends


def _stretch(ends: dict[int, float], repetition: int, end: float) -> None:
    ends[repetition] = max(ends.get(repetition, 0.0), end)


def load_runs(report: Report) -> list[LoadRuns]:
    """Every method under every load: loads in the order in which they were run, methods in the first one's order."""
    runs = by(report["runs"], lambda run: (*_load(run["load"]), run["label"]))
    failures = by(report["failures"], lambda failure: (*_load(failure["load"]), failure["label"]))
    places = list(dict.fromkeys([*runs, *failures]))
    loads = list(dict.fromkeys((clients, rate) for clients, rate, _ in places))
    labels = list(dict.fromkeys(label for _, _, label in places))
    return [
        LoadRuns(*load, label, runs.get((*load, label), ()), failures.get((*load, label), ()))
        for load in sorted(loads, key=_closed_first)
        for label in labels
        if (*load, label) in places
    ]


def _load(place: Place) -> tuple[int | None, float | None]:
    return place["clients"], place["rate"]


def _closed_first(load: tuple[int | None, float | None]) -> tuple[bool, float]:
    clients, rate = load
    return clients is None, clients or rate or 0.0


def closed(each: Sequence[LoadRuns]) -> Iterator[LoadRuns]:
    """Those of closed loops."""
    return (one for one in each if one.clients is not None)


def opened(each: Sequence[LoadRuns]) -> Iterator[LoadRuns]:
    """Those of open loops."""
    return (one for one in each if one.rate is not None)
