"""The command line of `dynatree draft`; torch and the service are imported after the arguments are checked."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dynatree.cli.arguments import add_policy_settings, positive
from dynatree.cli.checks import check_draft
from dynatree.cli.imports import without_collection
from dynatree.cli.parser import group
from dynatree.cli.service_arguments import add_groups, add_service_arguments, network_addresses, seconds
from dynatree.common.limits import RESUME_SECONDS
from dynatree.common.logs import configure_logging
from dynatree.draft.policies import DEFAULT_POLICY, policy_names
from dynatree.engine.model.files import described

if TYPE_CHECKING:
    from dynatree.draft.settings import DraftSettings

log = logging.getLogger(__name__)

EXAMPLE = "dynatree draft --draft-model ~/models/llama-1b --verify gpu-host:50052 --verify-ca ca.pem"
_WAY = "the way to the verify services"
_QUOTAS = "quotas"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree draft`."""
    add_groups(parser, _WAY, _QUOTAS)
    group(parser, "model").add_argument(
        "--draft-model", required=True, metavar="embedded|PATH|HUB_ID", help="the small model, which only guesses"
    )
    group(parser, "network").add_argument(
        "--verify",
        required=True,
        type=network_addresses,
        metavar="ADDR[,ADDR...]",
        help="the verify services, each of which serves some of the sessions: host:port, unix:PATH, or, for all that a "
        "name stands for, dns:///name:port",
    )
    add_service_arguments(parser, default_port=50051)
    add_drafting_arguments(parser)
    add_request_arguments(parser)
    way = group(parser, _WAY)
    way.add_argument(
        "--verify-timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for the verify service at start (default: 60)",
    )
    for option, text in (
        ("--verify-ca", "authorities of their certificates, PEM: connections are encrypted"),
        ("--verify-cert", "certificate chain that is shown to them, PEM"),
        ("--verify-key", "its private key, PEM"),
        ("--verify-token-file", "the token that is shown to them, and nothing else"),
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
        help=f"policy of requests that name none: {', '.join(policy_names())} (default: %(default)s)",
    )
    add_policy_settings(drafting)
    drafting.add_argument(
        "--draft-ahead",
        choices=["auto", "on", "off"],
        default="auto",
        help="read on while the verify service works; auto: if it has a device of its own (default: auto)",
    )


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the quotas of principals, and for resuming after the loss of a verify service."""
    group(parser, "network").add_argument(
        "--resume-timeout",
        type=seconds,
        default=RESUME_SECONDS,
        metavar="SECONDS",
        help="how long a completion whose verify service was lost waits for another one (default: %(default)g)",
    )
    quotas = group(parser, _QUOTAS)
    quotas.description = "of each principal; a request past one is refused"
    for option, text in (
        ("--principal-sessions", "completions at once"),
        ("--principal-queue", "completions that may wait"),
        ("--principal-tokens", "tokens a minute, of prompts and completions"),
    ):
        quotas.add_argument(option, type=positive, metavar="N", help=f"{text} (default: no limit)")


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
    log.info("loading %s", described(settings.model.model))  # torch's import also takes seconds

    with without_collection():
        from dynatree.draft.serve_draft import run

    return run(settings)
