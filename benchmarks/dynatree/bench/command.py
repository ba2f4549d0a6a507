"""`dynatree bench`: take a measurement, save and print it; or print a saved one."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dynatree import embedded
from dynatree.bench.decoding import Baselines, Decoders
from dynatree.bench.environment import Environment, environment
from dynatree.bench.load.clients import Service
from dynatree.bench.load.loads import ClosedLoop, Load, OpenLoop
from dynatree.bench.load.runs import Batch, LoadBench, admitted_to
from dynatree.bench.measurements import EMBEDDED, MEASUREMENTS
from dynatree.bench.memory import PeakMemory
from dynatree.bench.methods import ABLATION, ASSISTED, BASELINES, COUPLING, GUESSES, PLAIN, SCHEMES, Case, Method
from dynatree.bench.progress import progress_bar
from dynatree.bench.prompts import Prompts, Selection, Tokenizer, load_tokenizer, read_prompts
from dynatree.bench.record import (
    REFUSED,
    Costs,
    Floor,
    Report,
    check_writable,
    is_replaceable,
    load,
    new_report,
    rounded,
    save,
)
from dynatree.bench.runs import RunSettings, admitted, measure, plan, warm_up
from dynatree.cli.serve import pair_settings
from dynatree.cli.service_pair import ServicePair, service_pair
from dynatree.client import Client, ModelInfo, ServiceInfo

# Options of the services that this command starts.
SERVICE_OPTIONS = (
    "draft_model",
    "dtype",
    "weights",
    "draft_weights",
    "device",
    "threads",
    "max_sessions",
    "max_tree_nodes",
)
ROUNDS, REQUESTS = 2, 32  # default rounds per client of a closed loop, default requests of an open loop


@dataclass(frozen=True)
class Services:
    """The services to measure; their process ids are None if this command did not start them.

    `others` are further draft services, by the labels of the methods that they run.
    """

    client: Client
    address: str
    draft_process: int | None = None
    verify_process: int | None = None
    others: Mapping[str, ServicePair] = field(default_factory=dict)


Starting = Callable[[argparse.Namespace], AbstractContextManager[Services]]


def run(options: argparse.Namespace) -> int:
    """Run the subcommand; return 1 if an output wrongly differs from plain decoding's or a request of a load failed.

    In 16-bit dtypes, forward passes over one row and over many rows may round differently, so two almost tied tokens
    can change places. A difference is then reported but is not a failure.

    Raises:
        DynaTreeError: The server failed, or refuses a policy or a setting.
        SystemExit: A file, a model or an address cannot be used.
    """
    if options.measurement == "show":
        from dynatree.bench.printing import print_report

        print_report(load(options.file))
        return 0
    if options.measurement == "report":
        from dynatree.bench.report import write_report

        write_report(options.folder, options.out or options.folder / "report", options.title)
        return 0
    if options.out is not None:
        check_writable(options.out)
    return print_measured(_measure_costs(options) if options.measurement == "costs" else _measure_runs(options))


def print_measured(report: Report) -> int:
    """Print a report; return the exit status, as `run`."""
    from dynatree.bench.figures import unequal
    from dynatree.bench.printing import print_report

    print_report(report)
    exact = report["models"]["target"]["dtype"] == "float32"
    failed = any(failure["code"] != REFUSED for failure in report.get("failures", ()))
    return 1 if failed or (exact and unequal(report["runs"])) else 0


def _measure_runs(options: argparse.Namespace) -> Report:
    with measuring([options]) as measure:
        return measure(options)


@contextmanager
def measuring(
    wanted: Sequence[argparse.Namespace], starting: Starting | None = None
) -> Iterator[Callable[[argparse.Namespace], Report]]:
    """Yield a function that takes one measurement; all measurements use the services of the first options.

    All options are checked and all prompts are read before the services start. `starting` starts others than a pair.

    Raises:
        SystemExit: A file, a model or an address cannot be used.
    """
    for options in wanted:
        _check(options)
    tokenizer = load_tokenizer(wanted[0].target_model)
    prompts = {_selection(options): _read_prompts(options, tokenizer) for options in wanted}
    measured_on = _environment(wanted[0])
    with (starting or _services)(wanted[0]) as services:
        info = services.client.model_info()
        if info.target.tokenizer_fingerprint != tokenizer.fingerprint:
            raise SystemExit(
                f"the tokenizer of {wanted[0].target_model} is not that of the server's target {info.target.name}; "
                "name the target with --target-model"
            )
        for options in wanted:
            _check_context(info, prompts[_selection(options)], options.max_new_tokens)

        def measure(options: argparse.Namespace) -> Report:
            measure_all = _measure_loads if options.measurement == "load" else _measure
            return measure_all(services, info, prompts[_selection(options)], measured_on, options)

        yield measure


def _selection(options: argparse.Namespace) -> tuple[Path, Selection]:
    selection = Selection(options.count, options.prompt_tokens, options.prompts_format, options.field, options.split)
    return options.prompts, selection


def _read_prompts(options: argparse.Namespace, tokenizer: Tokenizer) -> Prompts:
    return read_prompts(*_selection(options), tokenizer.encode)


def _check(options: argparse.Namespace) -> None:
    assisted = ASSISTED in _baselines(options)
    given = [
        name
        for name in SERVICE_OPTIONS
        if getattr(options, name, None) is not None and not (name == "draft_model" and assisted)
    ]
    if options.server is not None and given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        options.usage_error(f"{names}: not allowed with --server, whose services already run")
    if options.server is not None and assisted and options.draft_model is None:
        options.usage_error("--baseline transformers-assisted with --server: expected --draft-model as well")
    if options.measurement == "load":
        _check_loads(options)
    if (options.baselines or options.servers) and 0 not in _temperatures(options):
        options.usage_error("--baseline: baselines decode at temperature 0 only; expected --temperature 0 as well")
    if options.out and options.out.exists() and options.prompts.exists() and options.out.samefile(options.prompts):
        raise SystemExit(f"--out is {options.out}, which holds the prompts; expected another file")
    if options.server is None:
        _check_policies(getattr(options, "policies", None) or ())


def _check_loads(options: argparse.Namespace) -> None:
    if options.clients is None and options.rates is None:
        options.usage_error("expected --clients, --rate or both")
    if options.clients is None and options.rounds is not None:
        options.usage_error("--rounds requires --clients")
    if options.rates is None and options.requests is not None:
        options.usage_error("--requests requires --rate")
    if options.clients is None and options.baselines:
        options.usage_error("--baseline: its batches are a closed loop; expected --clients as well")


def _check_policies(methods: Sequence[Method]) -> None:
    """Refuse the policies that the services would refuse, before the services start."""
    from dynatree.common.errors import InvalidArgumentError
    from dynatree.draft.policies import create_policy

    for method in methods:
        try:
            create_policy(method.policy or "", dict(method.settings))
        except InvalidArgumentError as error:
            raise SystemExit(f"--policy {method.label}: {error}") from None


def _environment(options: argparse.Namespace) -> Environment:
    """Describe the machine; threads and bandwidth are unknown if this command did not start the services."""
    if options.server is not None:
        return environment(threads=None, read_bandwidth=None)
    import torch

    from dynatree.bench.bandwidth import read_bandwidth

    if options.threads:
        torch.set_num_threads(options.threads)
    return environment(torch.get_num_threads(), read_bandwidth(options.device))


@contextmanager
def _services(options: argparse.Namespace) -> Iterator[Services]:
    if options.server is None:
        given = {"history_tokens": 0} | ({} if options.measurement == "load" else {"max_sessions": 2})
        given |= {name: getattr(options, name) for name in SERVICE_OPTIONS[1:] if getattr(options, name, None)}
        settings = pair_settings(options.target_model, options.draft_model or EMBEDDED, **given)
        with service_pair(*settings) as pair:
            yield Services(pair.client, pair.address, pair.draft_process, pair.verify_process)
        return
    try:
        client = Client(options.server)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    with client:
        yield Services(client, options.server)


def _check_context(info: ServiceInfo, prompts: Prompts, max_new_tokens: int) -> None:
    longest = max(map(len, prompts.token_ids))
    for model in (info.target, info.draft):
        if longest + max_new_tokens > model.context_length:
            raise SystemExit(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones do not fit into the context of "
                f"{model.name}, {model.context_length} tokens"
            )


def _measure(
    services: Services, info: ServiceInfo, prompts: Prompts, measured_on: Environment, options: argparse.Namespace
) -> Report:
    """Run all cases; if a run fails or is interrupted, the report keeps the runs finished before it."""
    ranks = options.measurement == "ranks"
    settings = RunSettings(
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        repetitions=1 if ranks else options.repetitions,
        warmup=0 if ranks else options.warmup,
        ranks=ranks,
        trees=options.trees,
    )
    others = services.others.items()
    decoders = Decoders(
        services.address, _load_baselines(options, info), {label: each.address for label, each in others}
    )
    processes = {"draft": services.draft_process, "verify": services.verify_process, "client": os.getpid()}
    memory = PeakMemory(processes | {label: each.draft_process for label, each in others})
    cases, skipped = admitted(decoders, prompts.token_ids[0], _cases(options, info))
    report = new_report(
        options.measurement,
        measured_on,
        info.target,
        info.draft,
        prompts=_describe_prompts(prompts, options.name),
        options={
            "max_new_tokens": settings.max_new_tokens,
            "prompt_tokens": options.prompt_tokens,
            "seed": settings.seed,
            "repetitions": settings.repetitions,
            "warmup": settings.warmup,
            "ignore_eos": True,
            **options.recorded,
        },
    )
    report["skipped"] += skipped
    total = len(cases) * (settings.warmup + len(prompts.token_ids) * settings.repetitions)
    with _kept(report, options.out), progress_bar() as progress:
        task = progress.add_task(options.measurement, total=total)
        for _ in warm_up(decoders, prompts.token_ids, cases, settings):
            progress.advance(task)
        for run in measure(decoders, memory, prompts.token_ids, cases, settings):
            report["runs"].append(rounded(run))
            if options.out is not None and is_replaceable(options.out):
                save(report, options.out)  # finished runs survive if the process is killed
            progress.advance(task)
    return report


def _measure_loads(
    services: Services, info: ServiceInfo, prompts: Prompts, measured_on: Environment, options: argparse.Namespace
) -> Report:
    """Run every load; if a load fails or is interrupted, the report keeps the loads finished before it."""
    settings = RunSettings(options.max_new_tokens, options.seed, options.repetitions, options.warmup)
    loads = _loads(options)
    cases, _ = admitted(Decoders(services.address), prompts.token_ids[0], _load_cases(options, info))
    baselines = plan(_baselines(options), [0.0], ["gumbel"])
    cases = [cases[0], *baselines, *cases[1:]]
    report = new_report(
        options.measurement,
        measured_on,
        info.target,
        info.draft,
        prompts=_describe_prompts(prompts, options.name),
        options={
            "clients": options.clients or [],
            "rounds": options.rounds or ROUNDS,
            "rates": options.rates or [],
            "requests": options.requests or REQUESTS,
            "max_new_tokens": settings.max_new_tokens,
            "prompt_tokens": options.prompt_tokens,
            "seed": settings.seed,
            "repetitions": settings.repetitions,
            "warmup": settings.warmup,
            "ignore_eos": True,
        },
    )
    report["failures"] = []
    batch = _load_batches(options, info) if baselines else None
    total = len(cases) * settings.warmup + settings.repetitions * sum(len(admitted_to(load, cases)) for load in loads)
    with asyncio.Runner() as runner, _kept(report, options.out), progress_bar() as progress:
        bench = LoadBench(runner, Service(services.address, prompts.token_ids), batch, settings)
        task = progress.add_task(options.measurement, total=total)
        for _ in bench.warm_up(loads, cases):
            progress.advance(task)
        for cell in bench.measure(loads, cases):
            report["runs"] += map(rounded, cell.runs)
            report["failures"] += cell.failures
            if options.out is not None and is_replaceable(options.out):
                save(report, options.out)
            progress.advance(task)
    return report


def _loads(options: argparse.Namespace) -> list[Load]:
    closed = [ClosedLoop(clients, options.rounds or ROUNDS) for clients in options.clients or ()]
    return [*closed, *(OpenLoop(rate, options.requests or REQUESTS) for rate in options.rates or ())]


def _load_cases(options: argparse.Namespace, info: ServiceInfo) -> list[Case]:
    """Plain decoding, whose sessions share passes like those of any policy, and then the policies."""
    default = Method(info.policies[0], info.policies[0])
    return plan([PLAIN, *(options.policies or [default])], _temperatures(options), ["gumbel"])


def _load_batches(options: argparse.Namespace, info: ServiceInfo) -> Batch:
    from dynatree.bench.baselines import LocalModel, load_batches

    return load_batches(LocalModel(_path(options.target_model, embedded.target_path()), info.target))


def _temperatures(options: argparse.Namespace) -> Sequence[float]:
    return options.temperatures or MEASUREMENTS[options.measurement].temperatures


def _baselines(options: argparse.Namespace) -> list[Method]:
    names = BASELINES if "all" in options.baselines else dict.fromkeys(options.baselines)
    return [BASELINES[name] for name in names]


def _load_baselines(options: argparse.Namespace, info: ServiceInfo) -> Baselines:
    from dynatree.bench.server_baseline import connect

    servers = {method.label: connect(method.label, url) for method, url in options.servers}
    if not options.baselines:
        return Baselines(servers)
    from dynatree.bench.baselines import LocalModel, load_baselines

    target = LocalModel(_path(options.target_model, embedded.target_path()), info.target)
    draft = LocalModel(_path(options.draft_model or EMBEDDED, embedded.draft_path()), info.draft)
    loaded = load_baselines(_baselines(options), target, draft)
    return Baselines({**loaded.decoders, **servers}, loaded.margin)


def _path(model: str, embedded_path: Path) -> str:
    return str(embedded_path) if model == EMBEDDED else model


def _cases(options: argparse.Namespace, info: ServiceInfo) -> list[Case]:
    """The cases to run; every measurement except `ranks` includes plain decoding for comparison."""
    temperatures = _temperatures(options)
    if options.measurement == "ranks":
        return plan([GUESSES], temperatures, [options.scheme])
    if options.measurement == "ablation":
        return plan(ABLATION, temperatures, [options.scheme])
    if options.measurement == "coupling":
        plain = plan([PLAIN], temperatures, ["gumbel"])
        return plain + plan(options.policies or COUPLING, temperatures, SCHEMES)
    offered: Sequence[Method] = options.policies or [Method(name, name) for name in info.policies]
    baselines = [*_baselines(options), *(method for method, _ in options.servers)]
    return plan(baselines, [0.0], [options.scheme]) + plan([PLAIN, *offered], temperatures, [options.scheme])


def _describe_prompts(prompts: Prompts, name: str | None) -> dict[str, object]:
    return {
        "file": prompts.file,
        "data_set": name or Path(prompts.file).stem,
        "sha256": prompts.sha256,
        "field": prompts.field,
        "count": len(prompts.token_ids),
        "tokens": [len(prompt) for prompt in prompts.token_ids],
    }


def _measure_costs(options: argparse.Namespace) -> Report:
    """Measure every point of every curve; points measured after the warm-up are kept if the command is interrupted."""
    from dynatree.bench.bandwidth import read_bandwidth
    from dynatree.bench.costs import KV_SESSIONS, CostBench, fill, places
    from dynatree.common.errors import StartupError
    from dynatree.common.wire import model_info_to_pb
    from dynatree.engine.loading import load_engine
    from dynatree.engine.settings import ModelSettings

    measured_on = _environment(options)
    hardware, weights = (options.device or "auto", options.dtype or "auto"), options.weights or "auto"
    large = ModelSettings(
        _path(options.target_model, embedded.target_path()), *hardware, weights=weights, sessions=KV_SESSIONS
    )
    small = ModelSettings(
        _path(options.draft_model, embedded.draft_path()),
        *hardware,
        weights=options.draft_weights or weights,
        sessions=1,
        chooses_tokens=False,
    )
    try:
        target, draft = load_engine(large), load_engine(small)
        bench = CostBench(target, draft, options.max_nodes)
    except (StartupError, ValueError) as error:
        raise SystemExit(str(error)) from None
    report = new_report(
        options.measurement,
        measured_on,
        ModelInfo.from_pb(model_info_to_pb(target.info)),
        ModelInfo.from_pb(model_info_to_pb(draft.info)),
        prompts={"file": "random tokens", "data_set": "random tokens", "count": 0, "tokens": []},
        options={"max_nodes": options.max_nodes, "repetitions": options.repetitions},
    )
    floor = _floor(target.info.step_bytes, measured_on.machine["read_bandwidth"])
    report["costs"] = Costs(plain_seconds=[], points=[], floor=floor)
    wanted = places(options.max_nodes, target.info.context_length)
    with progress_bar() as progress:
        for place in progress.track(wanted, description="warm-up"):
            bench.measure(place)
        with _kept(report, options.out):
            steps = fill(report["costs"], bench, wanted, options.repetitions)
            for _ in progress.track(steps, total=len(wanted) * options.repetitions, description="costs"):
                pass
            # The memory bandwidth of a shared machine varies: the floor uses the better of two readings.
            bandwidth = max(report["costs"]["floor"]["read_bandwidth"], read_bandwidth(options.device))
            report["costs"]["floor"] = _floor(target.info.step_bytes, bandwidth)
    return report


def _floor(weight_bytes: int, bandwidth: float) -> Floor:
    return Floor(weight_bytes=weight_bytes, read_bandwidth=bandwidth, seconds=weight_bytes / bandwidth)


@contextmanager
def _kept(report: Report, out: Path | None) -> Iterator[None]:
    """Save the report at the end, marked complete unless an exception ended the measurement."""
    try:
        yield
        report["complete"] = True
    finally:
        if out is not None:
            save(report, out)
