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
        help="tokens of each completion (default: %(default)s)",
    )
    add_temperatures(parser, (0.0, 0.7, 1.0))
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="S", help="seed from which each prompt's is derived (default: 0)"
    )
    parser.add_argument(
        "--least-prob",
        type=share,
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
    add_temperatures(parser, ())
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
        type=list_of(at_least(1)),
        metavar="N,N,...",
        help="simulate this many concurrent clients with the real scheduler in virtual time, beside plain decoding",
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=2, metavar="R", help="with --clients: prompts of each client (default: 2)"
    )
    parser.add_argument("--fresh", action="store_true", help="start a new service for every prompt")
    parser.add_argument(
        "--noise", type=share, default=0.0, metavar="SHARE", help="lognormal noise of measured times (default: 0)"
    )
    parser.add_argument(
        "--stalls",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="share of measured times that are three times as long (default: 0)",
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="S", help="seed of noise and stalls (default: 0)"
    )
    parser.add_argument(
        "--processes",
        type=at_least(1),
        default=1,
        metavar="N",
        help="worker processes; results do not depend on it (default: 1)",
    )
    add_out(parser, "file to save the figures to, as JSON")
