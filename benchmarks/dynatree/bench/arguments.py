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
from dynatree.engine.settings import copied

EXAMPLE = "dynatree bench compare --prompts book.txt --policy throughput --count 8"

_EXTRA = ("markdown_it", "matplotlib", "pandas", "pydantic", "requests", "tabulate")  # packages of the extra [bench]
_COSTS = "measure the cost of a round by nodes, context and sessions, and of a draft forward pass by rows"
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
    show.add_argument("file", type=Path, metavar="FILE", help="measurement that --out has written")
    help_line = "write tables and plots of saved measurements, in Markdown and as an HTML page"
    report = subparsers.add_parser("report", help=help_line, description=help_line, allow_abbrev=False)
    report.add_argument("folder", type=Path, metavar="DIR", help="folder of measurements that --out has written")
    report.add_argument("--out", type=Path, metavar="DIR", help="folder of the report (default: DIR/report)")
    report.add_argument("--title", default="DynaTree: measurements", help="title of the report (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    check_packages("bench")
    if options.measurement in ("costs", "record") and (weights := copied(options.draft_model)):
        raise SystemExit(
            f"--draft-model {options.draft_model}: expected the target itself and --draft-weights {weights}"
        )
    if hasattr(options, "target_model") and getattr(options, "server", None) is None:
        check_pair(options.target_model, options.draft_model or EMBEDDED)

    raise_interrupts()
    command = import_module(_RUN_BY.get(options.measurement, "dynatree.bench.command"))
    status: int = command.run(options)
    return status


def check_packages(command: str) -> None:
    """Check, before hours of measuring, that the packages are there that print the tables.

    Raises:
        SystemExit: A package of the extra `bench` is missing.
    """
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise SystemExit(f"dynatree {command} needs {', '.join(missing)}: install dynatree with its extra [bench]")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(server=None)
    add_models(parser)
    parser.add_argument(
        "--max-nodes",
        type=at_least(1),
        default=256,
        metavar="N",
        help="nodes of the largest tree (default: %(default)s)",
    )
    parser.add_argument(
        "--repetitions",
        type=at_least(1),
        default=5,
        metavar="R",
        help="measurements of each point (default: %(default)s)",
    )
    add_out(parser)


def _add_runs(parser: argparse.ArgumentParser, measurement: Measurement) -> None:
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--max-new-tokens",
        type=at_least(2),
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
            type=lambda text: (temperature(text),),
            metavar="T",
            help="temperature of sampling; 0 is greedy (default: 0)",
        )
    else:
        add_temperatures(group, measurement.temperatures)
    group.add_argument(
        "--seed", type=at_least(0), default=0, metavar="S", help="seed from which each prompt's is derived (default: 0)"
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
            type=at_least(1),
            default=1,
            metavar="R",
            help="repetitions of every run (default: %(default)s)",
        )
        group.add_argument(
            "--warmup",
            type=at_least(0),
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
        type=list_of(at_least(1)),
        metavar="N,N,...",
        help="closed loops of this many clients; each sends a prompt when its previous completion has ended",
    )
    group.add_argument("--rounds", type=at_least(1), metavar="R", help="prompts of each client (default: 2)")
    group.add_argument(
        "--rate",
        dest="rates",
        type=list_of(rate),
        metavar="R,R,...",
        help="open loops of this many requests per second, at the times of a Poisson process with --seed",
    )
    group.add_argument("--requests", type=at_least(1), metavar="N", help="requests of each open loop (default: 32)")
    group.add_argument(
        "--max-sessions",
        type=at_least(1),
        metavar="N",
        help="most concurrent completions of the services that the command starts (default: the services')",
    )
