"""`dynatree draft`: serve a draft model in front of a verify service."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dynatree.common.logs import announce_ready
from dynatree.common.model_info import ModelInfo
from dynatree.draft.completion.generation import Backend
from dynatree.draft.growth.best_guesses import BestGuesses
from dynatree.draft.growth.draft_model import EngineDraftModel
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.growth.shared_growth import SharedGrowth
from dynatree.draft.metrics import DraftMetrics
from dynatree.draft.service import SERVICE_NAME, DraftService
from dynatree.draft.settings import DefaultPolicy, DraftLimits, DraftSettings
from dynatree.draft.target.replicas import Replicas
from dynatree.draft.target.target import Target
from dynatree.engine.engine import Engine
from dynatree.engine.kv.prefix_cache import PrefixCache
from dynatree.engine.loading import load_engine, with_forward_costs
from dynatree.engine.model_thread import ModelThread
from dynatree.engine.shared_cores import HalfTheThreads, SharedCores
from dynatree.engine.timing import choose_threads
from dynatree.serving.address import split_addresses
from dynatree.serving.admission import Admission
from dynatree.serving.channel import Connector
from dynatree.serving.operation import Operation
from dynatree.serving.server import Server
from dynatree.serving.service_process import run_service
from dynatree.v1 import draft_pb2_grpc

log = logging.getLogger(__name__)

MEASURED_ROWS = 6  # typical number of rows in a level of a tree


def run(settings: DraftSettings) -> int:
    """Serve until a signal, and return the exit status."""
    return run_service(serve(settings))


async def serve(settings: DraftSettings) -> None:
    """Load the draft, find the verify services, then serve until a signal.

    Raises:
        StartupError: The model, an address, a file or the verify services cannot be used, or the models do not fit
            together.
    """
    verify, operation = settings.verify, settings.operation
    with Operation.running(operation, "draft") as running:
        connector = Connector(verify.channel)
        connector.check(split_addresses(verify.addresses))
        thread = ModelThread("draft-model")
        engine = await thread.run(load_engine, settings.model)
        replicas = Replicas(verify.addresses, connector, targets_for(engine, verify.ahead))
        try:
            if not replicas.ready:
                log.info("waiting up to %g s for the verify service at %s", verify.timeout, verify.addresses)
            await replicas.start(verify.timeout)
            # measured after the verify service has measured itself: on one machine they would slow each other down
            if settings.model.threads is None:
                await thread.run(choose_threads, engine)
            engine = await thread.run(with_forward_costs, engine, MEASURED_ROWS)
            replicas.rebuild_with(targets_for(engine, verify.ahead))
            server = await start_draft(
                engine, thread, replicas, operation.address, settings.policy, settings.limits, running
            )
            info, target = engine.info, replicas.target.info
            ready = f"{info.name} ({info.dtype}, {info.device}) for {target.name} on {server.address}"
            await server.wait(operation.grace, lambda: announce_ready("draft", ready))
            thread.shutdown()
        finally:
            await replicas.close()


def targets_for(engine: Engine, ahead: bool | None) -> Callable[[ModelInfo], Target]:
    """Return the function that builds a `Target` for this draft model; `ahead` as in `Target.of`."""
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
    """Serve completions at `address`; `thread` is the thread that loaded the draft model.

    Raises:
        StartupError: The address or a file of the security settings cannot be used.
    """
    cache = PrefixCache(engine.kv_cache, enabled=limits.prefix_cache)
    drafter = Drafter(EngineDraftModel(engine, cache), limits.max_tree_nodes)
    cores = SharedCores(HalfTheThreads(thread))
    growth = SharedGrowth(drafter, thread)
    backend = Backend(engine, drafter, thread, growth, replicas, cores, BestGuesses(), limits.resume_seconds)
    admission = Admission(limits.sessions, engine.kv_cache.size, limits.queue, limits.quota)
    metrics = DraftMetrics(operation.registry, admission, replicas)
    server = Server([SERVICE_NAME], limits.idle_seconds, operation.security, limits.sessions + limits.queue)
    service = DraftService(backend, policy, admission, metrics, operation.tracing)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc_server)  # type: ignore[no-untyped-call]
    await server.start(address)
    draft, target = engine.info, replicas.target.info
    if draft.context_length < target.context_length:
        log.warning(
            "the draft's context of %d tokens is shorter than the target's of %d: beyond it, completions continue "
            "without drafting",
            draft.context_length,
            target.context_length,
        )
    replicas.follow(server.set_serving)
    return server
