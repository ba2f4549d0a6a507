"""Makes the machines file out of saved measurements of `dynatree bench`.

python -m dynatree.bench.replay.measured_machines benchmarks --out benchmarks/replay/costs.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from dynatree.bench.figures import by, round_seconds
from dynatree.bench.methods import PLAIN
from dynatree.bench.record import Report, Run, load
from dynatree.bench.replay.machines import Curve, Machine, to_json

LARGE = "2.8B-shaped pair, bfloat16, 2 threads"
CHAINS = ("linear", "linear:depth=5")
# (name, folder, what the processor is)
MACHINES = (
    ("2.8b-amx", ".", "Intel Xeon with AMX"),
    ("2.8b-avx512", "avx512", "AMD EPYC with AVX-512"),
    ("2.8b-avx2", "avx2", "AMD EPYC with AVX2"),
)
RUNS = ("book-t100", "wikitext-2-t100", "c4-t100", "openwebtext-t100", "spec-bench-t100")
EMBEDDED_RUNS = "compare-embedded-book.json"


def expected_gpu() -> Machine:
    """What design notes expect of an H100 once forwards are captured whole: not measured.

    A plain step of 2.8 ms, of which host and gRPC have 1.0; 2.45 ms for 64 rows; 0.45 ms more arithmetic for each
    further 64; a level 0.2 ms.
    """
    return Machine(
        name="2.8b-h100-expected",
        measured=False,
        sources={
            "verify": "expected, not measured: design notes on a GPU, column 'after': plain step 2.8 ms less 1.0 of "
            "the host, 64 rows 2.3 to 2.6 ms, 0.45 ms of arithmetic for each 64 rows",
            "draft": "expected, not measured: the same, one level 0.2 ms",
            "round_seconds": "expected, not measured: the same, host and gRPC 1.0 to 1.5 ms",
            "level_seconds": "expected, not measured: none, levels are grown in one graph",
        },
        verify=((1, 0.0018), (64, 0.00245), (128, 0.0029), (257, 0.0038)),
        draft=((1, 0.0002),),
        round_seconds=0.001,
        level_seconds=0.0,
    )


def large_machine(benchmarks: Path, name: str, folder: str, processor: str) -> Machine:
    """A processor on which both cost curves and policies were measured."""
    root = benchmarks / folder
    costs = load(root / "costs-2.8b.json")
    files = [root / f"compare-2.8b-{runs}.json" for runs in RUNS]
    compared = [load(file) for file in files if file.exists()]
    round_, level = overheads(run for report in compared for run in report["runs"])
    place = "benchmarks" if folder == "." else f"benchmarks/{folder}"
    origin = f"{place}/costs-2.8b.json, commit {_commit([costs])}, {processor}, {LARGE}"
    overhead = f"{place}/compare-2.8b-*-t100.json ({len(compared)} files), commits {_commit(compared)}"
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


def embedded_machine(benchmarks: Path) -> Machine:
    """The embedded pair, whose forwards are known from runs of the policies alone."""
    report = load(benchmarks / EMBEDDED_RUNS)
    runs = [run for run in report["runs"] if run["statistics"]]
    sizes = []
    for same in by(runs, lambda run: run["label"]).values():
        if min(map(_nodes, same)) >= 0.9 * max(map(_nodes, same)):  # of about one size
            sizes.append((round(median(map(_nodes, same))) + 1, median(_part(run, "verify_forward") for run in same)))
    chains = [run for run in runs if run["label"] in CHAINS]
    round_, level = overheads(runs)
    source = f"benchmarks/{EMBEDDED_RUNS}, commit {_commit([report])}"
    origin = f"{source}, Intel Xeon with AMX, embedded pair, float32, 2 threads"
    return Machine(
        name="embedded-amx",
        measured=True,
        sources={
            "verify": f"{origin}: for each policy whose trees have about one size, 1 + nodes per round, and the median "
            "over runs of round_parts.verify_forward / rounds; a smaller size is never dearer than a larger one",
            "draft": f"{origin}: median over runs of chains of round_parts.draft_forward / levels",
            "round_seconds": f"{origin}: {ROUND}",
            "level_seconds": f"{origin}: {LEVEL}",
        },
        verify=_rising(sizes),
        draft=((1, round(median(_part(run, "draft_forward") / _nodes(run) for run in chains), 6)),),
        round_seconds=round_,
        level_seconds=level,
    )


ROUND = "median over runs of plain decoding of (last arrival - first) / rounds - round_parts.verify_forward / rounds"
LEVEL = (
    "median over runs of chains (a level each node) of ((last arrival - first) / rounds - "
    "(round_parts.verify_forward + round_parts.draft_forward) / rounds - round_seconds) / nodes per round"
)


def overheads(runs: Iterable[Run]) -> tuple[float, float]:
    """`round_seconds` and `level_seconds`, by `ROUND` and `LEVEL`."""
    beside = by(((run["label"], run, _beside(run)) for run in runs if run["statistics"]), lambda measured: measured[0])
    plain = median(seconds for _, _, seconds in beside[PLAIN.label])
    chains = [(run, seconds) for label in CHAINS for _, run, seconds in beside.get(label, ())]
    level = median(max(seconds - plain, 0.0) / _nodes(run) for run, seconds in chains)
    return round(plain, 6), round(level, 6)


def _beside(run: Run) -> float:
    """What a round takes beside its forwards."""
    seconds = round_seconds(run)
    assert seconds is not None, "the run has rounds and arrivals"
    return seconds - _part(run, "verify_forward") - _part(run, "draft_forward")


def _part(run: Run, name: str) -> float:
    """A part of the round, its mean in a run."""
    assert run["statistics"] is not None
    total: float = run["statistics"]["round_parts"][name]["total_seconds"]
    return total / int(run["statistics"]["rounds"])


def _nodes(run: Run) -> float:
    assert run["statistics"] is not None
    return float(run["statistics"]["nodes_per_round"])


def _curve(costs: Report, curve: str, root: int) -> Curve:
    """Rows and median seconds; `root` rows beside a point's nodes."""
    points = [point for point in costs["costs"]["points"] if point["curve"] == curve]
    return tuple((point["nodes"] + root, round(median(point["forward_seconds"]), 6)) for point in points)


def _rising(points: Iterable[tuple[int, float]]) -> Curve:
    """One point a size, none dearer than a larger one's."""
    sizes = sorted(by(points, lambda point: point[0]).items())
    seconds = [median(seconds for _, seconds in same) for _, same in sizes]
    return tuple((rows, round(min(seconds[place:]), 6)) for place, (rows, _) in enumerate(sizes))


def _commit(reports: Sequence[Report]) -> str:
    commits = dict.fromkeys((report["git"] or {}).get("commit", "unknown")[:7] for report in reports)
    return ", ".join(commits)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("benchmarks", type=Path, help="the folder of saved measurements")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    machines = [large_machine(options.benchmarks, *machine) for machine in MACHINES]
    machines += [expected_gpu(), embedded_machine(options.benchmarks)]
    options.out.write_text(to_json(machines), encoding="utf-8")


if __name__ == "__main__":
    main()
