"""`dynatree draft`: serve a draft model in front of a verify service."""

from __future__ import annotations

import argparse

from dynatree.common import embedded
from dynatree.common.command import (
    MAX_TREE_NODES,
    add_service_arguments,
    announce,
    model_settings,
    network_address,
    run_service,
    seconds,
)
from dynatree.common.engine import ModelSettings, load_engine, with_forward_costs
from dynatree.common.errors import FailedPreconditionError, StartupError
from dynatree.common.model_thread import ModelThread
from dynatree.common.server import Server
from dynatree.draft.drafter import Drafter
from dynatree.draft.policies import DEFAULT_POLICY, create_policy, policy_names
from dynatree.draft.service import SERVICE_NAME, DefaultPolicy, DraftService
from dynatree.draft.verify_client import VerifyClient
from dynatree.v1 import draft_pb2_grpc

MEASURED_ROWS = 6  # a level of a tree has about so many
AHEAD = {"auto": None, "on": True, "off": False}


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
    parser.add_argument(
        "--set", action="append", default=[], type=_setting, metavar="NAME=VALUE", help="a setting of that policy"
    )
    parser.add_argument(
        "--draft-ahead",
        choices=list(AHEAD),
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
    """Serve until a signal."""
    policy = DefaultPolicy(options.policy, dict(options.set))
    if len(policy.settings) < len(options.set):
        raise SystemExit("--set names a setting twice")
    try:
        create_policy(policy.name, policy.settings)
    except Exception as error:
        raise SystemExit(str(error)) from error
    settings = model_settings(
        options,
        options.draft_model,
        embedded.draft_path(),
        speculative_slots=2 * MAX_TREE_NODES,
        chooses_tokens=False,
    )
    return run_service(
        lambda: serve(
            settings,
            options.listen,
            options.verify,
            options.verify_timeout,
            policy,
            options.grace,
            options.draft_ahead,
        )
    )


async def serve(
    settings: ModelSettings,
    address: str,
    verify_address: str,
    verify_timeout: float,
    policy: DefaultPolicy,
    grace: float,
    draft_ahead: str = "auto",
) -> None:
    """Load the draft, find the verify service, then serve until a signal.

    Raises:
        StartupError: The model, the address or the verify service cannot be used, or the models do not fit together.
    """
    verify = VerifyClient(verify_address)
    try:
        thread = ModelThread("draft-model")
        engine = await thread.run(load_engine, settings)
        target = await verify.target(verify_timeout)
        # measured when the verify service has measured its own: on one machine they would slow each other down
        engine = await thread.run(with_forward_costs, engine, MEASURED_ROWS)
        drafter = Drafter(engine, MAX_TREE_NODES, engine.info.vocab_size)
        server = Server([SERVICE_NAME])
        try:
            service = DraftService(drafter, thread, verify, target, policy, AHEAD[draft_ahead])
        except FailedPreconditionError as error:
            raise StartupError(str(error)) from error
        draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc_server)  # type: ignore[no-untyped-call]
        await server.start(address)
        info = engine.info
        announce(f"dynatree draft: {info.name} ({info.dtype}, {info.device}) for {target.name} on {server.address}")
        await server.wait(grace)
        thread.shutdown()
    finally:
        await verify.close()


def _setting(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number") from None
