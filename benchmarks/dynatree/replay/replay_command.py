"""`dynatree bench replay`: run policies on recordings, without a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dynatree.bench.environment import environment
from dynatree.bench.methods import PLAIN, Method
from dynatree.bench.progress import progress_bar
from dynatree.bench.record import check_writable
from dynatree.bench.table import to_rich
from dynatree.common.errors import InvalidArgumentError
from dynatree.draft.policies import DEFAULT_POLICY, create_policy, policy_names
from dynatree.draft.policies.drawing import DEFAULT_DRAWING
from dynatree.replay import recording
from dynatree.replay.machines import Machine, load_machines
from dynatree.replay.recording import RecordedRun

if TYPE_CHECKING:  # the drafter and the verifier import torch; usage errors are reported without loading it
    from dynatree.replay.runs import Task

RESULTS_VERSION = 1
WIDTH = 130  # largest width of tables, in characters


def run(options: argparse.Namespace) -> int:
    """Replay policies on recordings, print the figures and save them.

    Raises:
        SystemExit: A file, a policy or a machine cannot be used.
    """
    if options.out is not None:
        check_writable(options.out)
    names = [DEFAULT_POLICY] if options.constants else policy_names()
    methods = options.policies or [Method(name, name) for name in names]
    check_methods(methods)
    runs = _runs(options)  # before the machines: an error should name a missing recording, not the costs beside it
    if options.objectives:
        _objectives(options)
        return 0
    if options.clients:
        _clients(methods, _machines(options), runs, options)
        return 0
    tasks = _tasks(methods, _machines(options), runs, options)
    if options.constants:
        _constants(tasks, options)
    else:
        _policies(tasks, options)
    return 0


def _runs(options: argparse.Namespace) -> list[RecordedRun]:
    runs = [run for path in options.recordings for run in recording.load(path).runs]
    wanted = [run for run in runs if run.temperature in (options.temperatures or [run.temperature])]
    if not wanted:
        raise SystemExit("no recorded run has such a --temperature")
    return wanted


def _tasks(
    methods: Sequence[Method], machines: Sequence[Machine], runs: Sequence[RecordedRun], options: argparse.Namespace
) -> list[Task]:
    from dynatree.replay.runs import Settings, Task, groups

    settings = Settings(options.fresh, options.noise, options.stalls, options.seed)
    return [
        Task(method, machine, group, settings) for machine in machines for group in groups(runs) for method in methods
    ]


def _policies(tasks: Sequence[Task], options: argparse.Namespace) -> None:
    from dynatree.replay.runs import replay_all
    from dynatree.replay.tables import tables, to_dict

    with progress_bar() as progress:
        results = list(progress.track(replay_all(tasks, options.processes), total=len(tasks), description="replay"))
    console = Console(width=WIDTH)
    for table in tables(results):
        console.print(to_rich(table))
        console.print()
    _save([to_dict(result) for result in results], options)


def _clients(
    methods: Sequence[Method], machines: Sequence[Machine], runs: Sequence[RecordedRun], options: argparse.Namespace
) -> None:
    from dynatree.replay.many import simulate, table, to_dict
    from dynatree.replay.runs import groups

    console, loads = Console(width=WIDTH), []
    for machine in machines:
        for group in groups(runs):
            here = [
                simulate(group.runs, method, machine, clients, options.rounds)
                for clients in options.clients
                for method in dict.fromkeys([PLAIN, *methods])
            ]
            console.print(to_rich(table(here, machine, group)))
            console.print()
            loads += [to_dict(load, group) for load in here]
    _save(loads, options)


def _objectives(options: argparse.Namespace) -> None:
    from dynatree.replay import objectives

    runs = [
        (recorded.header["texts"][run.text]["data_set"], run)
        for recorded in map(recording.load, options.recordings)
        for run in recorded.runs
        if run.temperature in (options.temperatures or [run.temperature])
    ]
    console, found = Console(width=WIDTH), []
    for judged in objectives.study(runs, _machines(options)):
        console.print(to_rich(objectives.table(judged)))
        console.print()
        found += [objectives.to_dict(each) for each in judged]
    _save(found, options)


def _constants(tasks: Sequence[Task], options: argparse.Namespace) -> None:
    from dynatree.replay import constants
    from dynatree.replay.runs import replay_all

    with progress_bar() as progress:
        changes = constants.changes(tasks, lambda tasks: replay_all(tasks, options.processes))
        found = list(progress.track(changes, total=len(constants.variants()), description="constants"))
    Console(width=WIDTH).print(to_rich(constants.table(found)))
    _save([constants.to_dict(change) for change in found], options)


def _save(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.out is None:
        return
    value = {
        "version": RESULTS_VERSION,
        "git": environment(None, None).git,
        "recordings": [path.name for path in options.recordings],
        "constants": options.constants,
        "options": {name: getattr(options, name) for name in ("fresh", "noise", "stalls", "seed", "clients", "rounds")},
        "results": results,
    }
    try:
        options.out.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"{options.out} cannot be written: {error.strerror}") from None


def _machines(options: argparse.Namespace) -> list[Machine]:
    path = options.machines or options.recordings[0].parent / "costs.json"
    machines = {machine.name: machine for machine in load_machines(path)}
    unknown = [name for name in options.machine if name not in machines]
    if unknown:
        raise SystemExit(f"{path} has no machine {', '.join(unknown)}; it has {', '.join(machines)}")
    return [machines[name] for name in options.machine or machines]


def check_methods(methods: Sequence[Method]) -> None:
    """Refuse policies that cannot be replayed.

    Raises:
        SystemExit: The policy or a setting does not exist, or a recording lacks data that the policy needs.
    """
    for method in methods:
        try:
            policy = create_policy(method.policy or "", dict(method.settings))
        except InvalidArgumentError as error:
            raise SystemExit(f"--policy {method.label}: {error}") from None
        if policy.drawing != DEFAULT_DRAWING:
            raise SystemExit(f"--policy {method.label}: a recording contains no draws and only one draft temperature")
