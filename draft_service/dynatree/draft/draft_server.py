"""The server of a draft service, with a draft model or without one; this module needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from dynatree.common.logs import announce_ready
from dynatree.common.model_info import ModelInfo
from dynatree.draft.completion.generation import Backend
from dynatree.draft.growth.best_guesses import BestGuesses
from dynatree.draft.growth.draft_source import DraftSource
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.growth.history_file import HistoryFile
from dynatree.draft.growth.shared_growth import SharedGrowth
from dynatree.draft.growth.suffix_indexes import SuffixIndexes
from dynatree.draft.metrics import DraftMetrics
from dynatree.draft.service import SERVICE_NAME, DraftService
from dynatree.draft.settings import DefaultPolicy, DraftLimits, DraftSettings
from dynatree.draft.target.replicas import Replicas
from dynatree.draft.target.target import Target
from dynatree.engine.model_thread import ModelThread
from dynatree.serving.address import split_addresses
from dynatree.serving.admission import Admission
from dynatree.serving.channel import Connector
from dynatree.serving.operation import Operation
from dynatree.serving.server import Server
from dynatree.v1 import draft_pb2_grpc

log = logging.getLogger(__name__)


class Drafting(Protocol):
    """The part of a start that differs with and without a draft model."""

    def target(self, info: ModelInfo) -> Target:
        """Build the `Target` of a verify service.

        Raises:
            FailedPreconditionError: Its tokenizer is another one.
        """

    async def source(self, replicas: Replicas) -> DraftSource:
        """Return the source of candidates, once a verify service is ready.

        Raises:
            StartupError: The target's tokenizer cannot be used.
        """


async def serve(settings: DraftSettings, load: Callable[[ModelThread], Awaitable[Drafting]]) -> None:
    """Load the draft, find the verify services, then serve until a signal.

    Args:
        settings: All settings of the service.
        load: Begins to draft, on the thread of the draft model.

    Raises:
        StartupError: The model, an address, a file or the verify services cannot be used, or the models do not fit
            together.
    """
    verify, operation = settings.verify, settings.operation
    with Operation.running(operation, "draft") as running:
        connector = Connector(verify.channel)
        connector.check(split_addresses(verify.addresses))
        thread = ModelThread("draft-model")
        drafting = await load(thread)
        replicas = Replicas(verify.addresses, connector, drafting.target)
        try:
            if not replicas.ready:
                log.info("waiting up to %g s for the verify service at %s", verify.timeout, verify.addresses)
            await replicas.start(verify.timeout)
            source = await drafting.source(replicas)
            histories = SuffixIndexes(settings.limits.history_tokens)
            file = None
            if settings.history is not None:
                file = HistoryFile(settings.history, source.info.tokenizer_fingerprint)
                await thread.run(file.load, histories)
            server = await start_draft(
                source, thread, replicas, operation.address, settings.policy, settings.limits, running, histories
            )
            ready = f"{source} for {replicas.target.info.name} on {server.address}"
            await server.wait(operation.grace, lambda: announce_ready("draft", ready))
            if file is not None:
                await thread.run(file.save, histories)
            thread.shutdown()
        finally:
            await replicas.close()


async def start_draft(
    source: DraftSource,
    thread: ModelThread,
    replicas: Replicas,
    address: str,
    policy: DefaultPolicy,
    limits: DraftLimits,
    operation: Operation,
    histories: SuffixIndexes | None = None,
) -> Server:
    """Serve completions at `address`; `thread` is the thread that loaded the draft model.

    `histories` has the finished completions of an earlier service, if any.

    Raises:
        StartupError: The address or a file of the security settings cannot be used.
    """
    histories = SuffixIndexes(limits.history_tokens) if histories is None else histories
    drafter = Drafter(source.model, limits.max_tree_nodes, histories, source.translation)
    growth = SharedGrowth(drafter, thread)
    backend = Backend(source, drafter, thread, growth, replicas, BestGuesses(), limits.resume_seconds)
    admission = Admission(limits.sessions, source.slots, limits.queue, limits.quota)
    metrics = DraftMetrics(operation.registry, admission, replicas, histories)
    server = Server([SERVICE_NAME], limits.idle_seconds, operation.security, limits.sessions + limits.queue)
    service = DraftService(backend, policy, admission, metrics, operation.tracing)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc_server)  # type: ignore[no-untyped-call]
    await server.start(address)
    draft, target = source.info, replicas.target.info
    if draft.context_length < target.context_length:
        log.warning(
            "the draft's context of %d tokens is shorter than the target's of %d: beyond it, completions continue "
            "without drafting",
            draft.context_length,
            target.context_length,
        )
    replicas.follow(server.set_serving)
    return server
