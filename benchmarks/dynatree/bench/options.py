"""Options that several commands of `dynatree bench` share, and their types."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from dynatree.bench.measurements import EMBEDDED
from dynatree.cli.arguments import device
from dynatree.cli.service_arguments import add_draft_weights
from dynatree.engine.settings import DTYPES, WEIGHTS

T = TypeVar("T")


def add_services(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the services to measure."""
    group = parser.add_argument_group(
        "models", "the measurement starts both services, unless --server names a running draft service"
    )
    group.add_argument("--server", metavar="ADDR", help="running draft service to measure: host:port or unix:PATH")
    group.add_argument(
        "--target-model",
        default=EMBEDDED,
        metavar="embedded|PATH|HUB_ID",
        help="large model; with --server, only its tokenizer and baselines are loaded (default: embedded)",
    )
    group.add_argument(
        "--draft-model", metavar="embedded|PATH|HUB_ID", help="small model, which drafts (default: embedded)"
    )
    add_hardware(group)


def add_models(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the models of a measurement that starts no services."""
    for name, what in (
        ("--target-model", "large model, which verifies"),
        ("--draft-model", "small model, which drafts"),
    ):
        metavar = "embedded|PATH|HUB_ID"
        parser.add_argument(name, default=EMBEDDED, metavar=metavar, help=f"{what} (default: %(default)s)")
    add_hardware(parser)


def add_hardware(group: argparse._ActionsContainer) -> None:
    """Declare the options for the number formats, the device and the threads of both models."""
    group.add_argument(
        "--dtype", choices=["auto", *DTYPES], help="data type of both models (default: the checkpoint's)"
    )
    group.add_argument("--weights", choices=["auto", *WEIGHTS], help="round both models' weights to 8 or 4 bits")
    add_draft_weights(group)
    group.add_argument("--device", type=device, help="torch device (default: a GPU if there is one)")
    group.add_argument("--threads", type=at_least(1), metavar="N", help="CPU threads of each model")


def add_prompts(parser: argparse.ArgumentParser, several: bool = False, paper: bool = False) -> None:
    """Declare the options of the prompts: of one file, of several, or of the paper's data sets."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        type=str if paper else Path,
        action="append" if several or paper else "store",
        required=not paper,
        metavar="[DATA_SET=]FILE|NAME[:CONFIG]" if paper else "FILE|NAME[:CONFIG]",
        help="UTF-8 file of text or JSON Lines, or hub name or folder of a Hugging Face data set"
        + ("; for one of the paper's data sets or for all" if paper else "")
        + ("; repeatable" if several or paper else ""),
    )
    group.add_argument(
        "--prompts-format",
        default="auto",
        choices=["auto", "text", "jsonl"],
        help="format of the prompts: text cuts them from all lines or rows, jsonl takes each line or row as a prompt "
        "(default: auto, by the file's name; jsonl for a data set)",
    )
    group.add_argument("--split", default="test", metavar="NAME", help="split of a data set (default: %(default)s)")
    group.add_argument(
        "--field",
        metavar="NAME",
        help="field of JSON Lines, or column of a data set, that has the prompt (default: detected)",
    )
    if not several and not paper:
        help_line = "name of the prompts in tables (default: the file's name without suffix)"
        group.add_argument("--name", metavar="NAME", help=help_line)
    count, length = (None, None) if paper else (10, 128)
    default = "the paper's" if paper else "%(default)s"
    group.add_argument(
        "--count", type=at_least(1), default=count, metavar="N", help=f"number of prompts (default: {default})"
    )
    group.add_argument(
        "--prompt-tokens",
        type=at_least(1),
        default=length,
        metavar="N",
        help=f"tokens of each prompt from a text, and most tokens of other prompts (default: {default})",
    )


def add_temperatures(parser: argparse._ActionsContainer, default: Sequence[float]) -> None:
    """Declare `--temperature`, which may be repeated."""
    words = " and ".join(f"{each:g}" for each in default) or "all that were recorded"
    parser.add_argument(
        "--temperature",
        dest="temperatures",
        type=temperature,
        action="append",
        metavar="T",
        help=f"temperature of sampling; 0 is greedy; repeatable (default: {words})",
    )


def add_out(parser: argparse.ArgumentParser, what: str = "file to save the measurement to; `show` prints it") -> None:
    """Declare `--out`."""
    parser.add_argument("--out", type=Path, metavar="FILE.json", help=what)


def list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """An argparse type: distinct values of another type, separated by commas."""

    def parse_all(text: str) -> list[T]:
        values = [parse(part) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} has a number twice")
        return values

    return parse_all


def _between(low: float, high: float, meaning: str) -> Callable[[str], float]:
    """An argparse type: a number above `low` and below `high`; errors call it `meaning`."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = low
        if not low < number < high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {meaning}")
        return number

    return parse


rate = _between(0, float("inf"), "a number of requests a second above 0")
share = _between(0, 1, "a number between 0 and 1")


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return number

    return parse


def temperature(text: str) -> float:
    """An argparse type: a number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature, 0 or more")
    return number
