"""`dynatree verify`: serve a target model."""

from __future__ import annotations

import argparse

from dynatree.common import embedded
from dynatree.common.command import (
    MAX_TREE_NODES,
    add_service_arguments,
    announce,
    model_settings,
    positive,
    run_service,
)
from dynatree.common.engine import ModelSettings, load_engine
from dynatree.common.model_thread import ModelThread
from dynatree.common.server import Server
from dynatree.v1 import verify_pb2_grpc
from dynatree.verify.service import SERVICE_NAME, VerifyService
from dynatree.verify.verifier import Verifier

MEASURED_ROWS = 64  # larger trees seldom pay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatree verify`."""
    parser.add_argument(
        "--target-model", required=True, metavar="embedded|PATH|HUB_ID", help="the large model, whose text is produced"
    )
    add_service_arguments(parser, default_port=50052)
    parser.add_argument(
        "--max-tree-nodes", type=positive, default=MAX_TREE_NODES, help="largest tree accepted (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    settings = model_settings(
        options,
        options.target_model,
        embedded.target_path(),
        speculative_slots=options.max_tree_nodes,
        measured_rows=min(MEASURED_ROWS, options.max_tree_nodes + 1),
    )
    return run_service(lambda: serve(settings, options.listen, options.max_tree_nodes, options.grace))


async def serve(settings: ModelSettings, address: str, max_tree_nodes: int, grace: float) -> None:
    """Load the target, then serve it until a signal.

    Raises:
        StartupError: The model or the address cannot be used.
    """
    thread = ModelThread("verify-model")
    engine = await thread.run(load_engine, settings)
    server = Server([SERVICE_NAME])
    service = VerifyService(Verifier(engine, max_tree_nodes), thread)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(service, server.grpc_server)  # type: ignore[no-untyped-call]
    await server.start(address)
    info = engine.info
    announce(f"dynatree verify: {info.name} ({info.dtype}, {info.device}) on {server.address}")
    await server.wait(grace)
    thread.shutdown()
