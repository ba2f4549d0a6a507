"""The tables of a report, made of its records alone.

Unless a title says otherwise a figure is the mean over runs, that is over prompts and repetitions, of the figure of the
same name in `dynatree.client.Statistics`; and the rate of a run is its new tokens / wall-clock seconds, the prompt's
forward included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median, quantiles, stdev
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from dynatree.bench.methods import BACKBONE, DYNAMIC, DYNATREE, FIXED, LINEAR, PLAIN, SMALL_FIXED
from dynatree.bench.ranks import add_ranks, sequoia_settings
from dynatree.bench.report import Report, Run

K = TypeVar("K")

NONE = "-"
_WIDTH = 140  # where the output is not a terminal


def print_report(report: Report) -> None:
    """Print a report's tables on standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(_heading(report), soft_wrap=True)
    for each in _TABLES[report["command"]](report["runs"]):
        if isinstance(each, Table):
            console.print()
        console.print(each, soft_wrap=isinstance(each, str))
    console.print()
    for remark in _remarks(report):
        console.print(remark, soft_wrap=True)


def unequal(runs: Iterable[Run]) -> list[Run]:
    """The runs whose tokens should be those of plain decoding, and are not."""
    return [run for run in runs if run["equal"] is False]


def _heading(report: Report) -> str:
    target, draft = report["models"]["target"], report["models"]["draft"]
    prompts, options = report["prompts"], report["options"]
    lengths = sorted({min(prompts["tokens"], default=0), max(prompts["tokens"], default=0)})
    return escape(
        f"target {target['name']} ({target['dtype']}, {target['device']}), "
        f"draft {draft['name']} ({draft['dtype']}, {draft['device']}); "
        f"prompts: {prompts['count']} from {prompts['file']}, of {' to '.join(map(str, lengths))} tokens; "
        f"new tokens: {options['max_new_tokens']}; repetitions: {options['repetitions']}"
    )


def _remarks(report: Report) -> Iterator[str]:
    for scheme in dict.fromkeys(skipped["scheme"] for skipped in report["skipped"]):
        labels = [skipped["label"] for skipped in report["skipped"] if skipped["scheme"] == scheme]
        yield escape(f"not run, because scheme {scheme} does not allow them: {', '.join(labels)}")
    wrong = unequal(report["runs"])
    for run in wrong[:10]:
        sampling = f", {run['scheme']}, seed {run['seed']}" if run["scheme"] else ""
        where = f"{run['label']}, temperature {run['temperature']:g}{sampling}, prompt {run['prompt']}"
        yield "[bold red]NOT EQUAL to plain decoding:[/] " + escape(where)
    if len(wrong) > 10:
        yield f"[bold red]and {len(wrong) - 10} more[/]"
    checked = sum(run["equal"] is not None for run in report["runs"])
    if checked and not wrong:
        yield f"equal to plain decoding: all of {checked} outputs"
    if not report["complete"]:
        yield "[bold]The measurement was interrupted: not every run is there.[/]"


def _compare(runs: Sequence[Run]) -> Iterator[RenderableType]:
    """A table for each temperature. Tokens/s are the median and the quartiles over runs.

    Speedup is the median over runs of the rate / that of plain decoding on the same prompt in the same repetition.
    """
    for temperature, group in _by(runs, lambda run: run["temperature"]):
        scheme = next((run["scheme"] for run in group if run["scheme"]), None)
        table = _table(
            f"temperature {temperature:g}" + (f", scheme {scheme}" if scheme else ", greedy"),
            "policy",
            "tokens\nper\nround",
            "nodes\nper\nround",
            "accept-\nance %",
            "commit-\nted per\nlevel",
            "rounds",
            "tokens\n/s",
            "quartiles",
            "speed-\nup",
            "equal\nto\nplain",
        )
        plain = {_place(run): _rate(run) for run in group if run["label"] == PLAIN.label}
        for label, each in _by(group, lambda run: run["label"]):
            drafted = any(run["statistics"]["draft_n"] for run in each)
            speedups = [_rate(run) / plain[_place(run)] for run in each if _place(run) in plain]
            table.add_row(
                escape(label),
                f"{_mean(each, 'tokens_per_round'):.2f}",
                f"{_mean(each, 'nodes_per_round'):.1f}",
                f"{100 * _mean(each, 'acceptance_rate'):.1f}" if drafted else NONE,
                f"{_mean(each, 'committed_per_level'):.2f}" if drafted else NONE,
                f"{_mean(each, 'rounds'):.1f}",
                _speed(median(map(_rate, each))),
                _quartiles([_rate(run) for run in each]),
                f"{median(speedups):.2f}" if speedups else NONE,
                _equal(each),
            )
        yield table


def _ablation(runs: Sequence[Run]) -> Iterator[RenderableType]:
    for temperature, group in _by(runs, lambda run: run["temperature"]):
        by_label = dict(_by(group, lambda run: run["label"]))
        yield _table_4(by_label, f"temperature {temperature:g}")
        yield _table_3(by_label, f"temperature {temperature:g}")


def _table_4(by_label: dict[str, list[Run]], title: str) -> Table:
    """DynaTree's Table 4: throughput, mean and standard deviation over prompts, and what each component adds.

    The paper's fixed tree (D = 5, B = 2) is the row with tau = 0.05: policy `dynatree` with every component switched
    off, so that the rows below it differ from it, and from each other, in that component only; delta is against it.
    The row with tau = 0.1 is policy `fixed`, with the pruning of the paper's tuned baseline.
    """
    table = _table(f"Ablation (Table 4), {title}", "variant", "throughput (tokens/s)", "speedup", "delta vs fixed")
    mean = {label: fmean(_rates_by_prompt(each)) for label, each in by_label.items()}
    for label in (SMALL_FIXED.label, BACKBONE.label, DYNAMIC.label, DYNATREE.label):
        if label not in by_label:
            continue
        rates = _rates_by_prompt(by_label[label])
        table.add_row(
            escape(label),
            f"{mean[label]:.1f} ± {stdev(rates) if len(rates) > 1 else 0.0:.1f}",
            f"{mean[label] / mean[PLAIN.label]:.2f}" if PLAIN.label in mean else NONE,
            f"{100 * (mean[label] / mean[BACKBONE.label] - 1):+.1f} %" if BACKBONE.label in mean else NONE,
        )
    return table


def _table_3(by_label: dict[str, list[Run]], title: str) -> Table:
    """DynaTree's Table 3. Accept. is the paper's: tokens committed by rounds / levels drafted, which may exceed 100 %.

    The prompt's own forward commits the first token and is not an iteration, so plain decoding takes T - 1 of them.
    """
    table = _table(f"Verification efficiency (Table 3), {title}", "method", "Accept.", "L-bar", "l-bar", "#Iter.")
    names = {LINEAR.label: LINEAR.label, FIXED.label: FIXED.label, DYNATREE.label: "DynaTree"}
    for label, name in ({PLAIN.label: "autoregressive"} | names).items():
        if label in by_label:
            runs = by_label[label]
            table.add_row(
                escape(name),
                NONE if label == PLAIN.label else f"{100 * _mean(runs, 'committed_per_level'):.1f} %",
                f"{_mean(runs, 'tokens_per_round'):.2f}",
                NONE if label == PLAIN.label else f"{_mean(runs, 'mean_path_length'):.2f}",
                f"{_mean(runs, 'rounds'):.0f}",
            )
    return table


def _coupling(runs: Sequence[Run]) -> Iterator[RenderableType]:
    """Tokens per round by scheme: what sharing the noise is worth, and what residual sampling reaches instead."""
    drafting = [run for run in runs if run["label"] != PLAIN.label]
    schemes = list(dict.fromkeys(run["scheme"] for run in drafting))
    headings = [scheme or "greedy" for scheme in schemes]
    table = _table("Coupling: tokens per round", "policy", "T", *headings, "equal\nto\nplain")
    for temperature, group in _by(drafting, lambda run: run["temperature"]):
        for label, each in _by(group, lambda run: run["label"]):
            cells = ([run for run in each if run["scheme"] == scheme] for scheme in schemes)
            figures = [f"{_mean(cell, 'tokens_per_round'):.2f}" if cell else NONE for cell in cells]
            table.add_row(escape(label), f"{temperature:g}", *figures, _equal(each))
    yield table


def _ranks(runs: Sequence[Run]) -> Iterator[RenderableType]:
    """How often the target chose the draft's k-th guess, p_k, and the settings of policy `sequoia` that say so."""
    for (temperature, scheme), group in _by(runs, lambda run: (run["temperature"], run["scheme"])):
        counts = add_ranks([run["ranks"] for run in group])
        trials = counts["trials"]
        title = f"Acceptance by rank, temperature {temperature:g}" + (f", scheme {scheme}" if scheme else ", greedy")
        table = _table(title, "guess", "chosen", "share")
        rows = [(f"p{rank}", hits) for rank, hits in enumerate(counts["hits"], start=1)]
        for name, hits in (*rows, ("none of them", trials - sum(counts["hits"])), ("all", trials)):
            table.add_row(name, str(hits), f"{hits / trials:.4f}" if trials else NONE)
        yield table
        if trials:
            settings = [f"{name}={rate:g}" for name, rate in sequoia_settings(counts).items()]
            yield ""
            yield "to use them: --policy sequoia " + " ".join(f"--set {each}" for each in settings)
            yield "in dynatree bench: --policy sequoia:" + ",".join(settings)


_TABLES: dict[str, Callable[[Sequence[Run]], Iterator[RenderableType]]] = {
    "compare": _compare,
    "ablation": _ablation,
    "coupling": _coupling,
    "ranks": _ranks,
}


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(
        title=title, title_justify="left", min_width=len(title), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _by(runs: Iterable[Run], key: Callable[[Run], K]) -> Iterator[tuple[K, list[Run]]]:
    """The runs in groups of equal keys, in the order in which the keys first appear."""
    groups: dict[K, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    yield from groups.items()


def _place(run: Run) -> tuple[int, int]:
    return run["prompt"], run["repetition"]


def _rate(run: Run) -> float:
    return run["tokens"] / run["wall_seconds"]


def _rates_by_prompt(runs: Sequence[Run]) -> list[float]:
    """Each prompt's rate, the mean over its repetitions."""
    return [fmean(map(_rate, group)) for _, group in _by(runs, lambda run: run["prompt"])]


def _mean(runs: Sequence[Run], name: str) -> float:
    return fmean(run["statistics"][name] for run in runs)


def _speed(rate: float) -> str:
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _quartiles(values: Sequence[float]) -> str:
    if len(values) == 1:
        return NONE
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{_speed(low)}-{_speed(high)}"


def _equal(runs: Sequence[Run]) -> str:
    checked = [run for run in runs if run["equal"] is not None]
    if not checked:
        return NONE
    wrong = len(unequal(checked))
    return f"[bold red]NO[/] ({wrong} of {len(checked)} differ)" if wrong else "yes"
