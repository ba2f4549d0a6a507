"""What is printed of a report: its models and prompts, its tables, and what else must be known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from dynatree.bench.figures import SIXTEEN_BIT, by, unequal
from dynatree.bench.record import Report, Run
from dynatree.bench.tables.costs import costs
from dynatree.bench.tables.load import failures, load
from dynatree.bench.tables.speed import compare, sweep
from dynatree.bench.tables.studies import ablation, coupling, ranks
from dynatree.bench.tables.table import Marked, Table, to_rich

_WIDTH = 140  # where the output is not a terminal


def print_report(report: Report) -> None:
    """Print a report's tables on standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(escape(heading(report)), soft_wrap=True)
    for table in tables(report):
        console.print()
        console.print(to_rich(table))
        for note in ("", *table.notes) if table.notes else ():
            console.print(escape(note), soft_wrap=True)
    console.print()
    for remark in remarks(report):
        style = "bold red" if isinstance(remark, Marked) else ""
        console.print(escape(remark), style=style, soft_wrap=True)


def tables(report: Report) -> list[Table]:
    """The tables of a report's command."""
    return list(_TABLES[report["command"]](report))


def remarks(report: Report) -> Iterator[str]:
    """What else must be known of a report; what went wrong is `Marked`."""
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
    """Forwards over different numbers of rows may round differently in 16 bits. The first token is token 1."""
    known = [agrees for run in wrong if (agrees := run.get("agrees")) is not None]
    first = f", the first at token {min(known) + 1}" if known else ""
    return f"{len(wrong)} of {checked} outputs part from plain decoding{first} ({dtype}: near-ties)"


def _differences(wrong: Sequence[Run]) -> Iterator[str]:
    for run in wrong[:10]:
        sampling = f", {run['scheme']}, seed {run['seed']}" if run["scheme"] else ""
        where = f"{run['label']}, temperature {run['temperature']:g}{sampling}, prompt {run['prompt']}"
        yield Marked(f"NOT EQUAL to plain decoding: {where}")
    if len(wrong) > 10:
        yield Marked(f"and {len(wrong) - 10} more")


def heading(report: Report) -> str:
    """The models, and the prompts where there are any."""
    target, draft = report["models"]["target"], report["models"]["draft"]
    models = (
        f"target {target['name']} ({target['dtype']}, {target['device']}), "
        f"draft {draft['name']} ({draft['dtype']}, {draft['device']})"
    )
    if report["command"] == "costs":
        return models
    prompts, options = report["prompts"], report["options"]
    lengths = sorted({min(prompts["tokens"], default=0), max(prompts["tokens"], default=0)})
    return (
        f"{models}; prompts: {prompts['count']} from {prompts['file']}, of {' to '.join(map(str, lengths))} tokens; "
        f"new tokens: {options['max_new_tokens']}; repetitions: {options['repetitions']}"
    )


_TABLES: dict[str, Callable[[Report], Iterable[Table]]] = {
    "compare": compare,
    "sweep": sweep,
    "ablation": ablation,
    "coupling": coupling,
    "ranks": ranks,
    "load": load,
    "costs": costs,
}
