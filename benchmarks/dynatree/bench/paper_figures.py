"""Figures by the formulas of DynaTree's and DySpec's tables: means over prompts, whereas `figures` has medians.

A prompt's own figure is the median over its repetitions. docs/reference/paper-metrics.md gives the formulas' sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pandas import DataFrame, Series

from dynatree.bench import bootstrap
from dynatree.bench.figures import by_label
from dynatree.bench.methods import PLAIN
from dynatree.bench.table import NONE, Table

# K and D of Table 3 (D_0 if D varies): the setting by policy, and its default, which is the same in all records.
_DEPTHS = {"linear": ("depth", 8.0), "fixed": ("depth", 8.0), "dynatree": ("base_depth", 5.0)}


@dataclass(frozen=True)
class Column:
    """A column: its formula in words, and a function from a method's runs and plain decoding's to its text."""

    formula: str
    text: Callable[[DataFrame, DataFrame], str]


def by_prompt(runs: DataFrame, figure: str) -> Series[float]:
    """The figure of each prompt that has it, the median over repetitions."""
    return runs.dropna(subset=[figure]).groupby("prompt")[figure].median().astype(float)


def spread(values: Series[float], digits: int) -> str:
    """Mean and standard deviation over prompts; the deviation divides by their number, as in the authors' scripts."""
    return f"{values.mean():.{digits}f} ± {values.std(ddof=0):.{digits}f}" if len(values) else NONE


def speedup(runs: DataFrame, base: DataFrame) -> tuple[float, tuple[float, float] | None] | None:
    """The ratio of mean rates on the prompts that both methods have, and its confidence interval."""
    rates, others = by_prompt(runs, "rate").align(by_prompt(base, "rate"), join="inner")
    if rates.empty:
        return None
    found = bootstrap.interval(bootstrap.ratio_of_means, rates.to_list(), others.to_list())
    return rates.mean() / others.mean(), found


def change(runs: DataFrame, base: DataFrame) -> str:
    """The relative change of mean rates against another method's, with its confidence interval."""
    found = speedup(runs, base)
    if found is None:
        return NONE
    percent = [f"{100 * (ratio - 1):+.1f}" for ratio in (found[0], *(found[1] or ()))]
    return f"{percent[0]} %" + (f" [{percent[1]} to {percent[2]}]" if len(set(percent)) > 1 else "")


def most_tokens(policy: str | None, settings: Mapping[str, object], *, defaults: bool = True) -> float | None:
    """The denominator of Table 3's acceptance, in tokens per round.

    It is None for a policy that is not in the table, and if the settings leave the depth to a server whose defaults
    may differ from the policies' own (`defaults` is false).
    """
    if policy not in _DEPTHS:
        return None
    name, default = _DEPTHS[policy]
    depth = settings.get(name, default if defaults else None)
    return None if not isinstance(depth, int | float) else depth if policy == "linear" else depth + 2.0


def path_length(runs: DataFrame) -> float:
    """l-bar: the mean over prompts of tokens per round."""
    return float(by_prompt(runs, "tokens_per_round").mean())


def acceptance(runs: DataFrame) -> float | None:
    """Accept.: l-bar / K of a chain of K nodes, l-bar / (D + 2) of a tree of depth D.

    It is None for other policies, and if nothing was drafted.
    """
    first = runs.iloc[0]
    most = most_tokens(first["policy"], first["settings"], defaults=bool(first["defaults"]))
    return path_length(runs) / most if most is not None and _drafts(runs) else None


def tokens_per_round(runs: DataFrame) -> float:
    """L-bar: the tokens of all rounds / all rounds, which is T / mean #Iter. for completions of T tokens."""
    rounds, tokens = by_prompt(runs, "rounds"), by_prompt(runs, "tokens_per_round")
    return float((rounds * tokens).sum() / rounds.sum())


def _speedup(runs: DataFrame, plain: DataFrame) -> str:
    found = speedup(runs, plain)
    if found is None:
        return NONE
    ratio, ends = found
    return f"{ratio:.2f}" + (f" [{ends[0]:.2f}-{ends[1]:.2f}]" if ends and ends[0] != ends[1] else "")


def _acceptance(runs: DataFrame, _: DataFrame) -> str:
    found = acceptance(runs)
    return NONE if found is None else f"{100 * found:.1f} %"


def _seconds_per_token(runs: DataFrame, _: DataFrame) -> str:
    seconds = by_prompt(runs.assign(seconds_per_token=1 / runs["rate"]), "seconds_per_token").mean()
    return f"{seconds:.5f}" + (f" ({path_length(runs):.2f})" if _drafts(runs) else "")


def _drafts(runs: DataFrame) -> bool:
    return "draft_n" in runs and bool((runs["draft_n"] > 0).any())


def _of_rounds(text: Callable[[DataFrame], str]) -> Callable[[DataFrame, DataFrame], str]:
    """A column's text for methods that report their rounds."""
    return lambda runs, _: text(runs) if "rounds" in runs and runs["rounds"].notna().any() else NONE


def _of_trees(text: Callable[[DataFrame], str]) -> Callable[[DataFrame, DataFrame], str]:
    return lambda runs, _: text(runs) if _drafts(runs) else NONE


def _mean(figure: str, digits: int, unit: str = "", factor: float = 1.0) -> Callable[[DataFrame], str]:
    return lambda runs: f"{factor * by_prompt(runs, figure).mean():.{digits}f}{unit}"


COLUMNS: Mapping[str, Column] = {
    "tokens/s": Column(
        "new tokens / wall-clock seconds, prefill included; mean ± standard deviation over prompts",
        lambda runs, _: spread(by_prompt(runs, "rate"), 1),
    ),
    "speedup": Column(
        f"mean tokens/s / plain decoding's; in brackets the {bootstrap.CONFIDENCE} % interval, by a paired bootstrap "
        "over prompts",
        _speedup,
    ),
    "TTFT ms": Column(
        "time to the first token, mean ± standard deviation over prompts",
        lambda runs, _: spread(1e3 * by_prompt(runs, "ttft"), 1),
    ),
    "TPOT ms": Column(
        "time per token after the first, mean ± standard deviation over prompts",
        lambda runs, _: spread(1e3 * by_prompt(runs, "tpot"), 2),
    ),
    "Accept.": Column("l-bar / K of a chain, l-bar / (D + 2) of a tree, D = D_0 of DynaTree", _acceptance),
    "L-bar": Column(
        "tokens of all rounds / all rounds, as T / mean #Iter.",
        _of_rounds(lambda runs: f"{tokens_per_round(runs):.2f}"),
    ),
    "l-bar": Column("mean over prompts of tokens a round", _of_trees(lambda runs: f"{path_length(runs):.2f}")),
    "#Iter.": Column("mean rounds; the prefill commits the first token and is none", _of_rounds(_mean("rounds", 0))),
    "s/token (tokens a step)": Column(
        "DySpec's: wall-clock seconds / new tokens, and l-bar, which counts the target's own token",
        _seconds_per_token,
    ),
    "per level": Column(
        "ours, mean over prompts: tokens of all rounds / summed depths of their trees",
        _of_trees(_mean("committed_per_level", 1, " %", 100)),
    ),
    "path": Column(
        "ours, mean over prompts: accepted nodes a round, no bonus token", _of_trees(_mean("mean_path_length", 2))
    ),
    "nodes accepted": Column(
        "ours, mean over prompts: accepted / drafted nodes", _of_trees(_mean("acceptance_rate", 1, " %", 100))
    ),
}
TABLE_1 = ("tokens/s", "speedup")
TABLE_2 = ("TTFT ms", "TPOT ms")
TABLE_3 = ("Accept.", "L-bar", "l-bar", "#Iter.")
DYSPEC = ("s/token (tokens a step)",)
OURS = ("per level", "path", "nodes accepted")


def as_published(
    title: str,
    runs: DataFrame,
    columns: Sequence[str],
    names: Mapping[str, str] | None = None,
    *,
    formulas: bool = True,
) -> Table:
    """A table with a row for each method and these columns.

    Args:
        title: Title of the table.
        runs: Runs of one report and one temperature, as `figures.frame` returns them.
        columns: Names of columns in `COLUMNS`.
        names: Names in the table of the methods to show, by label; None shows all methods under their labels.
        formulas: Whether notes give the columns' formulas.
    """
    plain = runs[runs["label"] == PLAIN.label]
    methods = by_label(runs)
    rows = [
        {"method": name, **{column: COLUMNS[column].text(methods[label], plain) for column in columns}}
        for label, name in (names or {label: label for label in methods}).items()
        if label in methods
    ]
    table = Table.of(title, rows)
    shown = list(map(str, table.frame))[1:] if formulas else []
    return replace(table, notes=[f"{column}: {COLUMNS[column].formula}" for column in shown])
