"""The figures of runs, each with its single definition, as tables, plots and documents show them.

A rate is the new tokens of one completion / its wall-clock seconds at the client, prefill included. A cell is the
median over prompts; a prompt's own figure is the median over its repetitions. A ratio is the median over prompts of the
ratio on the same prompt, in the same repetition. A cell comes with the range over prompts and the number of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
from pandas import DataFrame, Series

from dynatree.bench import bootstrap
from dynatree.bench.methods import PLAIN
from dynatree.bench.record import Report, Run
from dynatree.common.model_info import NO_MODEL

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

TRANSFORMERS = "transformers"  # label of transformers' plain `generate`
SIXTEEN_BIT = ("bfloat16", "float16")
DEFINITION = (
    "A rate is new tokens / wall-clock seconds of one completion, prefill included. A cell is the median "
    "over prompts, a ratio the median over prompts of the ratio on the same prompt; in parentheses the range over "
    "prompts."
)
INTERVALS = (
    f"In square brackets is the {bootstrap.CONFIDENCE} % confidence interval, by a bootstrap over prompts; that of a "
    "ratio is paired, since each prompt has its own ratio."
)


@dataclass(frozen=True)
class Cell:
    """Median, lowest and highest value over prompts, the number of prompts, and the median's confidence interval.

    The interval is None if there are fewer than two prompts.
    """

    median: float
    low: float
    high: float
    prompts: int
    interval: tuple[float, float] | None = field(default=None, compare=False)

    def times(self, factor: float) -> Cell:
        """The cell multiplied by `factor`, to change its unit."""
        interval = self.interval and (factor * self.interval[0], factor * self.interval[1])
        return Cell(factor * self.median, factor * self.low, factor * self.high, self.prompts, interval)


def cells(runs: DataFrame, figure: str, over: str | None = None, of: str | None = None) -> dict[str, Cell]:
    """The cell of each method, as this module defines it; methods without the figure are left out.

    Args:
        runs: Runs of one report and one temperature, as `frame` returns them.
        figure: Column of the figure.
        over: Label of the method by whose figure on the same prompt to divide; None does not divide.
        of: Column of that method's figure, if it differs from `figure`.
    """
    values = _by_place(runs, figure)
    if over is not None:
        base = _by_place(runs, of or figure)
        if over not in base:
            return {}
        values = values.div(base[over], axis=0)
    return {str(label): cell for label in values if (cell := cell_of(values[label])) is not None}


def _by_place(runs: DataFrame, figure: str) -> DataFrame:
    """A figure by prompt and repetition, with a column for each method."""
    found = runs.drop_duplicates(["prompt", "repetition", "label"])
    table = found.pivot(index=["prompt", "repetition"], columns="label", values=figure)
    return table[found["label"].drop_duplicates()].astype(float)


def cell_of(values: Series[float]) -> Cell | None:
    """The cell of values by prompt and repetition; None if there are no values."""
    by_prompt = values.dropna().groupby(level="prompt").median()
    if by_prompt.empty:
        return None
    interval = bootstrap.interval(bootstrap.median, by_prompt.to_list())
    return Cell(float(by_prompt.median()), float(by_prompt.min()), float(by_prompt.max()), len(by_prompt), interval)


def frame(report: Report) -> DataFrame:
    """A row for each run, in order: its method, prompt and repetition, its figures and its statistics.

    Column `defaults` says whether settings left out have the policies' own defaults, as in services started by `bench`.
    """
    rows = DataFrame([_row(run) for run in report["runs"]])
    return rows.assign(defaults=report["machine"]["threads"] is not None)


def _row(run: Run) -> dict[str, object]:
    names = ["label", "policy", "settings", "temperature", "scheme", "prompt", "repetition"]
    names += ["equal", "own_equal", "agrees"]
    memory = run.get("peak_memory") or {}
    return {
        **{name: run.get(name) for name in names},
        "rate": rate(run),
        "ttft": ttft(run),
        "tpot": tpot(run),
        "round_seconds": round_seconds(run),
        "memory": memory.get("verify"),
        **(run["statistics"] or {}),
    }


def by_label(runs: DataFrame) -> dict[str, DataFrame]:
    """The runs by their methods' labels, in the order in which they first appear."""
    return {str(label): same for label, same in runs.groupby("label", sort=False)}


def by_temperature(runs: DataFrame) -> dict[str, DataFrame]:
    """The runs by temperature, under a title that names the temperature and the scheme."""
    groups = {}
    for temperature, group in runs.groupby("temperature", sort=False):
        schemes = group["scheme"].dropna().unique()
        scheme = f", scheme {schemes[0]}" if len(schemes) else ", greedy"
        groups[f"temperature {temperature:g}{scheme}"] = group
    return groups


def rate(run: Run) -> float:
    """New tokens / wall-clock seconds at the client."""
    return run["tokens"] / run["wall_seconds"]


def rate_until(run: Run, tokens: int) -> float | None:
    """Tokens / seconds at the first arrival with at least `tokens` tokens; None if there is no such arrival."""
    return next((came / seconds for came, seconds in _arrivals(run) if came >= tokens), None)


def ttft(run: Run) -> float | None:
    """Seconds from the call to the first arrival."""
    arrivals = _arrivals(run)
    return arrivals[0][1] if arrivals else None


def tpot(run: Run) -> float | None:
    """(last arrival - first) / tokens after the first arrival, in seconds; None if all tokens arrived at once."""
    arrivals, seconds = _arrivals(run), _decode_seconds(run)
    tokens = run["tokens"] - arrivals[0][0] if arrivals else 0
    return seconds / tokens if tokens and seconds is not None else None


def token_gaps(run: Run) -> list[float]:
    """For each token after the first arrival, its share of the seconds since the previous arrival."""
    arrivals = _arrivals(run)
    return [
        (seconds - before) / (came - had)
        for (had, before), (came, seconds) in pairwise(arrivals)
        for _ in range(came - had)
    ]


def round_seconds(run: Run) -> float | None:
    """Mean seconds of a round: the time from the first arrival to the last / rounds."""
    statistics, seconds = run["statistics"], _decode_seconds(run)
    return seconds / statistics["rounds"] if statistics and statistics["rounds"] and seconds is not None else None


def _decode_seconds(run: Run) -> float | None:
    arrivals = _arrivals(run)
    return arrivals[-1][1] - arrivals[0][1] if arrivals else None


def _arrivals(run: Run) -> list[tuple[int, float]]:
    """The arrivals that brought tokens: (tokens so far, seconds since the call)."""
    arrivals: list[tuple[int, float]] = []
    for came, seconds in run["arrivals"]:
        if not arrivals or came > arrivals[-1][0]:
            arrivals.append((came, seconds))
    return arrivals


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The given percentile, with interpolation; None if there are no values."""
    return float(np.percentile(values, percent)) if values else None


def by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items in groups of equal keys, in the order in which the keys first appear."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def unequal(runs: Iterable[Run]) -> list[Run]:
    """The runs whose tokens should equal plain decoding's and do not."""
    return [run for run in runs if run["equal"] is False]


def recommended(runs: DataFrame) -> str:
    """The draft model of `dynatree rank` with the highest ratio to plain decoding; none if no model pays."""
    over = {label: cell.median for label, cell in cells(runs, "rate", over=PLAIN.label).items()}
    best = max(over, key=lambda label: over[label], default=PLAIN.label)
    return NO_MODEL if best == PLAIN.label else best


def plain_step(runs: DataFrame) -> Cell | None:
    """Plain decoding's time per token after the first, in seconds."""
    return cells(runs, "tpot").get(PLAIN.label) if len(runs) else None
