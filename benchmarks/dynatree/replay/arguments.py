"""The command lines of `dynatree bench record` and `bench replay`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dynatree.bench.methods import parse_methods
from dynatree.bench.options import add_models, add_out, add_prompts, add_temperatures, at_least, list_of, share

_RECORD = "plain decoding, and what the draft proposes along it and off it, for `replay`"
_REPLAY = "policies on recorded rounds and recorded costs, without a model: tokens a second of each"


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare both commands."""
    _add_record(subparsers.add_parser("record", help=_RECORD, description=_RECORD, allow_abbrev=False))
    _add_replay(subparsers.add_parser("replay", help=_REPLAY, description=_REPLAY, allow_abbrev=False))


def _add_record(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    add_prompts(parser, several=True)
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(2),
        default=100,
        metavar="N",
        help="of each completion (default: %(default)s)",
    )
    add_temperatures(parser, (0.0, 0.7, 1.0))
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="S", help="each prompt has a seed derived from it (default: 0)"
    )
    parser.add_argument(
        "--least-prob",
        type=share,
        default=1 / 64,
        metavar="P",
        help="contexts off the true path are recorded down to this path probability (default: 1 / 64)",
    )
    parser.add_argument(
        "--machines",
        type=Path,
        metavar="FILE.json",
        help="record also what throughput, dynatree and hybrid ask for on these machines",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="the recording")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recordings", nargs="+", type=Path, metavar="RECORDING", help="what `record` wrote")
    parser.add_argument(
        "--machines",
        type=Path,
        metavar="FILE.json",
        help="what rounds cost (default: costs.json beside the first recording)",
    )
    parser.add_argument(
        "--machine", action="append", default=[], metavar="NAME", help="one of them; may be repeated (default: all)"
    )
    parser.add_argument(
        "--policy",
        dest="policies",
        type=parse_methods,
        action="extend",
        metavar="NAME:set=value/value,...",
        help="a policy and its settings, with alternatives; may be repeated (default: every policy)",
    )
    add_temperatures(parser, ())
    parser.add_argument(
        "--constants",
        action="store_true",
        help="what each tuned constant is worth, to --policy or to throughput: the speed with other values of it",
    )
    parser.add_argument(
        "--objectives",
        action="store_true",
        help="rules by which trees are sized, against two oracles that know the completion, by text",
    )
    parser.add_argument(
        "--clients",
        type=list_of(at_least(1)),
        metavar="N,N,...",
        help="many clients at once through the real scheduler, in virtual time; plain decoding beside them",
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=2, metavar="R", help="with --clients: prompts of each (default: 2)"
    )
    parser.add_argument("--fresh", action="store_true", help="every prompt finds a service that has just started")
    parser.add_argument(
        "--noise", type=share, default=0.0, metavar="SHARE", help="of measured times, lognormal (default: none)"
    )
    parser.add_argument(
        "--stalls",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="of them that are three times as long (default: none)",
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="S", help="of noise and stalls (default: 0)")
    parser.add_argument(
        "--processes", type=at_least(1), default=1, metavar="N", help="the results are the same (default: 1)"
    )
    add_out(parser, "keep the figures, as JSON")
