"""The command lines of `dynatree bench`."""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from dynatree.bench.measurements import EMBEDDED, MEASUREMENTS, Measurement
from dynatree.bench.methods import BASELINES, SCHEMES, parse_method, parse_methods, parse_server
from dynatree.bench.options import (
    add_models,
    add_out,
    add_prompts,
    add_services,
    add_temperatures,
    at_least,
    list_of,
    rate,
    temperature,
)
from dynatree.bench.paper.arguments import add_paper
from dynatree.cli.checks import check_pair
from dynatree.cli.interrupts import raise_interrupts

EXAMPLE = "dynatree bench compare --prompts book.txt --policy throughput --count 8"

_EXTRA = ("markdown_it", "matplotlib", "pandas", "pydantic", "requests", "tabulate")  # packages of the extra [bench]
_COSTS = "what a round costs by nodes, context and sessions, and a draft forward by rows, against the memory's speed"
_PAPER = "the tables and figures of the DynaTree and DySpec papers, and the papers' own figures beside them"
# `dynatree.replay` imports this package, so its modules are imported by name, as those of `dynatree`'s commands are.
_REPLAY = "dynatree.replay.arguments"
# The modules that run a measurement; `dynatree.bench.command` runs all others.
_RUN_BY = {
    "paper": "dynatree.bench.paper.command",
    "record": "dynatree.replay.record_command",
    "replay": "dynatree.replay.replay_command",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    subparsers = parser.add_subparsers(metavar="MEASUREMENT", dest="measurement", required=True)
    for name, measurement in MEASUREMENTS.items():
        subparser = subparsers.add_parser(name, help=measurement.help, description=measurement.help, allow_abbrev=False)
        subparser.set_defaults(usage_error=subparser.error, baselines=[], servers=[], recorded={}, trees=False)
        add_services(subparser)
        add_prompts(subparser)
        _add_runs(subparser, measurement)
        if measurement.takes_loads:
            _add_loads(subparser)
        add_out(subparser)
    _add_costs(subparsers.add_parser("costs", help=_COSTS, description=_COSTS, allow_abbrev=False))
    import_module(_REPLAY).add_commands(subparsers)
    add_paper(subparsers.add_parser("paper", help=_PAPER, description=_PAPER, allow_abbrev=False))
    help_line = "print the tables of a saved measurement"
    show = subparsers.add_parser("show", help=help_line, description=help_line, allow_abbrev=False)
    show.add_argument("file", type=Path, metavar="FILE", help="what --out wrote")
    help_line = "tables and plots of a folder of saved measurements, in Markdown and as one page"
    report = subparsers.add_parser("report", help=help_line, description=help_line, allow_abbrev=False)
    report.add_argument("folder", type=Path, metavar="DIR", help="where the files are that --out wrote")
    report.add_argument("--out", type=Path, metavar="DIR", help="what to write to (default: DIR/report)")
    report.add_argument("--title", default="DynaTree: measurements", help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:  # fail before hours of measuring, not when the tables are printed
        raise SystemExit(f"dynatree bench needs {', '.join(missing)}: install dynatree with its extra [bench]")
    if hasattr(options, "target_model") and getattr(options, "server", None) is None:
        check_pair(options.target_model, options.draft_model or EMBEDDED)

    raise_interrupts()
    command = import_module(_RUN_BY.get(options.measurement, "dynatree.bench.command"))
    status: int = command.run(options)
    return status


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(server=None)
    add_models(parser)
    parser.add_argument(
        "--max-nodes", type=at_least(1), default=256, metavar="N", help="of the largest tree (default: %(default)s)"
    )
    parser.add_argument(
        "--repetitions", type=at_least(1), default=5, metavar="R", help="of every point (default: %(default)s)"
    )
    add_out(parser)


def _add_runs(parser: argparse.ArgumentParser, measurement: Measurement) -> None:
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--max-new-tokens",
        type=at_least(2),
        default=100,
        metavar="N",
        help="tokens of each completion, whose end of sequence is ignored (default: %(default)s)",
    )
    if measurement.takes_alternatives:
        group.add_argument(
            "--policy",
            dest="policies",
            type=parse_methods,
            action="extend",
            required=True,
            metavar="NAME:set=value/value,...",
            help="a policy and its settings, with alternatives; may be repeated",
        )
    elif measurement.takes_policies:
        group.add_argument(
            "--policy",
            dest="policies",
            type=parse_method,
            action="append",
            metavar="NAME[:set=value,...]",
            help=f"may be repeated (default: {measurement.default_policies})",
        )
    if measurement.takes_baselines:
        group.add_argument(
            "--baseline",
            dest="baselines",
            action="append",
            choices=["transformers"] if measurement.takes_loads else [*BASELINES, "all"],
            help="transformers' own generate(), in this process, at temperature 0; "
            + ("the prompts of all clients in one batch" if measurement.takes_loads else "may be repeated")
            + " (default: none)",
        )
    if measurement.takes_baselines and not measurement.takes_loads:
        group.add_argument(
            "--baseline-server",
            dest="servers",
            action="append",
            type=parse_server,
            metavar="NAME=URL",
            help="a server of llama.cpp, or of OpenAI's /v1/completions, that has the same target; may be repeated",
        )
    if measurement.takes_loads:
        group.add_argument(
            "--temperature",
            dest="temperatures",
            type=lambda text: (temperature(text),),
            metavar="T",
            help="0 is greedy (default: 0)",
        )
    else:
        add_temperatures(group, measurement.temperatures)
    group.add_argument(
        "--seed", type=at_least(0), default=0, metavar="S", help="each prompt has a seed derived from it (default: 0)"
    )
    if measurement.takes_scheme:
        group.add_argument(
            "--scheme",
            default="gumbel",
            choices=SCHEMES,
            help="how draft and target draw (default: %(default)s)",
        )
    if measurement.takes_repetitions:
        group.add_argument(
            "--repetitions", type=at_least(1), default=1, metavar="R", help="of every run (default: %(default)s)"
        )
        group.add_argument(
            "--warmup",
            type=at_least(0),
            default=1,
            metavar="W",
            help="before, and without counting: "
            + ("every method W times" if measurement.takes_loads else "every method on the first W prompts")
            + " (default: %(default)s)",
        )


def _add_loads(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loads", "--clients, --rate or both")
    group.add_argument(
        "--clients",
        type=list_of(at_least(1)),
        metavar="N,N,...",
        help="closed loops: so many clients, each of which sends a prompt when its last completion has ended",
    )
    group.add_argument("--rounds", type=at_least(1), metavar="R", help="prompts of each client (default: 2)")
    group.add_argument(
        "--rate",
        dest="rates",
        type=list_of(rate),
        metavar="R,R,...",
        help="open loops: so many requests a second, at random times (a Poisson process, which --seed sets)",
    )
    group.add_argument("--requests", type=at_least(1), metavar="N", help="of each open loop (default: 32)")
    group.add_argument(
        "--max-sessions",
        type=at_least(1),
        metavar="N",
        help="completions at once, of services that are started here; more wait (default: theirs)",
    )
