"""The tables of a replay, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynatree.bench import bootstrap
from dynatree.bench.figures import by
from dynatree.bench.table import NONE, Table
from dynatree.replay.runs import Result


def tables(results: Sequence[Result]) -> list[Table]:
    """One table of policies for each machine, temperature and length, fastest first."""
    groups = by(results, lambda result: (result.task.machine.name, result.task.group.name))
    return [_table(sorted(same, key=lambda result: -result.speedup)) for same in groups.values()]


def _table(results: Sequence[Result]) -> Table:
    machine, group = results[0].task.machine, results[0].task.group
    kind = "" if machine.measured else " (expected, not measured)"
    title = f"{machine.name}{kind}, temperature {group.temperature:g}, {group.new_tokens} new tokens"
    return Table.of(title, [_row(result) for result in results])


def _row(result: Result) -> dict[str, str]:
    speedups = result.speedups
    ends = bootstrap.interval(bootstrap.median, speedups)
    return {
        "policy": result.task.method.label,
        "x plain": _ratio(result.speedup),
        "range": f"{_ratio(min(speedups))}-{_ratio(max(speedups))}",
        f"{bootstrap.CONFIDENCE} % interval": "-".join(map(_ratio, ends)) if ends else NONE,
        "prompts": str(len(speedups)),
        "tokens per round": f"{result.tokens_per_round:.2f}",
        "nodes per round": f"{result.nodes_per_round:.1f}",
        "accepted": _percent(result.acceptance, 0),
        "not recorded": _percent(result.stood_in, 1),
    }


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def _percent(share: float | None, digits: int) -> str:
    return NONE if share is None else f"{100 * share:.{digits}f} %"


def to_dict(result: Result) -> dict[str, Any]:
    """A result as a JSON object: the table's figures, unrounded, and the figures of every run."""
    task = result.task
    return {
        "label": task.method.label,
        "policy": task.method.policy,
        "settings": dict(task.method.settings),
        "machine": task.machine.name,
        "temperature": task.group.temperature,
        "new_tokens": task.group.new_tokens,
        "speedup": result.speedup,
        "speedups": result.speedups,
        "rounds": [run.rounds for run in result.runs],
        "nodes": [run.nodes for run in result.runs],
        "tokens_per_round": result.tokens_per_round,
        "nodes_per_round": result.nodes_per_round,
        "acceptance": result.acceptance,
        "not_recorded": result.stood_in,
    }
