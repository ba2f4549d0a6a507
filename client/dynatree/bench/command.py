"""`dynatree bench`: measure, keep and print; or print what was kept."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dynatree.bench.arguments import EMBEDDED, MEASUREMENTS, add_arguments
from dynatree.bench.environment import environment
from dynatree.bench.methods import ABLATION, COUPLING, GUESSES, PLAIN, SCHEMES, Case, Method
from dynatree.bench.prompts import Prompts, Selection, load_tokenizer, read_prompts
from dynatree.bench.report import SCHEMA_VERSION, Report, Skipped, check_writable, load, save
from dynatree.bench.runs import RunSettings, admitted, measure, plan, warm_up
from dynatree.bench.tables import print_report, unequal
from dynatree.cli.service_pair import service_pair
from dynatree.client import Client, ModelInfo, ServiceInfo

__all__ = ["add_arguments", "run"]

SERVICE_OPTIONS = ("draft_model", "dtype", "device", "threads")  # of the services that are started here


def run(options: argparse.Namespace) -> int:
    """Measure, print and keep it; 1 if an output that must equal plain decoding's does not.

    Raises:
        DynaTreeError: The server failed, or refuses a policy or a setting.
        SystemExit: A file, a model or an address cannot be used.
    """
    if options.measurement == "show":
        print_report(load(options.file))
        return 0
    _check(options)
    tokenizer = load_tokenizer(options.target_model)
    selection = Selection(options.count, options.prompt_tokens, options.prompts_format, options.field)
    prompts = read_prompts(options.prompts, selection, tokenizer.encode)
    with _client(options) as client:
        info = client.model_info()
        if info.target.tokenizer_fingerprint != tokenizer.fingerprint:
            raise SystemExit(
                f"the tokenizer of {options.target_model} is not that of the server's target {info.target.name}; "
                "name the target with --target-model"
            )
        _check_context(info, prompts, options.max_new_tokens)
        report = _measure(client, info, prompts, options)
    print_report(report)
    return 1 if unequal(report["runs"]) else 0


def _check(options: argparse.Namespace) -> None:
    given = [name for name in SERVICE_OPTIONS if getattr(options, name) is not None]
    if options.server is not None and given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        options.usage_error(f"{names}: only for services that are started here, not with --server")
    if options.out is not None:
        check_writable(options.out)
        if options.out.exists() and options.prompts.exists() and options.out.samefile(options.prompts):
            raise SystemExit(f"{options.out} holds the prompts; expected a file of its own for --out")


@contextmanager
def _client(options: argparse.Namespace) -> Iterator[Client]:
    if options.server is None:
        flags = ["--max-sessions", "2"]
        for name in SERVICE_OPTIONS[1:]:
            if getattr(options, name) is not None:
                flags += [f"--{name}", str(getattr(options, name))]
        with service_pair(options.target_model, options.draft_model or EMBEDDED, flags) as client:
            yield client
        return
    try:
        client = Client(options.server)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    with client:
        yield client


def _check_context(info: ServiceInfo, prompts: Prompts, max_new_tokens: int) -> None:
    longest = max(map(len, prompts.token_ids))
    for model in (info.target, info.draft):
        if longest + max_new_tokens > model.context_length:
            raise SystemExit(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones do not fit into the context of "
                f"{model.name}, {model.context_length} tokens"
            )


def _measure(client: Client, info: ServiceInfo, prompts: Prompts, options: argparse.Namespace) -> Report:
    """Run everything; what there is by then is kept even where a run fails or is interrupted."""
    ranks = options.measurement == "ranks"
    settings = RunSettings(
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        repetitions=1 if ranks else options.repetitions,
        warmup=0 if ranks else options.warmup,
        ranks=ranks,
    )
    cases, skipped = admitted(client, prompts.token_ids[0], _cases(options, info))
    report = _new_report(info, prompts, settings, skipped, options)
    total = len(cases) * (settings.warmup + len(prompts.token_ids) * settings.repetitions)
    try:
        with _progress() as progress:
            task = progress.add_task(options.measurement, total=total)
            for _ in warm_up(client, prompts.token_ids, cases, settings):
                progress.advance(task)
            for run in measure(client, prompts.token_ids, cases, settings):
                report["runs"].append(run)
                progress.advance(task)
        report["complete"] = True
    finally:
        if options.out is not None:
            save(report, options.out)
    return report


def _cases(options: argparse.Namespace, info: ServiceInfo) -> list[Case]:
    """What to run; plain decoding is always there to compare with, but for the ranks."""
    temperatures = options.temperatures or MEASUREMENTS[options.measurement].temperatures
    if options.measurement == "ranks":
        return plan([GUESSES], temperatures, [options.scheme])
    if options.measurement == "ablation":
        return plan(ABLATION, temperatures, [options.scheme])
    if options.measurement == "coupling":
        plain = plan([PLAIN], temperatures, ["gumbel"])
        return plain + plan(options.policies or COUPLING, temperatures, SCHEMES)
    offered: Sequence[Method] = options.policies or [Method(name, name) for name in info.policies]
    return plan([PLAIN, *offered], temperatures, [options.scheme])


def _new_report(
    info: ServiceInfo, prompts: Prompts, settings: RunSettings, skipped: list[Skipped], options: argparse.Namespace
) -> Report:
    measured_on = environment()
    return Report(
        schema_version=SCHEMA_VERSION,
        command=options.measurement,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        complete=False,
        versions=measured_on["versions"],
        git=measured_on["git"],
        machine=measured_on["machine"],
        models={"target": _model(info.target), "draft": _model(info.draft)},
        prompts={
            "file": prompts.file,
            "sha256": prompts.sha256,
            "field": prompts.field,
            "count": len(prompts.token_ids),
            "tokens": [len(prompt) for prompt in prompts.token_ids],
        },
        options={
            "max_new_tokens": settings.max_new_tokens,
            "prompt_tokens": options.prompt_tokens,
            "seed": settings.seed,
            "repetitions": settings.repetitions,
            "warmup": settings.warmup,
            "ignore_eos": True,
        },
        skipped=skipped,
        runs=[],
    )


def _model(info: ModelInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in ("name", "dtype", "device", "parameters", "version")}


def _progress() -> Progress:
    """A bar with the time left, on standard error, where somebody looks at it."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
