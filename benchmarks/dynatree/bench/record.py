"""The JSON file of a measurement, from which all tables are made.

Schema, version 2; one object:

    schema_version  2
    command         "compare", "sweep", "ablation", "coupling", "ranks", "rank", "load" or "costs"
    started         start time, ISO 8601 with its offset from UTC
    complete        false if the measurement was interrupted
    versions        of dynatree, torch, transformers (null if not installed) and python, on the client's machine
    git             {"commit", "modified"}: the checkout that the client ran from; null if it ran from none
    machine         {"platform", "cpu", "cpu_count", "memory_bytes", "threads", "read_bandwidth"} of the client: cpu is
                    the processor's name or null; threads are the torch threads of each model, null if the services
                    run elsewhere; read_bandwidth is the rate at which the target's device reads its memory, in bytes
                    per second, null if not measured
    models          {"target": MODEL, "draft": MODEL}, MODEL = {"name", "architecture", "parameters", "context_length",
                    "dtype", "device", "version", "numerics", "weight_bytes"}, as the services report them; version is
                    the service's DynaTree version, numerics, absent from older files, name the formats of quantised
                    weights and the kernels, weight_bytes are the bytes of weights that a decoding step reads
    prompts         {"file", "data_set", "sha256", "field", "count", "tokens"}: the name of the file, or of the Hugging
                    Face data set; a short name for tables; the field of JSON Lines or the column, or null; and the
                    number of tokens of each prompt
    options         {"max_new_tokens", "prompt_tokens", "seed", "repetitions", "warmup", "ignore_eos"}
    skipped         [{"label", "scheme", "reason"}]: methods that the server refused under a sampling scheme
    runs            one object for each completion, in the order in which they were made:
        label, policy, settings      the method; settings by name, without those left to the server.
                                     The baselines, labelled "transformers", "transformers assisted" and
                                     "transformers prompt lookup", have policy null
        temperature                  0 is greedy
        scheme, seed                 null if the temperature is 0; otherwise the seed is derived from --seed, the
                                     prompt's number and the repetition's; in older files it is --seed + the prompt's
                                     number
        prompt, repetition           their numbers, from 0
        tokens                       number of new tokens
        equal                        whether the tokens equal those of policy autoregressive at the same temperature
                                     and seed; null if equality is not expected (scheme residual, another program's
                                     server) or policy autoregressive was not run
        agrees                       number of leading tokens that equal them; null if not known
        own_equal, own_agrees        of a server named "NAME, ...", if one named NAME ran as well, its plain decoding:
                                     the same as equal and agrees, with NAME's tokens
        margin                       of a greedy output that differs from plain decoding's, if transformers has loaded
                                     the target as well: the gap between its two highest logits where they part
        wall_seconds                 from the client's call to the last token
        arrivals                     [[tokens, seconds], ...]: for each time that tokens arrived, the new tokens so far
                                     and the seconds since the call
        peak_memory                  {"draft", "verify", "client"}: each process's peak resident bytes during the run,
                                     null if not known. A baseline runs in the client
        statistics                   all of `dynatree.client.Statistics`; null for a baseline
        ranks                        in `dynatree bench ranks` only: {"trials", "hits"}, see `ranks.py`
        trees                        in some experiments of `dynatree bench paper` only: for each round {"parents",
                                     "probabilities", "accepted"}, as in `dynatree.client.RoundTrace`
        load                         in `dynatree bench load` only: {"clients", "rate", "client", "start_seconds"}. A
                                     closed loop sets `clients`, and `client`, from 0, the one that made the request;
                                     an open loop sets `rate`, in requests a second. The other fields are null. The
                                     request was due `start_seconds` after its load began; wall_seconds and arrivals
                                     count from then

`dynatree bench load` has "clients", "rounds", "rates" and "requests" among its options, no peak_memory, and

    failures        [{"label", "prompt", "repetition", "load", "seconds", "tokens", "code", "details"}]: requests that
                    ended in an error; seconds and tokens until the error, its gRPC code and the service's message.
                    Code "RESOURCE_EXHAUSTED" is a refusal: the queue was full

`dynatree rank` labels a run with its draft model as the command line names it, has the peak memory of that draft's
service under the same name, and among its options

    drafts          [{"draft", "refusal"}]: the draft models, and why one is not ranked, null if it is
    recommended     the fastest of them; "none" if no draft model pays

`dynatree bench costs` has no runs and 0 prompts, its options are {"max_nodes", "repetitions"}, and it has

    costs           {"plain_seconds", "points", "floor"}, all times in seconds, one for each repetition:
        plain_seconds                a plain decoding step: a round without a tree, at context 128
        points                       [{"curve", "nodes", "context", "sessions", "seconds", "forward_seconds"}]. Curves
                                     "nodes", "context" and "sessions": a round of the target, in which each of
                                     `sessions` has a tree of `nodes` after `context` tokens, and its forward pass
                                     alone. Curve "draft": one forward pass of the draft model over `nodes` siblings
        floor                        {"weight_bytes", "read_bandwidth", "seconds"}: seconds = the weights that a step
                                     reads / the bandwidth, the better of a reading before and one after. A plain step
                                     is slower than the floor unless the memory was faster between the readings

A file may have further fields; they are kept and ignored.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from dynatree.bench.environment import Environment, describe
from dynatree.bench.ranks import RankCounts
from dynatree.client import ModelInfo, Statistics

SCHEMA_VERSION = 2
REFUSED = "RESOURCE_EXHAUSTED"  # code of a failure: the queue was full
PARTS = ("draft_forward", "grow", "verify_forward", "accept", "commit", "wire")  # parts of a round, in order

Count = Annotated[int, Field(ge=0)]
Some = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_checked = with_config(ConfigDict(strict=True, extra="allow"))


@_checked
class Place(TypedDict):
    """A request's client or rate and its start time in a load; see the module."""

    clients: Some | None
    rate: Positive | None
    client: Count | None
    start_seconds: Number


@_checked
class Tree(TypedDict):
    """The tree of a round: each node's parent (-1 for the root) and draft probability, and the accepted nodes."""

    parents: list[int]
    probabilities: list[Number]
    accepted: list[Count]


@_checked
class Part(TypedDict):
    """Time that one part of a round took, over all rounds."""

    total_seconds: Number


@_checked
class RunStatistics(TypedDict):
    """Fields of `dynatree.client.Statistics` that tables read; a file has all fields. Loads read the last six."""

    rounds: Count
    draft_n: Count
    draft_n_accepted: Count
    acceptance_rate: Number
    tokens_per_round: Number
    mean_path_length: Number
    nodes_per_round: Number
    committed_per_level: Number
    acceptance_by_depth: NotRequired[list[Number]]
    round_parts: NotRequired[dict[str, Part]]
    queue_seconds: NotRequired[Number]
    sessions_per_pass: NotRequired[Number]
    rows_per_pass: NotRequired[Number]
    trimmed_n: NotRequired[Count]
    cached_tokens: NotRequired[Count]
    kv_cache_usage: NotRequired[Number]


@_checked
class Run(TypedDict):
    """One completion; see the module."""

    label: str
    policy: str | None
    settings: dict[str, float | str | Sequence[float]]
    temperature: Number
    scheme: str | None
    seed: int | None
    prompt: Count
    repetition: Count
    tokens: Some
    equal: bool | None
    agrees: Count | None
    own_equal: NotRequired[bool]
    own_agrees: NotRequired[Count]
    margin: NotRequired[Number]
    wall_seconds: Positive
    arrivals: list[tuple[Some, Positive]]
    peak_memory: NotRequired[dict[str, Count | None] | None]
    statistics: RunStatistics | None
    ranks: NotRequired[RankCounts]
    trees: NotRequired[list[Tree]]
    load: NotRequired[Place]


@_checked
class Failure(TypedDict):
    """A request of a load that ended in an error; see the module."""

    label: str
    prompt: Count
    repetition: Count
    load: Place
    seconds: Number
    tokens: Count
    code: str
    details: str


@_checked
class Skipped(TypedDict):
    """A method that the server refused under a sampling scheme, and the server's message."""

    label: str
    scheme: str
    reason: str


@_checked
class Point(TypedDict):
    """A point of a curve of costs; see the module."""

    curve: Literal["nodes", "context", "sessions", "draft"]
    nodes: Count
    context: Count
    sessions: Some
    seconds: Annotated[list[Positive], Field(min_length=1)]
    forward_seconds: Annotated[list[Positive], Field(min_length=1)]


@_checked
class Floor(TypedDict):
    """The least possible time of a plain step."""

    weight_bytes: Some
    read_bandwidth: Positive
    seconds: Positive


@_checked
class Costs(TypedDict):
    """Measured times of rounds; see the module."""

    plain_seconds: list[Positive]
    points: list[Point]
    floor: Floor


@_checked
class Model(TypedDict):
    """A model, as its service reports it."""

    name: str
    architecture: str
    parameters: Count
    context_length: Count
    dtype: str
    device: str
    version: str
    numerics: NotRequired[str]
    weight_bytes: Count


@_checked
class Machine(TypedDict):
    """The client's machine."""

    platform: str
    cpu: str | None
    cpu_count: Some | None
    memory_bytes: Count
    threads: Some | None
    read_bandwidth: Positive | None


@_checked
class Commit(TypedDict):
    """The checkout that the client ran from."""

    commit: str
    modified: bool


@_checked
class Prompts(TypedDict):
    """The prompts that were completed."""

    file: str
    data_set: str
    count: Count
    tokens: list[Some]


@_checked
class Report(TypedDict):
    """A measurement; see the module."""

    schema_version: Literal[2]
    command: Literal["compare", "sweep", "ablation", "coupling", "ranks", "rank", "load", "costs"]
    started: str
    complete: bool
    versions: dict[str, str | None]
    git: Commit | None
    machine: Machine
    models: dict[Literal["target", "draft"], Model]
    prompts: Prompts
    options: dict[str, Any]
    skipped: list[Skipped]
    runs: list[Run]
    costs: NotRequired[Costs]
    failures: NotRequired[list[Failure]]


_REPORT = TypeAdapter(Report)


def formats_of(model: Model) -> str:
    """The formats of a model's quantised weights, such as "int8 weights"; "" if none are."""
    formats = model.get("numerics", "").partition(", ")[0]
    return formats if formats.endswith(" weights") else ""


def precision_of(model: Model) -> str:
    """A model's data type, and the formats of its quantised weights."""
    return ", ".join(filter(None, (model["dtype"], formats_of(model))))


def statistics_of(statistics: Statistics | None) -> RunStatistics | None:
    """All of a completion's statistics, for a run."""
    return None if statistics is None else cast(RunStatistics, asdict(statistics))


def new_report(
    command: str,
    environment: Environment,
    target: ModelInfo,
    draft: ModelInfo,
    *,
    prompts: Any,
    options: dict[str, Any],
) -> Report:
    """The report of a measurement that starts now."""
    return Report(
        schema_version=2,
        command=command,  # type: ignore[typeddict-item]
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        complete=False,
        versions=environment.versions,
        git=environment.git,
        machine=environment.machine,
        models={"target": describe(target), "draft": describe(draft)},
        prompts=prompts,
        options=options,
        skipped=[],
        runs=[],
    )


def check_writable(path: Path) -> None:
    """Check, before hours of measuring, that a report can be saved.

    Raises:
        SystemExit: The report cannot be saved there.
    """
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise SystemExit(f"{path} cannot be written; expected a file in an existing folder")


def save(report: Report, path: Path) -> None:
    """Write the file atomically, one run per line; it is compressed if its name ends with .gz.

    Raises:
        SystemExit: The file cannot be written.
    """
    head = _json({name: value for name, value in report.items() if name != "runs"}, indent=1)
    runs = ",\n".join("  " + _json(run) for run in report["runs"])
    text = f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'.encode()
    if path.suffix == ".gz":
        text = gzip.compress(text, mtime=0)  # equal reports give equal bytes
    try:
        if not is_replaceable(path):
            path.write_bytes(text)
            return
        part = path.with_name(path.name + ".part")
        part.write_bytes(text)
        part.replace(path)
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}") from None


def is_replaceable(path: Path) -> bool:
    """Whether a new file can replace the path: not a pipe, a terminal or a link such as /dev/stdout."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _json(value: object, indent: int | None = None) -> str:
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)


def rounded(run: Run) -> Run:
    """Round the run's numbers in place to six digits, as the file has them, so that printed and saved figures agree.

    The object stays the same, because `equal` and `agrees` are set later, when plain decoding's output is known.
    """
    run.update(_rounded(run))
    return run


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def load(path: Path) -> Report:
    """Read a file and check the fields that tables read.

    Raises:
        SystemExit: The file cannot be read, or is not a report.
    """
    try:
        content = path.read_bytes()
        report = _REPORT.validate_json(gzip.decompress(content) if path.suffix == ".gz" else content)
        _check_command(report)
    except (OSError, EOFError) as error:
        raise SystemExit(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        words = f"{place}: {first['msg']}" if place else first["msg"]
        raise SystemExit(f"{path} is not a file of dynatree bench: {words}") from None
    except ValueError as error:
        raise SystemExit(f"{path} is not a file of dynatree bench: {error}") from None
    return report


def _check_command(report: Report) -> None:
    """Check the fields that only this command's tables read."""
    command, runs = report["command"], report["runs"]
    if "repetitions" not in report["options"] or (command != "costs" and "max_new_tokens" not in report["options"]):
        raise ValueError("options: repetitions or max_new_tokens is missing")
    if command == "costs" and "costs" not in report:
        raise ValueError("costs is missing")
    if command == "ranks" and not all("ranks" in run for run in runs):
        raise ValueError("the runs have no ranks")
    if command == "rank" and "drafts" not in report["options"]:
        raise ValueError("options: drafts is missing")
    if command == "load" and not ("failures" in report and all("load" in run for run in runs)):
        raise ValueError("failures or a run's load is missing")
