"""The command line of `dynatree verify`; torch and the service are imported after the arguments are checked."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dynatree.cli.arguments import not_negative, positive
from dynatree.cli.checks import check_verify
from dynatree.cli.imports import without_collection
from dynatree.cli.parser import group
from dynatree.cli.service_arguments import add_groups, add_service_arguments
from dynatree.common.limits import ALL_LAYERS
from dynatree.common.logs import configure_logging
from dynatree.engine.model.files import described

if TYPE_CHECKING:
    from dynatree.verify.settings import VerifySettings

log = logging.getLogger(__name__)

EXAMPLE = "dynatree verify --target-model ~/models/llama-8b --dtype bfloat16 --port 50052"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree verify`."""
    add_groups(parser)
    group(parser, "model").add_argument(
        "--target-model", required=True, metavar="embedded|PATH|HUB_ID", help="large model, whose output is produced"
    )
    add_service_arguments(parser, default_port=50052)
    add_batch_argument(parser)
    add_placement_arguments(parser)


def add_batch_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for the number of rows of the largest pass."""
    group(parser, "batching").add_argument(
        "--batch-rows",
        type=rows_or_auto,
        metavar="N|auto",
        help="most tokens of one pass over the trees of all sessions; below --max-sessions, sessions take turns "
        "(default: auto)",
    )


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for placing the target's layers if one device cannot hold them: offload, tensor parallelism."""
    memory = group(parser, "memory")
    memory.add_argument(
        "--resident-layers",
        type=layers,
        metavar="N|auto|all",
        help="number of layers that stay in memory; every forward pass reads the others from disk or, on a GPU, from "
        "the host's memory (default: auto, as many as fit)",
    )
    memory.add_argument(
        "--layer-cache",
        type=folder,
        metavar="FOLDER",
        help="folder to which the other layers are written once, laid out for this machine (default: the user's cache "
        "folder)",
    )
    group(parser, "model").add_argument(
        "--fixed-rows-file",
        type=Path,
        metavar="FILE",
        help="file that keeps the number of rows that --fixed-rows auto chose, so that restarts, and replicas that "
        "share the file, give the same bits (default: one in the user's cache folder)",
    )
    memory.add_argument(
        "--tensor-parallel",
        type=positive,
        default=1,
        metavar="N",
        help="number of local devices to split every layer over; needs the extra parallel (default: %(default)s)",
    )


def layers(text: str) -> int | None:
    """An argparse type: a whole number of at least 0, `all`, or None for `auto`."""
    try:
        return None if text == "auto" else ALL_LAYERS if text == "all" else not_negative(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, auto or all") from error


def folder(text: str) -> Path:
    """An argparse type: a non-empty path; an unset shell variable would give an empty one."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; expected a folder")
    return Path(text)


def rows_or_auto(text: str) -> int | None:
    """An argparse type: a whole number of at least 1, or None for "auto"."""
    return None if text == "auto" else positive(text)


rows_or_auto.__name__ = "whole number"  # argparse names the type in its message


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; return the exit status.

    Raises:
        StartupError: The command line is wrong, as found before the model loads.
    """
    from dynatree.cli.settings import verify_settings

    return serve(verify_settings(options))


def serve(settings: VerifySettings) -> int:
    """Check the settings, and serve until a signal; return the exit status.

    Raises:
        StartupError: The settings are wrong, as found before the model loads.
    """
    check_verify(settings)
    configure_logging(settings.operation.log_format, settings.operation.log_level)
    log.info("loading %s", described(settings.model.model))  # torch's import also takes seconds

    with without_collection():
        from dynatree.verify.serve_verify import run

    return run(settings)
