"""The command line of `dynatree draft`; torch and the service are imported after the arguments are checked."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dynatree.cli.arguments import add_policy_settings, positive
from dynatree.cli.checks import check_draft
from dynatree.cli.imports import without_collection, without_torch
from dynatree.cli.parser import group
from dynatree.cli.service_arguments import (
    add_groups,
    add_service_arguments,
    history_tokens,
    network_addresses,
    seconds,
)
from dynatree.common.limits import HISTORY_TOKENS, RECORD_BYTES, RESUME_SECONDS
from dynatree.common.logs import configure_logging
from dynatree.common.shutdown import hangup_ignored
from dynatree.draft.policies import DEFAULT_POLICY, policy_names
from dynatree.engine.model.files import described

if TYPE_CHECKING:
    from dynatree.draft.settings import DraftSettings

log = logging.getLogger(__name__)

EXAMPLE = "dynatree draft --draft-model ~/models/llama-1b --verify gpu-host:50052 --verify-ca ca.pem"
_WAY = "connection to the verify services"
_QUOTAS = "quotas"
_RECORDING = "recording"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree draft`."""
    add_groups(parser, _WAY, _QUOTAS, _RECORDING)
    group(parser, "model").add_argument(
        "--draft-model",
        required=True,
        metavar="embedded|PATH|HUB_ID|none",
        help="small model, which drafts; none: draft from n-grams of the text alone",
    )
    group(parser, "network").add_argument(
        "--verify",
        required=True,
        type=network_addresses,
        metavar="ADDR[,ADDR...]",
        help="verify services, over which the sessions are distributed: host:port, unix:PATH, or dns:///name:port for "
        "all addresses of a DNS name",
    )
    add_service_arguments(parser, default_port=50051)
    add_drafting_arguments(parser)
    add_request_arguments(parser)
    add_record_arguments(parser)
    way = group(parser, _WAY)
    way.add_argument(
        "--verify-timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="time to wait for a verify service at start (default: %(default)g)",
    )
    for option, text in (
        ("--verify-ca", "PEM file of the authorities that may sign their certificates; enables TLS"),
        ("--verify-cert", "PEM file of the certificate chain to present to them"),
        ("--verify-key", "PEM file of the private key of --verify-cert"),
        ("--verify-token-file", "file that contains only the token to send to them"),
    ):
        way.add_argument(option, type=Path, metavar="FILE", help=text)


def add_drafting_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for drafting: the default policy, and drafting ahead."""
    drafting = group(parser, "model")
    drafting.add_argument(
        "--policy",
        default=DEFAULT_POLICY,
        choices=policy_names(),
        metavar="NAME",
        help=f"policy of requests that name no policy: {', '.join(policy_names())} (default: %(default)s)",
    )
    add_policy_settings(drafting)
    drafting.add_argument(
        "--draft-ahead",
        choices=["auto", "on", "off"],
        default="auto",
        help="draft ahead while the target verifies; auto: if it has another device or layers on disk (default: auto)",
    )


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for quotas and histories of principals, and for resuming after the loss of a verify service."""
    group(parser, "network").add_argument(
        "--resume-timeout",
        type=seconds,
        default=RESUME_SECONDS,
        metavar="SECONDS",
        help="how long a completion waits for a new verify service after losing its own (default: %(default)g)",
    )
    memory = group(parser, "memory")
    memory.add_argument(
        "--history-tokens",
        type=history_tokens,
        default=HISTORY_TOKENS,
        metavar="N",
        help="tokens of finished completions to keep in memory and draft from, within each principal; 0 keeps none "
        "(default: %(default)s)",
    )
    memory.add_argument(
        "--history-file",
        type=Path,
        metavar="FILE",
        help="save them at a shutdown, and load them at the start (default: they are forgotten)",
    )
    quotas = group(parser, _QUOTAS)
    quotas.description = "limits of each principal; requests beyond a limit are refused"
    for option, text in (
        ("--principal-sessions", "most concurrent completions"),
        ("--principal-queue", "most waiting completions"),
        ("--principal-tokens", "most tokens of prompts and completions per minute"),
    ):
        quotas.add_argument(option, type=positive, metavar="N", help=f"{text} (default: no limit)")


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for recording completions, as texts for the training of a draft model."""
    recording = group(parser, _RECORDING)
    recording.description = "off by default; a request with store false is never recorded"
    recording.add_argument(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="append the text of each completion to JSON lines in this folder, from which a draft can be trained",
    )
    recording.add_argument(
        "--record-principals",
        type=principals,
        metavar="NAME[,NAME...]",
        help="record these principals only (default: all)",
    )
    recording.add_argument("--record-prompts", action="store_true", help="record prompts as well")
    recording.add_argument(
        "--record-bytes",
        type=positive,
        default=RECORD_BYTES,
        metavar="N",
        help="most bytes of the folder; the oldest file is deleted first (default: %(default)s)",
    )


def principals(text: str) -> frozenset[str]:
    """An argparse type: comma-separated names of principals."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return frozenset(names)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; return the exit status.

    Raises:
        StartupError: The command line is wrong, as found before the model loads.
    """
    from dynatree.cli.settings import draft_settings

    return serve(draft_settings(options))


def serve(settings: DraftSettings) -> int:
    """Check the settings, and serve until a signal; return the exit status.

    Raises:
        StartupError: The settings are wrong, as found before the model loads.
    """
    check_draft(settings)
    configure_logging(settings.operation.log_format, settings.operation.log_level)
    if settings.model is None:
        log.info("no draft model: drafting from n-grams alone")
        if settings.unused:
            log.warning("without a draft model, %s have no effect", ", ".join(settings.unused))
        without_torch()
    elif settings.copy:
        log.info("the target's own %s copy loads once the target serves", settings.model.weights)
    else:
        log.info("loading %s", described(settings.model.model))  # torch's import also takes seconds

    with hangup_ignored():
        with without_collection():
            if settings.model is None:
                from dynatree.draft.serve_ngrams import run
            else:
                from dynatree.draft.serve_draft import run
        return run(settings)
