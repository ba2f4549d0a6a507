"""The command line of `dynatree draft`; what it runs, and with it torch, is imported once the arguments are right."""

from __future__ import annotations

import argparse

from dynatree.cli.arguments import add_policy_settings
from dynatree.cli.service_arguments import add_service_arguments, network_address, seconds
from dynatree.common.errors import InvalidArgumentError
from dynatree.draft.policies import DEFAULT_POLICY, create_policy, policy_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatree draft`."""
    parser.add_argument(
        "--draft-model", required=True, metavar="embedded|PATH|HUB_ID", help="the small model, which only guesses"
    )
    parser.add_argument(
        "--verify",
        required=True,
        type=network_address,
        metavar="ADDR",
        help="the verify service: host:port or unix:PATH",
    )
    add_service_arguments(parser, default_port=50051)
    parser.add_argument(
        "--policy", default=DEFAULT_POLICY, choices=policy_names(), help="default policy (default: %(default)s)"
    )
    add_policy_settings(parser)
    parser.add_argument(
        "--draft-ahead",
        choices=["auto", "on", "off"],
        default="auto",
        help="read on while the verify service works; auto: if it has a device of its own (default: auto)",
    )
    parser.add_argument(
        "--verify-timeout",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for the verify service at start (default: 60)",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until a signal.

    Raises:
        SystemExit: The policy refuses a setting.
    """
    try:
        create_policy(options.policy, options.policy_settings)
    except InvalidArgumentError as error:
        raise SystemExit(str(error)) from None

    from dynatree.draft.serve_draft import run

    return run(options)
