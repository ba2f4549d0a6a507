"""`dynatree bench record` and `dynatree bench replay`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dynatree.bench.environment import describe, environment
from dynatree.bench.methods import Method
from dynatree.bench.progress import progress_bar
from dynatree.bench.prompts import Prompts, Selection, load_tokenizer, read_prompts
from dynatree.bench.record import check_writable
from dynatree.bench.replay import constants, recording
from dynatree.bench.replay.machines import Machine, load_machines
from dynatree.bench.replay.recorder import ASKING, Recorder
from dynatree.bench.replay.recording import RecordedRun, Recording
from dynatree.bench.replay.runs import Settings, Task, groups, replay_all
from dynatree.bench.replay.tables import tables, to_dict
from dynatree.bench.tables.table import to_rich
from dynatree.client import ModelInfo
from dynatree.common import embedded
from dynatree.common.errors import FailedPreconditionError, InvalidArgumentError, StartupError
from dynatree.common.wire import model_info_to_pb
from dynatree.draft.policies import DEFAULT_POLICY, create_policy, policy_names

RESULTS_VERSION = 1
WIDTH = 130  # of the table of constants


def record(options: argparse.Namespace) -> int:
    """Record every prompt at every temperature.

    Raises:
        SystemExit: A file, a model or a prompt cannot be used.
    """
    import torch

    check_writable(options.out)
    if options.threads:
        torch.set_num_threads(options.threads)
    machines = load_machines(options.machines) if options.machines else []
    encode = load_tokenizer(options.target_model).encode
    selection = Selection(options.count, options.prompt_tokens, options.prompts_format, options.field, options.split)
    texts = [read_prompts(source, selection, encode) for source in options.prompts]
    try:
        recorder = Recorder.load(
            _path(options.target_model, embedded.target_path()),
            _path(options.draft_model, embedded.draft_path()),
            options.device or "auto",
            options.dtype or "auto",
            options.least_prob,
        )
    except (StartupError, FailedPreconditionError) as error:
        raise SystemExit(str(error)) from None
    runs = _record(recorder, texts, machines, options)
    header = {
        "models": {
            "target": describe(ModelInfo.from_pb(model_info_to_pb(recorder.target.info))),
            "draft": describe(ModelInfo.from_pb(model_info_to_pb(recorder.draft.info))),
        },
        "git": environment(None, None).git,
        "texts": [_describe(text) for text in texts],
        "options": {"least_prob": options.least_prob, "machines": [machine.name for machine in machines]},
    }
    recording.save(Recording(header, tuple(runs)), options.out)
    nodes = sum(len(run.nodes) for run in runs)
    print(f"{options.out}: {len(runs)} runs, {nodes} nodes, {options.out.stat().st_size} bytes")
    return 0


def _record(
    recorder: Recorder, texts: Sequence[Prompts], machines: Sequence[Machine], options: argparse.Namespace
) -> list[RecordedRun]:
    temperatures = options.temperatures or (0.0, 0.7, 1.0)
    prompts = [
        (number, prompt, prompt_ids)
        for number, text in enumerate(texts)
        for prompt, prompt_ids in enumerate(text.token_ids)
    ]
    longest = max(len(prompt_ids) for _, _, prompt_ids in prompts) + options.max_new_tokens
    for model in (recorder.target.info, recorder.draft.info):
        if longest > model.context_length:
            raise SystemExit(f"{longest} tokens do not fit into the context of {model.name}, {model.context_length}")
    runs = []
    with progress_bar() as progress:
        task = progress.add_task("record", total=len(prompts) * len(temperatures))
        for number, prompt, prompt_ids in prompts:
            for temperature in temperatures:
                seed = options.seed + prompt
                runs.append(recorder.record(number, prompt, prompt_ids, options.max_new_tokens, temperature, seed))
                progress.advance(task)
        asking = progress.add_task("complete", total=len(machines) * len(temperatures) * len(ASKING))
        recorder.complete(runs, machines, done=lambda: progress.advance(asking))
    return runs


def replay(options: argparse.Namespace) -> int:
    """Replay policies on recordings, print the figures and keep them.

    Raises:
        SystemExit: A file, a policy or a machine cannot be used.
    """
    if options.out is not None:
        check_writable(options.out)
    names = [DEFAULT_POLICY] if options.constants else policy_names()
    methods = options.policies or [Method(name, name) for name in names]
    _check_methods(methods)
    machines = _machines(options)
    runs = [run for path in options.recordings for run in recording.load(path).runs]
    wanted = [group for group in groups(runs) if group.temperature in (options.temperatures or [group.temperature])]
    if not wanted:
        raise SystemExit("no recorded run has such a --temperature")
    settings = Settings(options.fresh, options.noise, options.stalls, options.seed)
    tasks = [Task(method, machine, group, settings) for machine in machines for group in wanted for method in methods]
    if options.constants:
        _constants(tasks, options)
    else:
        _policies(tasks, options)
    return 0


def _policies(tasks: Sequence[Task], options: argparse.Namespace) -> None:
    with progress_bar() as progress:
        results = list(progress.track(replay_all(tasks, options.processes), total=len(tasks), description="replay"))
    console = Console()
    for table in tables(results):
        console.print(to_rich(table))
        console.print()
    _save([to_dict(result) for result in results], options)


def _constants(tasks: Sequence[Task], options: argparse.Namespace) -> None:
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
        "options": {name: getattr(options, name) for name in ("fresh", "noise", "stalls", "seed")},
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


def _check_methods(methods: Sequence[Method]) -> None:
    for method in methods:
        try:
            create_policy(method.policy or "", dict(method.settings))
        except InvalidArgumentError as error:
            raise SystemExit(f"--policy {method.label}: {error}") from None


def _path(model: str, embedded_path: Path) -> str:
    return str(embedded_path) if model == embedded.NAME else model


def _describe(text: Prompts) -> dict[str, Any]:
    return {
        "file": text.file,
        "data_set": Path(text.file).stem,
        "sha256": text.sha256,
        "field": text.field,
        "count": len(text.token_ids),
    }
