"""`dynatree verify`: serve a target model."""

from __future__ import annotations

import argparse

from dynatree.common import embedded
from dynatree.common.engine import Engine, ModelSettings, load_engine
from dynatree.common.model_thread import ModelThread
from dynatree.common.server import Server
from dynatree.common.service_process import announce, model_settings, run_service
from dynatree.v1 import verify_pb2_grpc
from dynatree.verify.service import SERVICE_NAME, VerifyService
from dynatree.verify.verifier import Verifier

MEASURED_ROWS = 64  # larger trees seldom pay


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
    server = await start_verify(engine, thread, address, max_tree_nodes)
    info = engine.info
    announce(f"dynatree verify: {info.name} ({info.dtype}, {info.device}) on {server.address}")
    await server.wait(grace)
    thread.shutdown()


async def start_verify(engine: Engine, thread: ModelThread, address: str, max_tree_nodes: int) -> Server:
    """Serve a target at `address`; `thread` is the one that loaded it.

    Raises:
        StartupError: The address cannot be used.
    """
    server = Server([SERVICE_NAME])
    service = VerifyService(Verifier(engine, max_tree_nodes), thread)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(service, server.grpc_server)  # type: ignore[no-untyped-call]
    await server.start(address)
    return server
