"""The command line of `dynatree rank`; imports nothing slow."""

from __future__ import annotations

import argparse
from importlib import import_module

from dynatree.bench.arguments import check_packages
from dynatree.bench.options import add_hardware, add_out, add_prompts, at_least, temperature
from dynatree.cli.interrupts import raise_interrupts
from dynatree.engine.model.files import check_model
from dynatree.engine.settings import copied

EXAMPLE = "dynatree rank --target-model ~/models/llama-8b --draft-model self:int4 --prompts prompts.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree rank`."""
    parser.set_defaults(
        **{"measurement": "rank", "server": None, "baselines": [], "servers": [], "recorded": {}, "trees": False},
        **{"usage_error": parser.error, "scheme": "gumbel", "seed": 0},
    )
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target-model", required=True, metavar="embedded|PATH|HUB_ID", help="large model, whose output is produced"
    )
    group.add_argument(
        "--draft-model",
        dest="drafts",
        action="append",
        required=True,
        metavar="embedded|PATH|HUB_ID|self:int8|self:int4|none",
        help="small model, which drafts, or the target's own copy; repeatable; all are in memory at once (none is "
        "always ranked)",
    )
    add_hardware(group)
    add_prompts(parser)
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--max-new-tokens",
        type=at_least(2),
        default=100,
        metavar="N",
        help="tokens of each completion; the end of sequence is ignored (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        dest="temperatures",
        type=lambda text: [temperature(text)],
        default=[0.0],
        metavar="T",
        help="temperature of sampling; 0 is greedy (default: 0)",
    )
    for name, least, default, text in (
        ("repetitions", 1, 1, "repetitions of every run"),
        ("warmup", 0, 1, "uncounted runs before the measurement: every draft on the first N prompts"),
    ):
        group.add_argument(
            f"--{name}", type=at_least(least), default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    add_out(parser, "file to save the measurement to; `dynatree bench show` prints it")


def run(options: argparse.Namespace) -> int:
    """Rank the drafts; return the exit status, 1 if an output wrongly differs from plain decoding's.

    Raises:
        DynaTreeError: A service failed.
        StartupError: There is no such target, or no copy of it with such weights.
        SystemExit: A file or the target cannot be used.
    """
    check_packages("rank")
    check_model(options.target_model)
    for draft in options.drafts:
        copied(draft)
    raise_interrupts()
    status: int = import_module("dynatree.bench.rank.command").run(options)
    return status
