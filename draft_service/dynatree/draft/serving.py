"""Starting the draft service on a loaded draft model."""

from __future__ import annotations

from dynatree.common.command import MAX_TREE_NODES
from dynatree.common.engine import Engine
from dynatree.common.errors import FailedPreconditionError, StartupError
from dynatree.common.model_info import ModelInfo
from dynatree.common.model_thread import ModelThread
from dynatree.common.server import Server
from dynatree.draft.draft_model import EngineDraftModel
from dynatree.draft.drafter import Drafter
from dynatree.draft.generation import Backend
from dynatree.draft.service import SERVICE_NAME, DefaultPolicy, DraftService
from dynatree.draft.verify_client import VerifyClient
from dynatree.v1 import draft_pb2_grpc


async def start_draft(
    engine: Engine,
    thread: ModelThread,
    verify: VerifyClient,
    target: ModelInfo,
    address: str,
    policy: DefaultPolicy,
    ahead: bool | None = None,
) -> Server:
    """Serve completions at `address`; `thread` is the one that loaded the draft model, `target` what `verify` has now.

    `ahead`: whether to read on while the verify service works; None: where it has a device of its own.

    Raises:
        StartupError: The models do not fit together, or the address cannot be used.
    """
    drafter = Drafter(EngineDraftModel(engine), MAX_TREE_NODES)
    backend = Backend(engine, drafter, thread, verify)
    server = Server([SERVICE_NAME])
    try:
        service = DraftService(backend, target, policy, ahead)
    except FailedPreconditionError as error:
        raise StartupError(str(error)) from error
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc_server)  # type: ignore[no-untyped-call]
    await server.start(address)
    return server
