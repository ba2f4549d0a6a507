"""The command line of `dynatree distill`; imports nothing slow."""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path

from dynatree.bench.arguments import check_packages
from dynatree.bench.options import at_least
from dynatree.cli.interrupts import raise_interrupts
from dynatree.distill.folder import Folder
from dynatree.engine.model.files import check_model

EXAMPLE = "dynatree distill --target-model ~/models/llama-8b --texts chats.jsonl --texts docs/ --out draft --minutes 60"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree distill`."""
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target-model", required=True, metavar="embedded|PATH|HUB_ID", help="model that the draft imitates"
    )
    models.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new folder that receives the draft")
    shape = models.add_mutually_exclusive_group()
    shape.add_argument(
        "--layers", type=at_least(1), metavar="N", help="layers kept of the target (default: an eighth, at least 2)"
    )
    shape.add_argument(
        "--draft-config", type=Path, metavar="FILE", help="config.json of a draft that begins with random layers"
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--texts",
        type=Path,
        action="append",
        required=True,
        metavar="FILE|FOLDER",
        help="UTF-8 text or JSON Lines, or a folder of such files; repeatable",
    )
    training.add_argument(
        "--minutes", type=_minutes, default=60.0, metavar="M", help="length of the command (default: %(default)g)"
    )
    training.add_argument(
        "--answers",
        type=_share,
        default=0.5,
        metavar="SHARE",
        help="share of the tokens that the target writes itself, from prompts in the texts (default: %(default)g)",
    )
    training.add_argument("--seed", type=at_least(0), default=0, metavar="S", help="seed (default: %(default)s)")
    training.add_argument(
        "--resume", action="store_true", help="continue the training whose checkpoint is in --out, with its texts"
    )


def run(options: argparse.Namespace) -> int:
    """Distill a draft; return the exit status.

    Raises:
        StartupError: The target, the texts or the folder cannot be used, or the disk is full.
    """
    begun = time.monotonic()
    check_packages("distill")
    check_model(options.target_model)
    Folder(options.out).check(options.resume)
    raise_interrupts()
    status: int = import_module("dynatree.distill.command").run(options, begun)
    return status


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")
    return minutes


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return share


_minutes.__name__ = _share.__name__ = "number"  # argparse names the type in its message
