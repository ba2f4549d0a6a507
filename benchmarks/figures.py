"""The figures of README.md and docs/ from the JSON in benchmarks/, as Markdown.

The documents hold blocks of cog, which call the functions of this module, `operation_figures` and `paper_figures`;
`dynatree.bench.figures` defines rates and ratios. `make figures` fails where a block is not what these make of the
JSON, and where a figure stands outside of a block (`check_figures.py`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from pandas import DataFrame

from dynatree.bench.figures import Cell, by, cells, frame
from dynatree.bench.load.figures import load_runs
from dynatree.bench.methods import PLAIN
from dynatree.bench.record import Report, load
from dynatree.bench.table import NONE, figure, to_markdown
from dynatree.bench.tables import tables

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SUFFIX = ".json.gz"
TEXTS = {
    "wikitext-2": "WikiText-2",
    "book": "a book",
    "c4": "C4",
    "openwebtext": "OpenWebText",
    "spec-bench": "Spec-Bench",
}
NAMES = {
    "autoregressive": "plain decoding",
    "transformers": "transformers",
    "transformers assisted": "transformers, assisted",
    "transformers prompt lookup": "transformers, prompt lookup",
    "throughput": "**DynaTree** (`throughput`)",
    "dynatree": "policy `dynatree`",
}
LLAMA_CPP = "llama.cpp"
QUANTISED = {"Q8_0": "int8", "Q4_K_M": "int4", "Q4_0": "int4"}  # llama.cpp's types, and our weights beside them


@cache
def report(name: str) -> Report:
    """A file of results."""
    return load(RESULTS / f"{name}{SUFFIX}")


@cache
def runs(name: str, temperature: float = 0.0) -> DataFrame:
    """The runs of a file at one temperature."""
    every = frame(report(name))
    return every[every["temperature"] == temperature]


def rate(name: str, label: str, over: str | None = None, temperature: float = 0.0) -> Cell:
    """A method's tokens a second, or its ratio to another's."""
    return cells(runs(name, temperature), "rate", over=over)[label]


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table."""
    table = DataFrame(rows, dtype=object).fillna(NONE)
    sides = ["left", *["right"] * (len(table.columns) - 1)]
    return str(table.to_markdown(index=False, colalign=sides, disable_numparse=True))


def name_of(label: str) -> str:
    """A method as tables call it."""
    return NAMES.get(label, label if label.startswith(LLAMA_CPP) else f"`{label}`")


def texts() -> dict[str, str]:
    """Of `TEXTS` those that were measured."""
    return {name: text for name, text in TEXTS.items() if name in results()}


def headline() -> str:
    """README's table: the default policy beside plain decoding, transformers and llama.cpp, on the texts of both."""
    rows = []
    for label in ("transformers", "transformers assisted", LLAMA_CPP, best_drafting(), PLAIN.label, "throughput"):
        row = {"method": name_of(label)}
        for name in llama_cpp_texts():
            file = f"llama-cpp-{name}" if label.startswith(LLAMA_CPP) else name
            row[f"{TEXTS[name]}, tokens/s"] = f"{rate(file, label).median:.1f}"
            row[f"x plain, {TEXTS[name]}"] = figure(rate(file, label, PLAIN.label), 1)
        rows.append(row)
    return markdown(rows)


def llama_cpp_texts() -> list[str]:
    """The texts on which llama.cpp was measured."""
    return [name for name in texts() if f"llama-cpp-{name}" in results()]


@cache
def best_drafting() -> str:
    """The fastest of llama.cpp's drafting lengths, by the sum of its medians over the texts."""
    found = [cells(runs(f"llama-cpp-{name}"), "rate") for name in llama_cpp_texts()]
    return max(
        (label for label in found[0] if label.startswith(f"{LLAMA_CPP}, drafting")),
        key=lambda label: sum(each[label].median for each in found),
    )


def headline_conditions() -> str:
    """How many prompts stand behind README's table, and what llama.cpp's drafting is the best of."""
    first, second = llama_cpp_texts()
    prompts, beside = rate(first, "throughput"), rate(f"llama-cpp-{first}", "throughput")
    labels = runs(f"llama-cpp-{first}")["label"].unique()
    lengths = [label.rpartition(" ")[2] for label in labels if "drafting" in label]
    again = " and ".join(f"{rate(f'llama-cpp-{name}', 'throughput').median:.1f}" for name in (first, second))
    return (
        f"tokens/s is new tokens / wall-clock seconds of a completion, the median over {prompts.prompts} prompts of a "
        f"text ({beside.prompts} for llama.cpp). x plain is the median over prompts of the ratio to plain decoding, "
        f"with the range. llama.cpp ran separately, in 16 bits; in that run DynaTree generated {again} tokens/s. The "
        f"table has the best of llama.cpp's draft lengths, which were {', '.join(lengths)} tokens."
    )


def headline_summary() -> str:
    """The range of the texts' median ratios of the default policy: to its own plain decoding, and to the others'."""
    beside = [f"llama-cpp-{name}" for name in llama_cpp_texts()]
    files = [(f"llama-cpp-{name}-{kind}", f"{LLAMA_CPP} {kind}") for kind in QUANTISED for name in llama_cpp_texts()]
    quantised = [rate(file, "throughput", fastest(file, plain)).median for file, plain in files]
    return (
        f"By these medians, DynaTree is {span(PLAIN.label, texts())} times as fast as its own plain decoding and "
        f"{span('transformers', texts())} times as fast as transformers' `generate()` ({len(texts())} texts). It is "
        f"{span(LLAMA_CPP, beside)} times as fast as llama.cpp without a draft and "
        f"{span(best_drafting(), beside)} times as fast as llama.cpp with the same draft ({len(beside)} texts). With "
        f"weights in 8 and 4 bits, it is {min(quantised):.1f} to {max(quantised):.1f} times as fast as llama.cpp with "
        f"weights of the same width ({', '.join(QUANTISED)}), with or without the draft, whichever is faster."
    )


def span(over: str, names: Iterable[str]) -> str:
    """The lowest and the highest of the files' ratios of the default policy."""
    found = [rate(name, "throughput", over).median for name in names]
    return f"{min(found):.1f} to {max(found):.1f}"


def by_text(over: str) -> str:
    """Method x text: ratios to a method."""
    tables = {text: cells(runs(name), "rate", over=over) for name, text in texts().items()}
    labels = dict.fromkeys(kind_of(label) for each in tables.values() for label in each)
    rows = []
    for kind in labels:
        found = {text: {kind_of(label): cell for label, cell in each.items()} for text, each in tables.items()}
        rows.append({"method": kind} | {text: figure(each.get(kind), interval=True) for text, each in found.items()})
    return markdown(rows)


def kind_of(label: str) -> str:
    """A method as tables over several texts call it."""
    return {"linear": "tuned chain", "fixed": "tuned tree"}.get(label.partition(":")[0], name_of(label))


def of(name: str, *overs: str, temperature: float = 0.0) -> str:
    """The methods of one file: tokens a second, ratios, trees, outputs that part."""
    here = runs(name, temperature)
    rates = cells(here, "rate")
    ratios = {over: cells(here, "rate", over=over) for over in overs}
    rows = []
    for label, cell in rates.items():
        same = here[here["label"] == label]
        rows.append(
            {
                "method": name_of(label),
                "tokens/s": figure(cell, 1),
                **{
                    f"x {name_of(over).replace('*', '')}": figure(each.get(label), interval=True)
                    for over, each in ratios.items()
                },
                "tokens a round": _mean(same, "tokens_per_round"),
                "prompts": str(cell.prompts),
                "outputs that part from plain": _parting(same),
            }
        )
    return markdown(rows)


def quantised() -> str:
    """Weights in 8 and 4 bits on the texts of both: llama.cpp by its types beside rounded weights of the same width."""
    rows = []
    for kind, ours in QUANTISED.items():
        for name, text in TEXTS.items():
            file = f"llama-cpp-{name}-{kind}"
            if file not in results():
                continue
            of_file = runs(file)
            rates = cells(of_file, "rate")
            plain = f"{LLAMA_CPP} {kind}"
            best = fastest(file, plain)
            rows.append(
                {
                    "weights": f"{ours}, {kind}",
                    "text": text,
                    "llama.cpp": figure(rates[plain], 1),
                    "llama.cpp's best": f"{figure(rates[best], 1)}{best.removeprefix(plain)}",
                    "plain decoding": figure(rates[PLAIN.label], 1),
                    NAMES["throughput"]: figure(rates["throughput"], 1),
                    "x llama.cpp's best": figure(rate(file, "throughput", best), interval=True),
                    "parting from its plain": _parting(of_file[of_file["label"] == "throughput"]),
                    "llama.cpp's, drafting": _parting(of_file[of_file["label"].str.startswith(f"{plain}, ")]),
                }
            )
    return markdown(rows)


def fastest(name: str, method: str) -> str:
    """The fastest of a file's methods whose labels begin alike."""
    rates = cells(runs(name), "rate")
    return max((each for each in rates if each.startswith(method)), key=lambda each: rates[each].median)


def _mean(same: DataFrame, name: str) -> str:
    values = same[name].dropna() if name in same else []
    return f"{sum(values) / len(values):.1f}" if len(values) else NONE


def _parting(same: DataFrame) -> str:
    for name, words in (("own_equal", " from its own"), ("equal", "")):
        checked = same[name].dropna()
        if len(checked):
            return f"{int((~checked.astype(bool)).sum())} of {len(checked)}{words}"
    return NONE


def sampling() -> str:
    """Greedy and sampled decoding side by side."""
    rows = []
    for temperature in (0.0, 0.7, 1.0):
        for label in ("throughput", "dynatree"):
            same = runs("sampling", temperature)
            rows.append(
                {
                    "temperature": f"{temperature:g}",
                    "policy": f"`{label}`",
                    "tokens/s": figure(rate("sampling", label, temperature=temperature), 1),
                    "x plain": figure(rate("sampling", label, PLAIN.label, temperature), interval=True),
                    "tokens a round": _mean(same[same["label"] == label], "tokens_per_round"),
                    "outputs that part from plain": _parting(same[same["label"] == label]),
                }
            )
    return markdown(rows)


def parting() -> str:
    """Every output of the large pair that parts from plain decoding, by method, with the margins."""
    every = [run for name in results() for run in report(name)["runs"] if report(name)["command"] == "compare"]
    checked = [run for run in every if run["equal"] is not None and run["temperature"] == 0]
    rows = []
    for label, same in by(checked, lambda run: kind_of(run["label"])).items():
        wrong = [run for run in same if not run["equal"]]
        margins = sorted(run["margin"] for run in wrong if "margin" in run)
        rows.append(
            {
                "method": label,
                "outputs": str(len(same)),
                "part from plain decoding": str(len(wrong)),
                "margins there, in logits": f"{margins[0]:.3g} to {margins[-1]:.3g}" if margins else NONE,
            }
        )
    return markdown(rows)


def results() -> list[str]:
    """The names of the files of results."""
    return sorted(path.name.removesuffix(SUFFIX) for path in RESULTS.glob(f"*{SUFFIX}"))


def clients() -> str:
    """Many clients at once."""
    rows: list[dict[str, str]] = []
    for load_, each in by(load_runs(report("many-clients")), lambda one: one.clients).items():
        rates = {one.label: one.throughput for one in each}
        plain, default = rates[PLAIN.label], rates["throughput"]
        assert plain is not None
        assert default is not None
        rows.append(
            {
                "clients": str(load_),
                **{name_of(label): figure(cell, 1) for label, cell in rates.items()},
                "x plain": f"{default.median / plain.median:.2f}",
            }
        )
    return markdown(rows)


def machine() -> str:
    """A sentence on what the results were measured on."""
    found = [report(name) for name in results()]
    commits = sorted({(each["git"] or {"commit": "unknown"})["commit"][:12] for each in found})
    cpus = sorted({f"{each['machine']['cpu_count']} cores of {each['machine']['cpu']}" for each in found})
    days = sorted(each["started"][:10] for each in found)
    speeds = [each["machine"]["read_bandwidth"] / 1e9 for each in found if each["machine"]["read_bandwidth"]]
    versions = found[0]["versions"]
    when = f"on {days[0]}" if days[0] == days[-1] else f"from {days[0]} to {days[-1]}"
    return (
        f"Measured {when} on {', '.join(cpus)}, whose memory gave {min(speeds):.0f} to "
        f"{max(speeds):.0f} GB/s, at commit {', '.join(commits)}, with torch {versions['torch']} and transformers "
        f"{versions['transformers']}."
    )


def printed(name: str) -> str:
    """The tables of `dynatree bench show` of one file: of a preset, whose methods have no names of their own here."""
    return "\n\n".join(to_markdown(table) for table in tables(report(name)))


def regrets() -> str:
    """What each objective loses against the size oracle, by text and kind of costs, and what its values promise."""
    found = json.loads(gzip.decompress((HERE / "replay" / "objectives.json.gz").read_bytes()))["results"]
    rules = list(dict.fromkeys(each["rule"] for each in found))

    def row(text: str, costs: str, same: list[dict[str, Any]], name: str, cell: str) -> dict[str, str]:
        values = {
            rule: [each[name] for each in same if each["rule"] == rule and each[name] is not None] for rule in rules
        }
        return {"text": text, "costs": costs, **{rule: format(fmean(values[rule]), cell) for rule in rules}}

    kinds = {"CPU": True, "GPU-like": False}
    rows = [
        row(
            text,
            kind,
            [each for each in found if (each["text"], each["measured"]) == (text, measured)],
            "regret",
            "+.0%",
        )
        for text in dict.fromkeys(each["text"] for each in found)
        for kind, measured in kinds.items()
    ]
    rows += [row("all, promised / accepted", "all", found, "promised", ".2f")]
    return markdown(rows)
