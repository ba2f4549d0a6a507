"""The figures of the papers' tables: the presets of `dynatree bench paper` and their records."""

from __future__ import annotations

from functools import cache

from figures import HERE, SUFFIX

from dynatree.bench.paper.presets import PRESETS, Experiment
from dynatree.bench.paper.views import VIEWS
from dynatree.bench.record import Report, load
from dynatree.bench.table import to_markdown


@cache
def records() -> dict[Experiment, Report]:
    """What `benchmarks/paper.sh` has kept."""
    experiments = dict.fromkeys(each for preset in PRESETS for each in preset.experiments)
    files = {each: HERE / "paper" / f"{each.name}{SUFFIX}" for each in experiments}
    return {each: load(path) for each, path in files.items() if path.exists()}


def table(version: str, item: str) -> str:
    """A preset's tables, of the records that there are."""
    [preset] = [each for each in PRESETS if (each.version, each.item) == (version, item)]
    found = {each: records()[each] for each in preset.experiments if each in records()}
    if preset.experiments and not found:
        return "Not run here yet."
    tables_of_preset, _ = VIEWS[preset.name](preset, found)
    return "\n\n".join(to_markdown(each) for each in tables_of_preset)


def machine() -> str:
    """What the records ran on."""
    reports = list(records().values())
    if not reports:
        return "Nothing was run here yet."
    machines = dict.fromkeys(f"{each['machine']['cpu_count']} cores of {each['machine']['cpu']}" for each in reports)
    models = dict.fromkeys(f"{each['models'][name]['name']}" for each in reports for name in ("target", "draft"))
    commits = dict.fromkeys(each["git"]["commit"][:12] for each in reports if each["git"])
    return f"Measured with {' and '.join(models)} on {', '.join(machines)}, at commit {', '.join(commits)}."
