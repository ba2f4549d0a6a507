"""Add a machine, computed from saved measurements of `dynatree bench`, to a machines file.

python -m dynatree.replay.measured_machines FILE --name NAME --costs COSTS.json --compare A.json B.json ...
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from dynatree.bench.figures import by, round_seconds
from dynatree.bench.methods import PLAIN
from dynatree.bench.record import Report, Run, load
from dynatree.replay.machines import Curve, Machine, load_machines, to_json

CHAINS = "linear"  # the policy whose trees have one node per level
ROUND = "median over runs of plain decoding of (last arrival - first) / rounds - round_parts.verify_forward / rounds"
LEVEL = (
    "median over runs of chains (a level each node) of ((last arrival - first) / rounds - "
    "(round_parts.verify_forward + round_parts.draft_forward) / rounds - round_seconds) / nodes per round"
)


def machine(name: str, costs: Report, compared: Sequence[Report]) -> Machine:
    """The machine on which the cost curves, plain decoding and chains were measured."""
    runs = [run for report in compared for run in report["runs"] if run["statistics"]]
    round_, level = _overheads(runs)
    target = costs["models"]["target"]
    origin = f"{costs['machine']['cpu']}, {target['name']}, {target['dtype']}, commit {_commit([costs])}"
    overhead = f"{len(runs)} runs, commit {_commit(compared)}"
    return Machine(
        name=name,
        measured=True,
        sources={
            "verify": f"{origin}: curve nodes, median forward_seconds",
            "draft": f"{origin}: curve draft, median forward_seconds",
            "round_seconds": f"{overhead}: {ROUND}",
            "level_seconds": f"{overhead}: {LEVEL}",
        },
        verify=_curve(costs, "nodes", 1),
        draft=_curve(costs, "draft", 0),
        round_seconds=round_,
        level_seconds=level,
    )


def _overheads(runs: Iterable[Run]) -> tuple[float, float]:
    """`round_seconds` and `level_seconds`, by `ROUND` and `LEVEL`."""
    by_policy = by(runs, lambda run: run["policy"])
    plain = median(map(_beside, by_policy[PLAIN.policy]))
    level = median(max(_beside(run) - plain, 0.0) / _statistic(run, "nodes_per_round") for run in by_policy[CHAINS])
    return round(plain, 6), round(level, 6)


def _beside(run: Run) -> float:
    """Mean seconds of a round less its forward passes."""
    seconds = round_seconds(run)
    assert seconds is not None, "the run has rounds and arrivals"
    return seconds - _part(run, "verify_forward") - _part(run, "draft_forward")


def _part(run: Run, name: str) -> float:
    """Mean seconds of a part of the round, over a run."""
    assert run["statistics"] is not None
    return run["statistics"]["round_parts"][name]["total_seconds"] / run["statistics"]["rounds"]


def _statistic(run: Run, name: str) -> float:
    assert run["statistics"] is not None
    return float(run["statistics"][name])  # type: ignore[literal-required]


def _curve(costs: Report, curve: str, root: int) -> Curve:
    """Rows and median seconds of each point; a point has `root` rows more than nodes."""
    points = [point for point in costs["costs"]["points"] if point["curve"] == curve]
    return tuple((point["nodes"] + root, round(median(point["forward_seconds"]), 6)) for point in points)


def _commit(reports: Sequence[Report]) -> str:
    commits = dict.fromkeys((report["git"] or {"commit": "unknown"})["commit"][:7] for report in reports)
    return ", ".join(commits)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file; the machine replaces an earlier one of the same name."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("machines", type=Path, metavar="FILE", help="file of machines; created if missing")
    parser.add_argument("--name", required=True, help="name of the machine")
    parser.add_argument("--costs", type=Path, required=True, help="measurement of `dynatree bench costs`")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        required=True,
        help="`dynatree bench compare` measurements of plain decoding and `linear`",
    )
    options = parser.parse_args(arguments)
    made = machine(options.name, load(options.costs), [load(path) for path in options.compare])
    kept = load_machines(options.machines) if options.machines.exists() else []
    others = [each for each in kept if each.name != made.name]
    options.machines.write_text(to_json([made, *others]), encoding="utf-8")


if __name__ == "__main__":
    main()
