"""The command line of `dynatree bench paper`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dynatree.bench.options import add_prompts, add_services, at_least
from dynatree.bench.paper.presets import VERSIONS


def add_paper(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
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
    add_services(parser)
    add_prompts(parser, paper=True)
    group = parser.add_argument_group("scaling down", "the records and the printed titles name the options given here")
    group.add_argument("--quick", action="store_true", help="2 prompts, at most 64 new tokens, no warm-up")
    group.add_argument("--max-new-tokens", type=at_least(2), metavar="N", help="most tokens of each completion")
    group.add_argument("--warmup", type=at_least(0), metavar="W", help="runs that are not counted (default: 2)")
    parser.add_argument(
        "--repetitions", type=at_least(1), default=1, metavar="R", help="repetitions of every run (default: 1)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="S", help="of the first prompt (default: 0)")
