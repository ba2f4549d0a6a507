"""Print a report: its models and prompts, its tables, and remarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from dynatree.bench.figures import SIXTEEN_BIT, by, unequal
from dynatree.bench.load.tables import failures
from dynatree.bench.record import Report, Run, precision_of
from dynatree.bench.table import Marked, Table, to_rich
from dynatree.bench.tables import tables

_WIDTH = 170  # width if the output is not a terminal
_NAMED = 10  # largest number of differences listed one by one


def print_report(report: Report) -> None:
    """Print a report's tables on standard output."""
    console = _console()
    console.print(escape(heading(report)), soft_wrap=True)
    print_tables(tables(report))
    console.print()
    print_remarks(remarks(report))


def print_tables(several: Iterable[Table]) -> None:
    """Print tables, each below an empty line, with their notes."""
    console = _console()
    for table in several:
        console.print()
        console.print(to_rich(table))
        for note in ("", *table.notes) if table.notes else ():
            console.print(escape(note), soft_wrap=True)


def print_remarks(lines: Iterable[str]) -> None:
    """Print remarks; those that report a failure are red."""
    for remark in lines:
        _console().print(escape(remark), style="bold red" if isinstance(remark, Marked) else "", soft_wrap=True)


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def remarks(report: Report) -> Iterator[str]:
    """Remarks on a report; those that report a failure are `Marked`."""
    for scheme, refused in by(report["skipped"], lambda skipped: skipped["scheme"]).items():
        labels = ", ".join(skipped["label"] for skipped in refused)
        yield f"not run, because scheme {scheme} does not allow them: {labels}"
    checked = [run for run in report["runs"] if run["equal"] is not None]
    wrong = unequal(checked)
    if wrong and report["models"]["target"]["dtype"] in SIXTEEN_BIT:
        yield _near_ties(wrong, len(checked), report["models"]["target"]["dtype"])
    elif wrong:
        yield from _differences(wrong)
    elif checked:
        yield f"equal to plain decoding: all of {len(checked)} outputs"
    yield from failures(report)
    if not report["complete"]:
        yield Marked("The measurement was interrupted: not every run is there.")


def _near_ties(wrong: Sequence[Run], checked: int, dtype: str) -> str:
    """Summarise differences that 16-bit rounding may explain; it varies with a pass's rows. Tokens count from 1."""
    methods = ", ".join(f"{label} {len(same)}" for label, same in by(wrong, lambda run: run["label"]).items())
    first = min(agrees for run in wrong if (agrees := run["agrees"]) is not None) + 1
    margins = sorted({run["margin"] for run in wrong if "margin" in run})
    told = f"; margins in logits {', '.join(f'{margin:.3g}' for margin in margins)}" if margins else ""
    return (
        f"{len(wrong)} of {checked} outputs part from plain decoding ({dtype}: near-ties), {methods}; "
        f"the first at token {first}{told}"
    )


def _differences(wrong: Sequence[Run]) -> Iterator[str]:
    for run in wrong[:_NAMED]:
        sampling = f", {run['scheme']}, seed {run['seed']}" if run["scheme"] else ""
        where = f"{run['label']}, temperature {run['temperature']:g}{sampling}, prompt {run['prompt']}"
        yield Marked(f"NOT EQUAL to plain decoding: {where}")
    if len(wrong) > _NAMED:
        yield Marked(f"and {len(wrong) - _NAMED} more")


def heading(report: Report) -> str:
    """A line that names the models and, if there are any, the prompts."""
    target, draft = report["models"]["target"], report["models"]["draft"]
    models = f"target {target['name']} ({precision_of(target)}, {target['device']})"
    if report["command"] != "rank":
        models += f", draft {draft['name']}"
        models += f" ({precision_of(draft)}, {draft['device']})" if draft["device"] else ""
    if report["command"] == "costs":
        return models
    prompts, options = report["prompts"], report["options"]
    lengths = sorted({min(prompts["tokens"], default=0), max(prompts["tokens"], default=0)})
    return (
        f"{models}; prompts: {prompts['count']} from {prompts['file']}, of {' to '.join(map(str, lengths))} tokens; "
        f"new tokens: {options['max_new_tokens']}; repetitions: {options['repetitions']}"
    )
