"""The command line of `dynatree verify`; what it runs, and with it torch, is imported once the arguments are right."""

from __future__ import annotations

import argparse

from dynatree.cli.arguments import positive
from dynatree.cli.service_arguments import add_service_arguments
from dynatree.common.limits import MAX_TREE_NODES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatree verify`."""
    parser.add_argument(
        "--target-model", required=True, metavar="embedded|PATH|HUB_ID", help="the large model, whose text is produced"
    )
    add_service_arguments(parser, default_port=50052)
    parser.add_argument(
        "--max-tree-nodes",
        type=positive,
        default=MAX_TREE_NODES,
        metavar="N",
        help="largest tree accepted (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-rows",
        type=rows_or_auto,
        metavar="N|auto",
        help="most tokens of one pass over the trees of all sessions; with fewer than --max-sessions they take turns "
        "(default: auto)",
    )


def rows_or_auto(text: str) -> int | None:
    """An argparse type: a whole number of at least 1, or None for "auto"."""
    return None if text == "auto" else positive(text)


rows_or_auto.__name__ = "whole number"  # argparse names the type in its message


def run(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    from dynatree.verify.serve_target import run

    return run(options)
