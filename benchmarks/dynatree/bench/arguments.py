"""The command lines of `dynatree bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from dynatree.bench.measurements import EMBEDDED, MEASUREMENTS, Measurement
from dynatree.bench.methods import BASELINES, SCHEMES, parse_method, parse_methods, parse_server
from dynatree.bench.paper.presets import VERSIONS
from dynatree.cli.arguments import device
from dynatree.cli.checks import check_pair
from dynatree.cli.interrupts import raise_interrupts
from dynatree.engine.settings import DTYPES, WEIGHTS

T = TypeVar("T")

_COSTS = "measure the cost of a round by nodes, context and sessions, and of a draft forward pass by rows"

_EXTRA = ("markdown_it", "matplotlib", "pandas", "pydantic", "requests", "tabulate")  # packages of the extra [bench]
_RECORD = "record plain decoding, and the draft's proposals along it and beside it, for `replay`"
_PAPER = "repeat the tables and figures of the DynaTree and DySpec papers, and show the published values beside them"
_REPLAY = "compute the tokens per second of policies from recorded rounds and costs, without a model"

EXAMPLE = "dynatree bench compare --prompts book.txt --policy throughput --count 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    subparsers = parser.add_subparsers(metavar="MEASUREMENT", dest="measurement", required=True)
    for name, measurement in MEASUREMENTS.items():
        subparser = subparsers.add_parser(name, help=measurement.help, description=measurement.help, allow_abbrev=False)
        subparser.set_defaults(usage_error=subparser.error, baselines=[], servers=[], recorded={}, trees=False)
        _add_services(subparser)
        _add_prompts(subparser)
        _add_runs(subparser, measurement)
        if measurement.takes_loads:
            _add_loads(subparser)
        _add_out(subparser)
    _add_costs(subparsers.add_parser("costs", help=_COSTS, description=_COSTS, allow_abbrev=False))
    _add_record(subparsers.add_parser("record", help=_RECORD, description=_RECORD, allow_abbrev=False))
    _add_replay(subparsers.add_parser("replay", help=_REPLAY, description=_REPLAY, allow_abbrev=False))
    _add_paper(subparsers.add_parser("paper", help=_PAPER, description=_PAPER, allow_abbrev=False))
    help_line = "print the tables of a saved measurement"
    show = subparsers.add_parser("show", help=help_line, description=help_line, allow_abbrev=False)
    show.add_argument("file", type=Path, metavar="FILE", help="measurement that --out has written")
    help_line = "write tables and plots of saved measurements, in Markdown and as an HTML page"
    report = subparsers.add_parser("report", help=help_line, description=help_line, allow_abbrev=False)
    report.add_argument("folder", type=Path, metavar="DIR", help="folder of measurements that --out has written")
    report.add_argument("--out", type=Path, metavar="DIR", help="folder of the report (default: DIR/report)")
    report.add_argument("--title", default="DynaTree: measurements", help="title of the report (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:  # fail before hours of measuring, not when the tables are printed
        raise SystemExit(f"dynatree bench needs {', '.join(missing)}: install dynatree with its extra [bench]")
    if hasattr(options, "target_model") and getattr(options, "server", None) is None:
        check_pair(options.target_model, options.draft_model or EMBEDDED)

    raise_interrupts()
    if options.measurement == "paper":
        from dynatree.bench.paper import command as paper_command

        return paper_command.run(options)
    from dynatree.bench import command

    return command.run(options)


def _add_services(parser: argparse.ArgumentParser) -> None:
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
    _add_hardware(group)


def _add_models(parser: argparse.ArgumentParser) -> None:
    """Declare the model options of measurements that start no services."""
    for name, what in (
        ("--target-model", "large model, which verifies"),
        ("--draft-model", "small model, which drafts"),
    ):
        metavar = "embedded|PATH|HUB_ID"
        parser.add_argument(name, default=EMBEDDED, metavar=metavar, help=f"{what} (default: %(default)s)")
    _add_hardware(parser)


def _add_hardware(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--dtype", choices=["auto", *DTYPES], help="data type of both models (default: the checkpoint's)"
    )
    group.add_argument("--weights", choices=["auto", *WEIGHTS], help="round both models' weights to 8 or 4 bits")
    group.add_argument("--device", type=device, help="torch device (default: a GPU if there is one)")
    group.add_argument(
        "--threads", type=_at_least(1), metavar="N", help="CPU threads of each model (default: automatic)"
    )


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(server=None)
    _add_models(parser)
    parser.add_argument(
        "--max-nodes",
        type=_at_least(1),
        default=256,
        metavar="N",
        help="nodes of the largest tree (default: %(default)s)",
    )
    parser.add_argument(
        "--repetitions",
        type=_at_least(1),
        default=5,
        metavar="R",
        help="measurements of each point (default: %(default)s)",
    )
    _add_out(parser)


def _add_record(parser: argparse.ArgumentParser) -> None:
    _add_models(parser)
    _add_prompts(parser, several=True)
    parser.add_argument(
        "--max-new-tokens",
        type=_at_least(2),
        default=100,
        metavar="N",
        help="tokens of each completion (default: %(default)s)",
    )
    _add_temperatures(parser, (0.0, 0.7, 1.0))
    parser.add_argument(
        "--seed",
        type=_at_least(0),
        default=0,
        metavar="S",
        help="seed from which each prompt's is derived (default: 0)",
    )
    parser.add_argument(
        "--least-prob",
        type=_share,
        default=1 / 64,
        metavar="P",
        help="least path probability of the recorded contexts beside the true path (default: 1/64)",
    )
    parser.add_argument(
        "--machines",
        type=Path,
        metavar="FILE.json",
        help="also record the contexts that throughput, dynatree and hybrid need on these machines",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="recording to write")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recordings", nargs="+", type=Path, metavar="RECORDING", help="recording that `record` has written"
    )
    parser.add_argument(
        "--machines",
        type=Path,
        metavar="FILE.json",
        help="costs of rounds on machines (default: costs.json beside the first recording)",
    )
    parser.add_argument(
        "--machine",
        action="append",
        default=[],
        metavar="NAME",
        help="machine of --machines; repeatable (default: all)",
    )
    parser.add_argument(
        "--policy",
        dest="policies",
        type=parse_methods,
        action="extend",
        metavar="NAME:set=value/value,...",
        help="policy with settings, which may have alternatives; repeatable (default: every policy)",
    )
    _add_temperatures(parser, ())
    parser.add_argument(
        "--constants",
        action="store_true",
        help="show the speed of --policy, or else of throughput, with other values of each tuned constant",
    )
    parser.add_argument(
        "--objectives",
        action="store_true",
        help="compare rules for the size of trees with two oracles that know the completion, for each text",
    )
    parser.add_argument(
        "--clients",
        type=_list_of(_at_least(1)),
        metavar="N,N,...",
        help="simulate this many concurrent clients with the real scheduler in virtual time, beside plain decoding",
    )
    parser.add_argument(
        "--rounds",
        type=_at_least(1),
        default=2,
        metavar="R",
        help="with --clients: prompts of each client (default: 2)",
    )
    parser.add_argument("--fresh", action="store_true", help="start a new service for every prompt")
    parser.add_argument(
        "--noise", type=_share, default=0.0, metavar="SHARE", help="lognormal noise of measured times (default: 0)"
    )
    parser.add_argument(
        "--stalls",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="share of measured times that are three times as long (default: 0)",
    )
    parser.add_argument(
        "--seed", type=_at_least(0), default=0, metavar="S", help="seed of noise and stalls (default: 0)"
    )
    parser.add_argument(
        "--processes",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="worker processes; results do not depend on it (default: 1)",
    )
    _add_out(parser, "file to save the figures to, as JSON")


def _add_paper(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(usage_error=parser.error, baselines=[], servers=[])
    group = parser.add_argument_group("presets", "default: all tables and figures of the version")
    group.add_argument("--list", action="store_true", help="list the presets and their options, and measure nothing")
    group.add_argument(
        "--version",
        dest="versions",
        action="append",
        choices=VERSIONS,
        help="version of the DynaTree paper, 000 to 003; repeatable (default: 003)",
    )
    group.add_argument("--table", dest="tables", action="append", metavar="N", help="number of a table; repeatable")
    group.add_argument(
        "--figure", dest="figures", action="append", metavar="N|NAME", help="number or name of a figure; repeatable"
    )
    kept = group.add_mutually_exclusive_group()
    kept.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="measure nothing, and show the records that --out has saved in this folder",
    )
    help_line = "folder to save the records to; existing records are not measured again"
    kept.add_argument("--out", type=Path, metavar="DIR", help=help_line)
    group.add_argument("--plots", type=Path, metavar="DIR", help="folder to draw the figures to, as SVG and PNG")
    _add_services(parser)
    _add_prompts(parser, paper=True)
    group = parser.add_argument_group("scaling down", "the records and the printed titles name the options given here")
    group.add_argument("--quick", action="store_true", help="2 prompts, at most 64 new tokens, no warm-up")
    group.add_argument("--max-new-tokens", type=_at_least(2), metavar="N", help="most tokens of each completion")
    group.add_argument("--warmup", type=_at_least(0), metavar="W", help="runs that are not counted (default: 2)")
    parser.add_argument(
        "--repetitions", type=_at_least(1), default=1, metavar="R", help="repetitions of every run (default: 1)"
    )
    parser.add_argument(
        "--seed", type=_at_least(0), default=0, metavar="S", help="seed of the first prompt (default: 0)"
    )


def _add_temperatures(parser: argparse._ActionsContainer, default: Sequence[float]) -> None:
    words = " and ".join(f"{each:g}" for each in default) or "all that were recorded"
    parser.add_argument(
        "--temperature",
        dest="temperatures",
        type=_temperature,
        action="append",
        metavar="T",
        help=f"temperature of sampling; 0 is greedy; repeatable (default: {words})",
    )


def _add_out(parser: argparse.ArgumentParser, what: str = "file to save the measurement to; `show` prints it") -> None:
    parser.add_argument("--out", type=Path, metavar="FILE.json", help=what)


def _add_prompts(parser: argparse.ArgumentParser, several: bool = False, paper: bool = False) -> None:
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
        "--count", type=_at_least(1), default=count, metavar="N", help=f"number of prompts (default: {default})"
    )
    group.add_argument(
        "--prompt-tokens",
        type=_at_least(1),
        default=length,
        metavar="N",
        help=f"tokens of each prompt from a text, and most tokens of other prompts (default: {default})",
    )


def _add_runs(parser: argparse.ArgumentParser, measurement: Measurement) -> None:
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--max-new-tokens",
        type=_at_least(2),
        default=100,
        metavar="N",
        help="tokens of each completion; the end of sequence is ignored (default: %(default)s)",
    )
    if measurement.takes_alternatives:
        group.add_argument(
            "--policy",
            dest="policies",
            type=parse_methods,
            action="extend",
            required=True,
            metavar="NAME:set=value/value,...",
            help="policy with settings, which may have alternatives; repeatable",
        )
    elif measurement.takes_policies:
        group.add_argument(
            "--policy",
            dest="policies",
            type=parse_method,
            action="append",
            metavar="NAME[:set=value,...]",
            help=f"policy with settings; repeatable (default: {measurement.default_policies})",
        )
    if measurement.takes_baselines:
        group.add_argument(
            "--baseline",
            dest="baselines",
            action="append",
            choices=["transformers"] if measurement.takes_loads else [*BASELINES, "all"],
            help="transformers' generate() in this process, at temperature 0; "
            + ("the prompts of all clients form one batch" if measurement.takes_loads else "repeatable")
            + " (default: none)",
        )
    if measurement.takes_baselines and not measurement.takes_loads:
        group.add_argument(
            "--baseline-server",
            dest="servers",
            action="append",
            type=parse_server,
            metavar="NAME=URL",
            help="llama.cpp server, or server of OpenAI's /v1/completions, with the same target; repeatable",
        )
    if measurement.takes_loads:
        group.add_argument(
            "--temperature",
            dest="temperatures",
            type=lambda text: (_temperature(text),),
            metavar="T",
            help="temperature of sampling; 0 is greedy (default: 0)",
        )
    else:
        _add_temperatures(group, measurement.temperatures)
    group.add_argument(
        "--seed",
        type=_at_least(0),
        default=0,
        metavar="S",
        help="seed from which each prompt's is derived (default: 0)",
    )
    if measurement.takes_scheme:
        group.add_argument(
            "--scheme",
            default="gumbel",
            choices=SCHEMES,
            help="sampling scheme of draft and target (default: %(default)s)",
        )
    if measurement.takes_repetitions:
        group.add_argument(
            "--repetitions",
            type=_at_least(1),
            default=1,
            metavar="R",
            help="repetitions of every run (default: %(default)s)",
        )
        group.add_argument(
            "--warmup",
            type=_at_least(0),
            default=1,
            metavar="W",
            help="uncounted runs before the measurement: every method "
            + ("W times" if measurement.takes_loads else "on the first W prompts")
            + " (default: %(default)s)",
        )


def _add_loads(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loads", "expected: --clients, --rate or both")
    group.add_argument(
        "--clients",
        type=_list_of(_at_least(1)),
        metavar="N,N,...",
        help="closed loops of this many clients; each sends a prompt when its previous completion has ended",
    )
    group.add_argument("--rounds", type=_at_least(1), metavar="R", help="prompts of each client (default: 2)")
    group.add_argument(
        "--rate",
        dest="rates",
        type=_list_of(_rate),
        metavar="R,R,...",
        help="open loops of this many requests per second, at the times of a Poisson process with --seed",
    )
    group.add_argument("--requests", type=_at_least(1), metavar="N", help="requests of each open loop (default: 32)")
    group.add_argument(
        "--max-sessions",
        type=_at_least(1),
        metavar="N",
        help="most concurrent completions of the services that the command starts (default: the services')",
    )


def _list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
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


_rate = _between(0, float("inf"), "a number of requests a second above 0")
_share = _between(0, 1, "a number between 0 and 1")


def _at_least(least: int) -> Callable[[str], int]:
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


def _temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature, 0 or more")
    return number
