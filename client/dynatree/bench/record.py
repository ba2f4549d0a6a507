"""The JSON file of a measurement: everything that tables are made of.

Schema, version 2; one object:

    schema_version  2
    command         "compare", "sweep", "ablation", "coupling", "ranks", "load" or "costs"
    started         when, ISO 8601 with its offset from UTC
    complete        false where the measurement was interrupted
    versions        of dynatree, torch, transformers (null where not installed) and python, on the client's side
    git             {"commit", "modified"}: the checkout that the client ran from; null where it was none
    machine         {"platform", "cpu", "cpu_count", "memory_bytes", "threads", "read_bandwidth"}, the client's: the
                    processor's name or null; the torch threads of each model, null where the services run elsewhere;
                    bytes per second at which the target's device reads its memory, null where not measured
    models          {"target": MODEL, "draft": MODEL}, MODEL = {"name", "architecture", "parameters", "context_length",
                    "dtype", "device", "version", "weight_bytes"}, as the services report them; version is their
                    DynaTree's, weight_bytes are those that a step reads
    prompts         {"file", "data_set", "sha256", "field", "count", "tokens"}: the name of the file, or of the Hugging
                    Face data set; a short name for tables; the field of JSON Lines or the column, or null; and how
                    many tokens each prompt has
    options         {"max_new_tokens", "prompt_tokens", "seed", "repetitions", "warmup", "ignore_eos"}
    skipped         [{"label", "scheme", "reason"}]: methods that the server refused under a sampling scheme
    runs            one object for each completion, in the order in which they were made:
        label, policy, settings      the method; settings by name, numbers or lists, without those left to the server.
                                     The baselines, labelled "transformers", "transformers assisted" and
                                     "transformers prompt lookup", have policy null
        temperature                  0 is greedy
        scheme, seed                 null where the temperature is 0; otherwise --seed + the prompt's number
        prompt, repetition           their numbers, from 0
        tokens                       new tokens
        equal                        whether they are those of policy autoregressive, at the same temperature and seed;
                                     null where that is not expected (scheme residual) or was not run
        agrees                       how many leading tokens are; null where `equal` is
        wall_seconds                 from the client's call to the last token
        arrivals                     [[tokens, seconds], ...]: new tokens so far and seconds since the call, for each
                                     time that tokens arrived
        peak_memory                  {"draft", "verify", "client"}: each process's peak resident bytes during the run,
                                     null where not known. A baseline runs in the client
        statistics                   all of `dynatree.client.Statistics`; null for a baseline
        ranks                        of `dynatree bench ranks` only: {"trials", "hits"}, see `ranks.py`
        load                         of `dynatree bench load` only: {"clients", "rate", "client", "start_seconds"}. A
                                     closed loop has `clients`, and one of them, from 0, made the request; an open loop
                                     has a rate, in requests a second. The others are null. The request was due
                                     `start_seconds` after its load began; wall_seconds and arrivals are since then

`dynatree bench load` has "clients", "rounds", "rates" and "requests" among its options, no peak_memory, and

    failures        [{"label", "prompt", "repetition", "load", "seconds", "tokens", "code", "details"}]: requests that
                    ended in an error, after so many seconds and tokens; its gRPC code and what the service said. Code
                    "RESOURCE_EXHAUSTED" is a refusal: the queue was full

`dynatree bench costs` has no runs and 0 prompts, its options are {"max_nodes", "repetitions"}, and it has

    costs           {"plain_seconds", "points", "floor"}, all times in seconds, one for each repetition:
        plain_seconds                a plain decoding step: a round without a tree, at context 128
        points                       [{"curve", "nodes", "context", "sessions", "seconds", "forward_seconds"}]. Curves
                                     "nodes", "context" and "sessions": a round of the target, each session with a tree
                                     of so many nodes behind so many tokens, and its forward alone. Curve "draft": one
                                     forward of the draft model over so many sibling nodes
        floor                        {"weight_bytes", "read_bandwidth", "seconds"}: seconds = the weights that a step
                                     reads / the bandwidth, which no plain decoding step can be faster than

Files of version 1 load too. They lack command "sweep" and "costs", `agrees`, `arrivals`, `peak_memory`, data_set,
weight_bytes, architecture, context_length, and of the machine all but platform and cpu_count.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, NotRequired, TypedDict

from dynatree.bench.environment import Environment, describe
from dynatree.bench.ranks import RankCounts
from dynatree.client import ModelInfo

SCHEMA_VERSION = 2
COMMANDS = ("compare", "sweep", "ablation", "coupling", "ranks", "load", "costs")
REFUSED = "RESOURCE_EXHAUSTED"  # the code of a failure: there was no room
CURVES = ("nodes", "context", "sessions", "draft")
PARTS = ("draft_forward", "grow", "verify_forward", "accept", "commit", "wire")  # of a round, in its order
_READABLE = (1, SCHEMA_VERSION)


class Place(TypedDict):
    """Where in a load a request was made; see the module."""

    clients: int | None
    rate: float | None
    client: int | None
    start_seconds: float


class Run(TypedDict):
    """One completion; see the module."""

    label: str
    policy: str | None
    settings: dict[str, float | Sequence[float]]
    temperature: float
    scheme: str | None
    seed: int | None
    prompt: int
    repetition: int
    tokens: int
    equal: bool | None
    agrees: NotRequired[int | None]
    wall_seconds: float
    arrivals: NotRequired[list[tuple[int, float]]]
    peak_memory: NotRequired[dict[str, int | None] | None]
    statistics: dict[str, Any] | None
    ranks: NotRequired[RankCounts]
    load: NotRequired[Place]


class Failure(TypedDict):
    """A request of a load that ended in an error; see the module."""

    label: str
    prompt: int
    repetition: int
    load: Place
    seconds: float
    tokens: int
    code: str
    details: str


class Skipped(TypedDict):
    """A method that the server refused under a sampling scheme, and what it said."""

    label: str
    scheme: str
    reason: str


class Point(TypedDict):
    """A point of a curve of costs; see the module."""

    curve: str
    nodes: int
    context: int
    sessions: int
    seconds: list[float]
    forward_seconds: list[float]


class Costs(TypedDict):
    """What rounds cost; see the module."""

    plain_seconds: list[float]
    points: list[Point]
    floor: dict[str, float]


class Report(TypedDict):
    """A measurement; see the module."""

    schema_version: int
    command: str
    started: str
    complete: bool
    versions: dict[str, str | None]
    git: dict[str, Any] | None
    machine: dict[str, Any]
    models: dict[str, dict[str, Any]]
    prompts: dict[str, Any]
    options: dict[str, Any]
    skipped: list[Skipped]
    runs: list[Run]
    costs: NotRequired[Costs]
    failures: NotRequired[list[Failure]]


def new_report(
    command: str,
    environment: Environment,
    target: ModelInfo,
    draft: ModelInfo,
    *,
    prompts: dict[str, Any],
    options: dict[str, Any],
) -> Report:
    """The report of a measurement that starts now."""
    return Report(
        schema_version=SCHEMA_VERSION,
        command=command,
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
    """Find out before hours of measuring that a report could not be saved.

    Raises:
        SystemExit: It could not.
    """
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise SystemExit(f"{path} cannot be written; expected a file in a folder that is there")


def save(report: Report, path: Path) -> None:
    """Write the file, whole or not at all, each run on a line of its own.

    Raises:
        SystemExit: It cannot be written.
    """
    head = _json({name: value for name, value in report.items() if name != "runs"}, indent=1)
    runs = ",\n".join("  " + _json(run) for run in report["runs"])
    text = f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'
    try:
        if not is_replaceable(path):
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        part = path.with_name(path.name + ".part")
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}") from None


def is_replaceable(path: Path) -> bool:
    """Whether a file can be put in its place; not of a pipe or a terminal, and not of a link such as /dev/stdout."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def load(path: Path) -> Report:
    """Read a file, and check what tables need of it.

    Raises:
        SystemExit: It cannot be read, or is not a report.
    """
    try:
        value = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"{path} is not JSON: {error}") from None
    try:
        _check(value, {"schema_version": _is_count, "command": _is_text}, "the file")
        if value["schema_version"] not in _READABLE or value["command"] not in COMMANDS:
            raise ValueError(f"schema_version {value['schema_version']}, command {value['command']!r} are not known")
        _check(value, _REPORT, "the file")
        _check(value, _OF_COMMAND.get(value["command"], _OF_RUNS), "the file")
    except ValueError as error:
        raise SystemExit(f"{path} is not a file of dynatree bench: {error}") from None
    report: Report = value
    return report


@dataclass(frozen=True)
class _OrNull:
    """The shape of a value that may be null."""

    shape: Any


@dataclass(frozen=True)
class _Some:
    """A list of one shape, of which there is at least one."""

    shape: Any


@dataclass(frozen=True)
class _Since2:
    """The shape of a value that files of version 1 may lack."""

    shape: Any


def _check(value: Any, shape: Any, place: str) -> None:
    """Hold a value against a shape: a dictionary of shapes, a list of one shape, one of the above, or a predicate."""
    if isinstance(shape, _Some):
        _check(value, [shape.shape], place)
        if not value:
            raise ValueError(f"{place} is empty")
    elif isinstance(shape, _OrNull):
        if value is not None:
            _check(value, shape.shape, place)
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{place} is not an object")
        for name, inner in shape.items():
            if name in value:
                _check(value[name], inner.shape if isinstance(inner, _Since2) else inner, name)
            elif not isinstance(inner, _Since2):
                raise ValueError(f"{place} has no {name}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{place} is not a list")
        for number, each in enumerate(value):
            _check(each, shape[0], f"{place}[{number}]")
    elif not shape(value):
        raise ValueError(f"{place} has the wrong type or value")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_some(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def _is_positive(value: object) -> bool:
    return _is_number(value) and value > 0  # type: ignore[operator]


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_settings(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    numbers = [each if isinstance(each, list) else [each] for each in value.values()]
    return all(type(number) in (int, float) for each in numbers for number in each)


def _is_arrival(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_some(value[0]) and _is_positive(value[1])


def _is_parts(value: object) -> bool:
    """Of a completion without rounds there are none."""
    return value == {} or (
        isinstance(value, dict)
        and all(isinstance(part := value.get(name), dict) and _is_number(part.get("total_seconds")) for name in PARTS)
    )


_MODEL = {
    "name": _is_text,
    "dtype": _is_text,
    "device": _is_text,
    "weight_bytes": _Since2(_OrNull(_is_count)),
    "parameters": _Since2(_OrNull(_is_count)),
}
_MACHINE = {
    "cpu": _Since2(_OrNull(_is_text)),
    "threads": _Since2(_OrNull(_is_some)),
    "read_bandwidth": _Since2(_OrNull(_is_positive)),
}
_RANKS = {"trials": _is_count, "hits": [_is_count]}
_STATISTICS = {
    "rounds": _is_count,
    "draft_n": _is_count,
    "acceptance_rate": _is_number,
    "tokens_per_round": _is_number,
    "mean_path_length": _is_number,
    "nodes_per_round": _is_number,
    "committed_per_level": _is_number,
    "acceptance_by_depth": _Since2([_is_number]),
    "round_parts": _Since2(_is_parts),
}
_RUN = {
    "label": _is_text,
    "policy": _OrNull(_is_text),
    "settings": _is_settings,
    "temperature": _is_number,
    "scheme": _OrNull(_is_text),
    "prompt": _is_count,
    "repetition": _is_count,
    "tokens": _is_some,
    "equal": _OrNull(_is_flag),
    "agrees": _Since2(_OrNull(_is_count)),
    "wall_seconds": _is_positive,
    "arrivals": _Since2([_is_arrival]),
    "peak_memory": _Since2(_OrNull({name: _OrNull(_is_count) for name in ("draft", "verify", "client")})),
    "statistics": _OrNull(_STATISTICS),
}
_PLACE = {
    "clients": _OrNull(_is_some),
    "rate": _OrNull(_is_positive),
    "client": _OrNull(_is_count),
    "start_seconds": _is_number,
}
_LOADED = {
    "queue_seconds": _is_number,
    "sessions_per_pass": _is_number,
    "rows_per_pass": _is_number,
    "trimmed_n": _is_count,
    "cached_tokens": _is_count,
    "draft_n_accepted": _is_count,
}
_FAILURE = {
    "label": _is_text,
    "repetition": _is_count,
    "load": _PLACE,
    "seconds": _is_number,
    "code": _is_text,
    "details": _is_text,
}
_POINT = {
    "curve": CURVES.__contains__,
    "nodes": _is_count,
    "context": _is_count,
    "sessions": _is_some,
    "seconds": _Some(_is_positive),
    "forward_seconds": _Some(_is_positive),
}
_FLOOR = {"weight_bytes": _is_some, "read_bandwidth": _is_positive, "seconds": _is_positive}
_REPORT = {
    "started": _is_text,
    "complete": _is_flag,
    "versions": _Since2({}),
    "git": _Since2(_OrNull({})),
    "machine": _Since2(_MACHINE),
    "models": {"target": _MODEL, "draft": _MODEL},
    "prompts": {"file": _is_text, "count": _is_count, "tokens": [_is_some]},
    "options": {"repetitions": _is_some},
    "skipped": [{"label": _is_text, "scheme": _is_text, "reason": _is_text}],
    "runs": [_RUN],
}
_OF_RUNS = {"options": {"max_new_tokens": _is_some}}
_OF_COMMAND: dict[str, dict[str, Any]] = {
    "ranks": _OF_RUNS | {"runs": [{"ranks": _RANKS}]},
    "load": _OF_RUNS | {"runs": [{"load": _PLACE, "statistics": _OrNull(_LOADED)}], "failures": [_FAILURE]},
    "costs": {"costs": {"plain_seconds": _Some(_is_positive), "points": [_POINT], "floor": _FLOOR}},
}
