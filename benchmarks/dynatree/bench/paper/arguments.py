"""The command line of `dynatree bench paper`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dynatree.bench.options import add_prompts, add_services, at_least
from dynatree.bench.paper.presets import VERSIONS


def add_paper(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(usage_error=parser.error, baselines=[], servers=[])
    group = parser.add_argument_group("presets", "without --table and --figure all of a version")
    group.add_argument("--list", action="store_true", help="what there is, and what each takes; measures nothing")
    group.add_argument(
        "--version",
        dest="versions",
        action="append",
        choices=VERSIONS,
        help="000 to 003: DynaTree's versions; may be repeated (default: 003)",
    )
    group.add_argument("--table", dest="tables", action="append", metavar="N", help="may be repeated")
    group.add_argument(
        "--figure", dest="figures", action="append", metavar="N|NAME", help="by number or name; may be repeated"
    )
    kept = group.add_mutually_exclusive_group()
    kept.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="measure nothing: show what --out has kept there",
    )
    help_line = "keep the records; what is there already is not measured again"
    kept.add_argument("--out", type=Path, metavar="DIR", help=help_line)
    group.add_argument("--plots", type=Path, metavar="DIR", help="draw the figures, as SVG and PNG")
    add_services(parser)
    add_prompts(parser, paper=True)
    group = parser.add_argument_group("scaling down", "the record and the printed titles name each one given")
    group.add_argument("--quick", action="store_true", help="2 prompts, at most 64 new tokens, no warm-up")
    group.add_argument("--max-new-tokens", type=at_least(2), metavar="N", help="at most, of each completion")
    group.add_argument("--warmup", type=at_least(0), metavar="W", help="runs that do not count (default: 2)")
    parser.add_argument("--repetitions", type=at_least(1), default=1, metavar="R", help="of every run (default: 1)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="S", help="of the first prompt (default: 0)")
