"""The JSON file of a measurement: everything that tables are made of.

Schema, version 1; one object:

    schema_version  1
    command         "compare", "ablation", "coupling" or "ranks"
    started         when, ISO 8601 with its offset from UTC
    complete        false where the measurement was interrupted
    versions        of dynatree, torch, transformers (null where not installed) and python, on the client's side
    git             {"commit", "modified"}: the checkout that the client ran from; null where it was none
    machine         {"platform", "cpu_count"}, the client's
    models          {"target": MODEL, "draft": MODEL}, MODEL = {"name", "dtype", "device", "parameters", "version"},
                    as the services report them; version is their DynaTree's
    prompts         {"file", "sha256", "field", "count", "tokens"}: the file's name, the field of a JSON Lines file or
                    null, and how many tokens each prompt has
    options         {"max_new_tokens", "prompt_tokens", "seed", "repetitions", "warmup", "ignore_eos"}
    skipped         [{"label", "scheme", "reason"}]: methods that the server refused under a sampling scheme
    runs            one object for each completion, in the order in which they were made:
        label, policy, settings      the method; settings by name, without those left to the server
        temperature                  0 is greedy
        scheme, seed                 null where the temperature is 0; otherwise --seed + the prompt's number
        prompt, repetition           their numbers, from 0
        tokens                       new tokens
        equal                        whether they are those of policy autoregressive, at the same temperature and seed;
                                     null where that is not expected (scheme residual) or was not run
        wall_seconds                 from the client's call to the last token
        statistics                   all of `dynatree.client.Statistics`
        ranks                        of `dynatree bench ranks` only: {"trials", "hits"}, see `ranks.py`
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, NotRequired, TypedDict

from dynatree.bench.ranks import RankCounts

SCHEMA_VERSION = 1
COMMANDS = ("compare", "ablation", "coupling", "ranks")


class Run(TypedDict):
    """One completion; see the module."""

    label: str
    policy: str
    settings: dict[str, float]
    temperature: float
    scheme: str | None
    seed: int | None
    prompt: int
    repetition: int
    tokens: int
    equal: bool | None
    wall_seconds: float
    statistics: dict[str, Any]
    ranks: NotRequired[RankCounts]


class Skipped(TypedDict):
    """A method that the server refused under a sampling scheme, and what it said."""

    label: str
    scheme: str
    reason: str


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


def check_writable(path: Path) -> None:
    """Find out before hours of measuring that a report could not be saved.

    Raises:
        SystemExit: It could not.
    """
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise SystemExit(f"{path} cannot be written; expected a file in a folder that is there")


def save(report: Report, path: Path) -> None:
    """Write the file.

    Raises:
        SystemExit: It cannot be written.
    """
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}") from None


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
        if value["schema_version"] != SCHEMA_VERSION or value["command"] not in COMMANDS:
            raise ValueError(f"schema_version {value['schema_version']}, command {value['command']!r} are not known")
        _check(value, _REPORT, "the file")
        if value["command"] == "ranks":
            _check(value["runs"], [{"ranks": _RANKS}], "runs")
    except ValueError as error:
        raise SystemExit(f"{path} is not a file of dynatree bench: {error}") from None
    report: Report = value
    return report


def _check(value: Any, shape: Any, place: str) -> None:
    """Hold a value against a shape: a dictionary of shapes, a list of one shape, or a predicate."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{place} is not an object")
        for name, inner in shape.items():
            if name not in value:
                raise ValueError(f"{place} has no {name}")
            _check(value[name], inner, name)
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


def _or_null(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or holds(value)


_MODEL = {"name": _is_text, "dtype": _is_text, "device": _is_text}
_RANKS = {"trials": _is_count, "hits": [_is_count]}
_STATISTICS = {
    "rounds": _is_count,
    "draft_n": _is_count,
    "acceptance_rate": _is_number,
    "tokens_per_round": _is_number,
    "mean_path_length": _is_number,
    "nodes_per_round": _is_number,
    "committed_per_level": _is_number,
}
_RUN = {
    "label": _is_text,
    "temperature": _is_number,
    "scheme": _or_null(_is_text),
    "prompt": _is_count,
    "repetition": _is_count,
    "tokens": _is_some,
    "equal": _or_null(_is_flag),
    "wall_seconds": _is_positive,
    "statistics": _STATISTICS,
}
_REPORT = {
    "complete": _is_flag,
    "models": {"target": _MODEL, "draft": _MODEL},
    "prompts": {"file": _is_text, "count": _is_count, "tokens": [_is_some]},
    "options": {"max_new_tokens": _is_some, "repetitions": _is_some},
    "skipped": [{"label": _is_text, "scheme": _is_text, "reason": _is_text}],
    "runs": [_RUN],
}
