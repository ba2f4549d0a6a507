"""`dynatree bench record`: record plain decoding, and the draft's proposals along it and off it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dynatree import embedded
from dynatree.bench.environment import describe, environment
from dynatree.bench.progress import progress_bar
from dynatree.bench.prompts import Prompts, Selection, load_tokenizer, read_prompts
from dynatree.bench.record import check_writable
from dynatree.client import ModelInfo
from dynatree.common.errors import FailedPreconditionError, StartupError
from dynatree.common.seeds import derived_seed
from dynatree.common.wire import model_info_to_pb
from dynatree.replay import recording
from dynatree.replay.machines import Machine, load_machines
from dynatree.replay.recorder import ASKING, Recorder
from dynatree.replay.recording import RecordedRun, Recording


def run(options: argparse.Namespace) -> int:
    """Record every prompt at every temperature.

    Raises:
        SystemExit: A file, a model or a prompt cannot be used.
    """
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
            options.weights or "auto",
            options.draft_weights or options.weights or "auto",
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
                seed = derived_seed(options.seed, number, prompt)
                runs.append(recorder.record(number, prompt, prompt_ids, options.max_new_tokens, temperature, seed))
                progress.advance(task)
        asking = progress.add_task("complete", total=len(machines) * len(temperatures) * len(ASKING))
        recorder.complete(runs, machines, done=lambda: progress.advance(asking))
    return runs


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
