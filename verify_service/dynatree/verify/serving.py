"""Starting the verify service on a loaded target."""

from __future__ import annotations

from dynatree.common.engine import Engine
from dynatree.common.model_thread import ModelThread
from dynatree.common.server import Server
from dynatree.v1 import verify_pb2_grpc
from dynatree.verify.service import SERVICE_NAME, VerifyService
from dynatree.verify.verifier import Verifier


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
