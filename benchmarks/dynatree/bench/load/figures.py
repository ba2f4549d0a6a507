"""The figures of loads, each with its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dynatree.bench.figures import Cell, by, percentile, token_gaps, ttft
from dynatree.bench.record import REFUSED, Failure, Place, Report, Run, RunStatistics


@dataclass(frozen=True)
class LoadRuns:
    """All requests of one method under one load, over all repetitions; failed requests are kept apart."""

    clients: int | None
    rate: float | None
    label: str
    runs: Sequence[Run]
    failures: Sequence[Failure]

    @property
    def rates(self) -> list[float]:
        """For each repetition, the tokens of its completions / the seconds until its last request ended."""
        ends: dict[int, float] = {}
        tokens: dict[int, int] = {}
        ended = [(run["repetition"], run["load"], run["wall_seconds"], run["tokens"]) for run in self.runs]
        ended += [(failure["repetition"], failure["load"], failure["seconds"], 0) for failure in self.failures]
        for repetition, place, seconds, count in ended:
            ends[repetition] = max(ends.get(repetition, 0.0), place["start_seconds"] + seconds)
            tokens[repetition] = tokens.get(repetition, 0) + count
        return [tokens[repetition] / seconds for repetition, seconds in ends.items()]

    @property
    def throughput(self) -> Cell | None:
        """Median and range of `rates`, in tokens per second; the cell's `prompts` counts repetitions here."""
        rates = self.rates
        return Cell(median(rates), min(rates), max(rates), len(rates)) if rates else None

    @property
    def refused(self) -> int:
        """Number of requests that were refused because the queue was full."""
        return sum(failure["code"] == REFUSED for failure in self.failures)

    @property
    def failed(self) -> int:
        """Number of requests that ended in any other error."""
        return len(self.failures) - self.refused

    def ttft(self, percent: int) -> float | None:
        """A percentile over requests of the seconds from the due time to the first token."""
        return percentile([first for first in map(ttft, self.runs) if first is not None], percent)

    def tpot(self, percent: int) -> float | None:
        """A percentile over tokens of `token_gaps`, in seconds."""
        return percentile([gap for run in self.runs for gap in token_gaps(run)], percent)

    def latency(self, percent: int) -> float | None:
        """A percentile over requests of the seconds from the due time to the end."""
        return percentile([run["wall_seconds"] for run in self.runs], percent)

    def queue(self, percent: int) -> float | None:
        """A percentile over requests of `queue_seconds`."""
        return percentile([each["queue_seconds"] for each in self.statistics], percent)

    def per_pass(self, name: str) -> float | None:
        """`sessions_per_pass` or `rows_per_pass`: the mean over all rounds."""
        return self._over(sum(each["rounds"] * each[name] for each in self.statistics), "rounds")  # type: ignore[literal-required]

    def per_round(self, name: str) -> float | None:
        """A count of `dynatree.client.Statistics` over all requests / their rounds."""
        return self._over(self.total(name), "rounds")

    @property
    def acceptance(self) -> float | None:
        """Nodes accepted / nodes drafted, over all requests."""
        return self._over(self.total("draft_n_accepted"), "draft_n")

    @property
    def kv_cache_usage(self) -> float:
        """The highest KV cache usage that any request reported."""
        return max((each.get("kv_cache_usage", 0.0) for each in self.statistics), default=0.0)

    @property
    def statistics(self) -> list[RunStatistics]:
        """Statistics of the requests that a service completed."""
        return [run["statistics"] for run in self.runs if run["statistics"]]

    def total(self, name: str) -> float:
        """The sum of a count of `dynatree.client.Statistics` over all requests."""
        return float(sum(each[name] for each in self.statistics))  # type: ignore[literal-required]

    def _over(self, total: float, name: str) -> float | None:
        base = self.total(name)
        return total / base if base else None


def load_runs(report: Report) -> list[LoadRuns]:
    """Every method under every load: closed loops first, by number of clients, then open loops, by rate."""
    runs = by(report["runs"], lambda run: (*_load(run["load"]), run["label"]))
    failures = by(report["failures"], lambda failure: (*_load(failure["load"]), failure["label"]))
    places = list(dict.fromkeys([*runs, *failures]))
    labels = list(dict.fromkeys(label for _, _, label in places))
    places.sort(key=lambda place: (place[0] is None, place[0] or place[1] or 0.0, labels.index(place[2])))
    return [LoadRuns(*place, runs.get(place, ()), failures.get(place, ())) for place in places]


def _load(place: Place) -> tuple[int | None, float | None]:
    return place["clients"], place["rate"]
