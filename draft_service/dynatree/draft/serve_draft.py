"""`dynatree draft`: serve a draft model in front of a verify service."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from dynatree.common import embedded
from dynatree.common.admission import Admission
from dynatree.common.engine import Engine, ModelSettings, choose_threads, load_engine, with_forward_costs
from dynatree.common.errors import FailedPreconditionError, StartupError
from dynatree.common.limits import IDLE_SECONDS, MAX_QUEUED, MAX_SESSIONS, MAX_TREE_NODES
from dynatree.common.model_info import ModelInfo
from dynatree.common.model_thread import ModelThread
from dynatree.common.prefix_cache import PrefixCache
from dynatree.common.server import Server
from dynatree.common.service_process import announce, model_settings, run_service
from dynatree.common.shared_cores import HalfTheThreads, SharedCores
from dynatree.draft.draft_model import EngineDraftModel
from dynatree.draft.drafter import Drafter
from dynatree.draft.generation import Backend
from dynatree.draft.service import SERVICE_NAME, DefaultPolicy, DraftService
from dynatree.draft.shared_growth import SharedGrowth
from dynatree.draft.verify_client import VerifyClient
from dynatree.v1 import draft_pb2_grpc

MEASURED_ROWS = 6  # a level of a tree has about so many
AHEAD = {"auto": None, "on": True, "off": False}


@dataclass(frozen=True)
class DraftLimits:
    """What completions may hold: how many run at once, how many wait, and how long one may wait for its client."""

    sessions: int = MAX_SESSIONS
    queue: int = MAX_QUEUED
    idle_seconds: float = IDLE_SECONDS
    prefix_cache: bool = True


def run(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    policy = DefaultPolicy(options.policy, options.policy_settings)
    limits = DraftLimits(options.max_sessions, options.queue, options.idle_timeout, options.prefix_cache == "on")
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
            limits,
        )
    )


async def serve(
    settings: ModelSettings,
    address: str,
    verify_address: str,
    verify_timeout: float,
    policy: DefaultPolicy,
    grace: float,
    draft_ahead: str,
    limits: DraftLimits,
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
        if settings.threads is None:
            await thread.run(choose_threads, engine)
        engine = await thread.run(with_forward_costs, engine, MEASURED_ROWS)
        server = await start_draft(engine, thread, verify, target, address, policy, limits, AHEAD[draft_ahead])
        info = engine.info
        announce(f"dynatree draft: {info.name} ({info.dtype}, {info.device}) for {target.name} on {server.address}")
        await server.wait(grace)
        thread.shutdown()
    finally:
        await verify.close()


async def start_draft(
    engine: Engine,
    thread: ModelThread,
    verify: VerifyClient,
    target: ModelInfo,
    address: str,
    policy: DefaultPolicy,
    limits: DraftLimits,
    ahead: bool | None = None,
) -> Server:
    """Serve completions at `address`; `thread` is the one that loaded the draft model, `target` what `verify` has now.

    `ahead`: whether to read on while the verify service works; None: where it has a device of its own.

    Raises:
        StartupError: The models do not fit together, or the address cannot be used.
    """
    cache = PrefixCache(engine.arena, enabled=limits.prefix_cache)
    drafter = Drafter(EngineDraftModel(engine, cache), MAX_TREE_NODES)
    cores = SharedCores(HalfTheThreads(thread))
    backend = Backend(engine, drafter, thread, SharedGrowth(drafter, thread), verify, cores)
    admission = Admission(limits.sessions, engine.arena.size, limits.queue)
    server = Server([SERVICE_NAME], limits.idle_seconds)
    try:
        service = DraftService(backend, target, policy, admission, ahead)
    except FailedPreconditionError as error:
        raise StartupError(str(error)) from error
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc_server)  # type: ignore[no-untyped-call]
    await server.start(address)
    return server
