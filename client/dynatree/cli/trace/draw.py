"""The command `dynatree trace`: reads a trace and writes a page."""

import argparse
from pathlib import Path

from dynatree.cli.trace.page import trace_page
from dynatree.cli.trace.rounds import read_rounds

EXAMPLE = "dynatree trace rounds.jsonl --html rounds.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dynatree trace`."""
    parser.add_argument("file", metavar="FILE", type=Path, help="trace: one line of JSON per round")
    parser.add_argument(
        "--html", metavar="OUT", type=Path, required=True, help="HTML page to write; it needs no network"
    )


def run(options: argparse.Namespace) -> int:
    """Draw the trace; return the exit status.

    Raises:
        SystemExit: The trace cannot be read, is not a trace, or the page cannot be written.
    """
    page = trace_page(options.file.name, read_rounds(options.file))
    if options.html.exists() and options.html.samefile(options.file):
        raise SystemExit(f"--html is {options.html}, the trace itself; expected another file")
    try:
        options.html.write_text(page, encoding="utf-8", newline="\n")
    except OSError as error:
        raise SystemExit(f"{options.html} cannot be written: {error.strerror}") from None
    return 0
