"""The server of a draft service, with a draft model or without one; this module needs no torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dynatree.common.logs import announce_ready
from dynatree.common.shutdown import on_hangup
from dynatree.draft.completion.generation import Backend
from dynatree.draft.drafting import Drafting
from dynatree.draft.growth.best_guesses import BestGuesses
from dynatree.draft.growth.draft_source import DraftSource
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.growth.history_file import HistoryFile
from dynatree.draft.growth.shared_growth import SharedGrowth
from dynatree.draft.growth.suffix_indexes import SuffixIndexes
from dynatree.draft.metrics import DraftMetrics
from dynatree.draft.recording.recorder import Recorder
from dynatree.draft.reload.drafts_in_use import DraftsInUse
from dynatree.draft.reload.reloader import LoadAgain, Reloader
from dynatree.draft.reload.replay import RecentTexts
from dynatree.draft.service import SERVICE_NAME, DraftService
from dynatree.draft.settings import DefaultPolicy, DraftLimits, DraftSettings, RecordSettings
from dynatree.draft.target.replicas import Replicas
from dynatree.engine.model_thread import ModelThread
from dynatree.serving.address import split_addresses
from dynatree.serving.admission import Admission
from dynatree.serving.channel import Connector
from dynatree.serving.operation import Operation
from dynatree.serving.server import Server
from dynatree.v1 import draft_pb2_grpc

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftServer:
    """A running draft service.

    Attributes:
        server: The gRPC server.
        drafts: The draft model in use.
        reloader: Loads the draft model again.
        reloading: The reloader's task.
        recorder: Records completions; None records none.
    """

    server: Server
    drafts: DraftsInUse
    reloader: Reloader
    reloading: asyncio.Task[None]
    recorder: Recorder | None

    async def close(self) -> None:
        """End everything that still runs once the server has stopped, and write what waits to be recorded."""
        self.reloading.cancel()
        await asyncio.gather(self.reloading, return_exceptions=True)
        if self.recorder is not None:
            self.recorder.close()
        self.drafts.current.thread.shutdown()


async def serve(
    settings: DraftSettings,
    load: Callable[[ModelThread], Awaitable[Drafting]],
    load_again: LoadAgain | None = None,
) -> None:
    """Load the draft, find the verify services, then serve until a signal.

    Args:
        settings: All settings of the service.
        load: Begins to draft, on the thread of the draft model.
        load_again: Loads the draft model again at SIGHUP; None without a draft model, or if it is the target's copy.

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
            replicas.rebuild_with(source.build_target)
            histories = SuffixIndexes(settings.limits.history_tokens)
            file = None
            if settings.history is not None:
                file = HistoryFile(settings.history, source.info.tokenizer_fingerprint)
                await thread.run(file.load, histories)
            started = await start_draft(
                source,
                thread,
                replicas,
                operation.address,
                settings.policy,
                settings.limits,
                running,
                histories,
                record=settings.record,
                load_again=load_again,
            )
            ready = f"{source} for {replicas.target.info.name} on {started.server.address}"
            del drafting, source  # a reload frees the model

            async def save() -> None:
                await started.close()
                if file is not None:
                    await asyncio.to_thread(file.save, histories)  # no session uses them any more

            with on_hangup(started.reloader.ask):
                await started.server.wait(operation.grace, lambda: announce_ready("draft", ready), save)
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
    histories: SuffixIndexes,
    *,
    record: RecordSettings | None = None,
    load_again: LoadAgain | None = None,
) -> DraftServer:
    """Serve completions at `address`; `thread` is the thread that loaded the draft model.

    `histories` has the finished completions of an earlier service, if any.

    Raises:
        StartupError: The address, a file of the security settings, or the folder for recorded completions cannot be
            used.
    """

    def build(source: DraftSource, thread: ModelThread) -> Backend:
        drafter = Drafter(source.model, limits.max_tree_nodes, histories, source.translation)
        growth = SharedGrowth(drafter, thread)
        return Backend(source, drafter, thread, growth, replicas, BestGuesses(), limits.resume_seconds)

    recorder = Recorder.open(record, replicas.target.info) if record else None
    drafts = DraftsInUse(build(source, thread))
    recent = RecentTexts()
    admission = Admission(limits.sessions, source.slots, limits.queue, limits.quota)
    metrics = DraftMetrics(operation.registry, admission, replicas, histories)
    server = Server([SERVICE_NAME], limits.idle_seconds, operation.security, limits.sessions + limits.queue)
    service = DraftService(drafts, policy, admission, metrics, operation.tracing, recent, recorder)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc_server)  # type: ignore[no-untyped-call]
    await server.start(address)
    service.read_ahead()
    draft, target = source.info, replicas.target.info
    if draft.context_length < target.context_length:
        log.warning(
            "the draft's context of %d tokens is shorter than the target's of %d: beyond it, completions continue "
            "without drafting",
            draft.context_length,
            target.context_length,
        )
    replicas.follow(server.set_serving)
    reloader = Reloader(drafts, load_again, build, recent, admission, metrics.reloaded)
    return DraftServer(server, drafts, reloader, asyncio.ensure_future(reloader.run()), recorder)
