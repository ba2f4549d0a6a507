"""`dynatree draft`: serve a draft model in front of a verify service."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass

from dynatree.common import embedded
from dynatree.common.address import split_addresses
from dynatree.common.admission import NO_QUOTA, Admission, Quota
from dynatree.common.channel import ChannelSettings, Connector, channel_settings
from dynatree.common.engine import Engine, ModelSettings, choose_threads, load_engine, with_forward_costs
from dynatree.common.limits import IDLE_SECONDS, MAX_QUEUED, MAX_SESSIONS, MAX_TREE_NODES, RESUME_SECONDS
from dynatree.common.logs import announce_ready
from dynatree.common.model_info import ModelInfo
from dynatree.common.model_thread import ModelThread
from dynatree.common.operation import Operation, OperationSettings, operation_settings
from dynatree.common.prefix_cache import PrefixCache
from dynatree.common.server import Server
from dynatree.common.service_process import model_settings, run_service
from dynatree.common.shared_cores import HalfTheThreads, SharedCores
from dynatree.draft.best_guesses import BestGuesses
from dynatree.draft.draft_model import EngineDraftModel
from dynatree.draft.drafter import Drafter
from dynatree.draft.generation import Backend
from dynatree.draft.metrics import DraftMetrics
from dynatree.draft.replicas import Replicas
from dynatree.draft.service import SERVICE_NAME, DefaultPolicy, DraftService
from dynatree.draft.shared_growth import SharedGrowth
from dynatree.draft.target import Target
from dynatree.v1 import draft_pb2_grpc

log = logging.getLogger(__name__)

MEASURED_ROWS = 6  # a level of a tree has about so many
AHEAD = {"auto": None, "on": True, "off": False}


@dataclass(frozen=True)
class DraftLimits:
    """What completions may hold: how many run at once, how many wait, and how long one may wait.

    `idle_seconds` is for its client, `resume_seconds` for another verify service where its own was lost; `quota` is
    what one principal may have of all this. No tree has more than `max_tree_nodes`.
    """

    sessions: int = MAX_SESSIONS
    queue: int = MAX_QUEUED
    idle_seconds: float = IDLE_SECONDS
    prefix_cache: bool = True
    resume_seconds: float = RESUME_SECONDS
    quota: Quota = NO_QUOTA
    max_tree_nodes: int = MAX_TREE_NODES


def run(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    policy = DefaultPolicy(options.policy, options.policy_settings)
    limits = DraftLimits(
        options.max_sessions,
        options.queue,
        options.idle_timeout,
        options.prefix_cache == "on",
        options.resume_timeout,
        Quota(options.principal_sessions, options.principal_queue, options.principal_tokens),
        options.max_tree_nodes,
    )
    settings = model_settings(
        options,
        options.draft_model,
        embedded.draft_path(),
        speculative_slots=2 * options.max_tree_nodes,
        chooses_tokens=False,
    )
    return run_service(
        lambda: serve(settings, verify_services(options), policy, limits, operation_settings(options)),
        options,
    )


@dataclass(frozen=True)
class VerifyServices:
    """Where the verify services are, and how to reach them.

    Attributes:
        addresses: As `Replicas` takes them.
        channel: The way to them.
        timeout: Seconds that the first may take to come up.
        ahead: Whether to read on while they work; None: where they have devices of their own.
    """

    addresses: str
    channel: ChannelSettings
    timeout: float
    ahead: bool | None


def verify_services(options: argparse.Namespace) -> VerifyServices:
    """Where they are, from parsed options.

    Raises:
        StartupError: The options contradict each other.
    """
    return VerifyServices(options.verify, channel_settings(options), options.verify_timeout, AHEAD[options.draft_ahead])


async def serve(
    settings: ModelSettings,
    verify: VerifyServices,
    policy: DefaultPolicy,
    limits: DraftLimits,
    operation: OperationSettings,
) -> None:
    """Load the draft, find the verify services, then serve until a signal.

    Raises:
        StartupError: The model, an address, a file or the verify services cannot be used, or the models do not fit
            together.
    """
    with Operation.running(operation, "draft") as running:
        connector = Connector(verify.channel)
        connector.check(split_addresses(verify.addresses))
        thread = ModelThread("draft-model")
        engine = await thread.run(load_engine, settings)
        replicas = Replicas(verify.addresses, connector, targets_for(engine, verify.ahead))
        try:
            if not replicas.ready:
                log.info("waiting up to %g s for the verify service at %s", verify.timeout, verify.addresses)
            await replicas.start(verify.timeout)
            # measured when the verify service has measured its own: on one machine they would slow each other down
            if settings.threads is None:
                await thread.run(choose_threads, engine)
            engine = await thread.run(with_forward_costs, engine, MEASURED_ROWS)
            replicas.draft_with(targets_for(engine, verify.ahead))
            server = await start_draft(engine, thread, replicas, operation.address, policy, limits, running)
            info, target = engine.info, replicas.target.info
            ready = f"{info.name} ({info.dtype}, {info.device}) for {target.name} on {server.address}"
            await server.wait(operation.grace, lambda: announce_ready("draft", ready))
            thread.shutdown()
        finally:
            await replicas.close()


def targets_for(engine: Engine, ahead: bool | None) -> Callable[[ModelInfo], Target]:
    """What a draft model makes of targets; `ahead` as in `Target.of`."""
    known_ids = max(engine.tokenizer.get_vocab().values()) + 1
    return lambda info: Target.of(info, engine.info, known_ids, ahead)


async def start_draft(
    engine: Engine,
    thread: ModelThread,
    replicas: Replicas,
    address: str,
    policy: DefaultPolicy,
    limits: DraftLimits,
    operation: Operation,
) -> Server:
    """Serve completions at `address`; `thread` is the one that loaded the draft model.

    Raises:
        StartupError: The address or a file of the security settings cannot be used.
    """
    cache = PrefixCache(engine.arena, enabled=limits.prefix_cache)
    drafter = Drafter(EngineDraftModel(engine, cache), limits.max_tree_nodes)
    cores = SharedCores(HalfTheThreads(thread))
    growth = SharedGrowth(drafter, thread)
    backend = Backend(engine, drafter, thread, growth, replicas, cores, BestGuesses(), limits.resume_seconds)
    admission = Admission(limits.sessions, engine.arena.size, limits.queue, limits.quota)
    metrics = DraftMetrics(operation.registry, admission, replicas)
    server = Server([SERVICE_NAME], limits.idle_seconds, operation.security, limits.sessions + limits.queue)
    service = DraftService(backend, policy, admission, metrics, operation.tracing)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc_server)  # type: ignore[no-untyped-call]
    await server.start(address)
    draft, target = engine.info, replicas.target.info
    if draft.context_length < target.context_length:
        log.warning(
            "the draft's context of %d tokens is shorter than the target's of %d: beyond it, completions go on without "
            "drafting",
            draft.context_length,
            target.context_length,
        )
    replicas.follow(server.set_serving)
    return server
