"""The tables of DynaTree's paper, of sampling schemes, and of acceptance by rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

from dynatree.bench.figures import by, rate
from dynatree.bench.methods import BACKBONE, DYNAMIC, DYNATREE, FIXED, LINEAR, PLAIN, READINGS, SMALL_FIXED
from dynatree.bench.ranks import add_ranks, sequoia_rates
from dynatree.bench.record import Report, Run
from dynatree.bench.tables.cells import equal, mean, sampling
from dynatree.bench.tables.table import NONE, Table


def ablation(report: Report) -> Iterator[Table]:
    """DynaTree's Tables 4 and 3, for each temperature."""
    for temperature, group in by(report["runs"], lambda run: run["temperature"]).items():
        by_label = by(group, lambda run: run["label"])
        yield _table_4(by_label, f"temperature {temperature:g}")
        yield _table_3(by_label, f"temperature {temperature:g}")


def _table_4(by_label: dict[str, list[Run]], title: str) -> Table:
    """DynaTree's Table 4: throughput, mean and standard deviation over prompts, and what each component adds.

    The paper's fixed tree (D = 5, B = 2) is the row with tau = 0.05: policy `dynatree` with every component switched
    off, so that the rows below it differ from it, and from each other, in that component only; delta is against it.
    The row with tau = 0.1 is policy `fixed`, with the pruning of the paper's tuned baseline. The rows below DynaTree's
    are what the paper leaves open.
    """
    means = {label: fmean(_rates_by_prompt(each)) for label, each in by_label.items()}
    rows = []
    for label in (method.label for method in (SMALL_FIXED, BACKBONE, DYNAMIC, DYNATREE, *READINGS)):
        if label not in by_label:
            continue
        rates = _rates_by_prompt(by_label[label])
        rows.append(
            [
                label,
                f"{means[label]:.1f} ± {stdev(rates) if len(rates) > 1 else 0.0:.1f}",
                f"{means[label] / means[PLAIN.label]:.2f}" if PLAIN.label in means else NONE,
                f"{100 * (means[label] / means[BACKBONE.label] - 1):+.1f} %" if BACKBONE.label in means else NONE,
            ]
        )
    headings = ["variant", "throughput (tokens/s)", "speedup", "delta vs fixed"]
    return Table(f"Ablation (Table 4), {title}", headings, rows)


def _table_3(by_label: dict[str, list[Run]], title: str) -> Table:
    """DynaTree's Table 3. Accept. is the paper's: tokens committed by rounds / levels drafted, which may exceed 100 %.

    The prompt's own forward commits the first token and is not an iteration, so plain decoding takes T - 1 of them.
    """
    rows = []
    names = {LINEAR.label: LINEAR.label, FIXED.label: FIXED.label, DYNATREE.label: "DynaTree"}
    for label, name in ({PLAIN.label: "autoregressive"} | names).items():
        if label not in by_label:
            continue
        runs, plain = by_label[label], label == PLAIN.label
        rows.append(
            [
                name,
                NONE if plain else f"{mean(runs, 'committed_per_level', 1, 100)} %",
                mean(runs, "tokens_per_round", 2),
                NONE if plain else mean(runs, "mean_path_length", 2),
                mean(runs, "rounds", 0),
            ]
        )
    headings = ["method", "Accept.", "L-bar", "l-bar", "#Iter."]
    return Table(f"Verification efficiency (Table 3), {title}", headings, rows)


def coupling(report: Report) -> Iterator[Table]:
    """Tokens per round by scheme: what sharing the noise is worth, and what residual sampling reaches instead."""
    drafting = [run for run in report["runs"] if run["label"] != PLAIN.label]
    schemes = list(by(drafting, lambda run: run["scheme"]))
    rows = []
    for temperature, group in by(drafting, lambda run: run["temperature"]).items():
        for label, each in by(group, lambda run: run["label"]).items():
            cells = ([run for run in each if run["scheme"] == scheme] for scheme in schemes)
            figures = [mean(cell, "tokens_per_round", 2) for cell in cells]
            rows.append([label, f"{temperature:g}", *figures, equal(each, report["models"]["target"]["dtype"])])
    headings = ["policy", "T", *(scheme or "greedy" for scheme in schemes), "equal\nto\nplain"]
    yield Table("Coupling: tokens per round", headings, rows)


def ranks(report: Report) -> Iterator[Table]:
    """How often the target chose the draft's k-th guess, p_k, and the settings of policy `sequoia` that say so."""
    for temperature, group in by(report["runs"], lambda run: run["temperature"]).items():
        counts = add_ranks([run["ranks"] for run in group])
        trials = counts["trials"]
        hits = [(f"p{rank}", hits) for rank, hits in enumerate(counts["hits"], start=1)]
        hits += [("none of them", trials - sum(counts["hits"])), ("all", trials)]
        rows = [[name, str(each), f"{each / trials:.4f}" if trials else NONE] for name, each in hits]
        notes = []
        if trials:
            rates = ",".join(f"{rate:g}" for rate in sequoia_rates(counts))
            notes = [
                f"to use them: --policy sequoia --set rates={rates}",
                f"in dynatree bench: --policy sequoia:rates={rates}",
            ]
        yield Table(f"Acceptance by rank, {sampling(temperature, group)}", ["guess", "chosen", "share"], rows, notes)


def _rates_by_prompt(runs: Sequence[Run]) -> list[float]:
    """Each prompt's rate, the mean over its repetitions."""
    return [fmean(map(rate, group)) for group in by(runs, lambda run: run["prompt"]).values()]
