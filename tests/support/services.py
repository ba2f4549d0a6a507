"""Both services in this process on real sockets, with real model loading, real gRPC, and one event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from dynatree.common.limits import IDLE_SECONDS, MAX_QUEUED, MAX_TREE_NODES, RESUME_SECONDS
from dynatree.draft.draft_server import DraftServer, start_draft
from dynatree.draft.growth.suffix_indexes import SuffixIndexes
from dynatree.draft.policies import DEFAULT_POLICY
from dynatree.draft.reload.drafts_in_use import DraftsInUse
from dynatree.draft.serve_draft import loading_again, source_of, translation_for
from dynatree.draft.serve_ngrams import NGramDrafting
from dynatree.draft.settings import DefaultPolicy, DraftLimits, DraftSettings, RecordSettings, VerifyServices
from dynatree.draft.target.replicas import Replicas
from dynatree.engine.engine import Engine
from dynatree.engine.loading import load_engine
from dynatree.engine.model_thread import ModelThread
from dynatree.engine.settings import ModelSettings
from dynatree.serving.admission import NO_QUOTA, Quota
from dynatree.serving.channel import PLAIN, ChannelSettings, Connector
from dynatree.serving.operation import Operation, OperationSettings
from dynatree.serving.security import LOCAL, SecuritySettings
from dynatree.serving.server import Server
from dynatree.serving.tracing import OFF, Tracing
from dynatree.verify.serve_verify import start_verify
from dynatree.verify.settings import AUTO_ROWS, VerifyLimits
from tests.support.loops import end_other_tasks

T = TypeVar("T")


@dataclass
class Services:
    """A running pair: its addresses, and its engines for inspection; `draft` is None without a draft model.

    `reload` does what SIGHUP does.
    """

    draft_address: str
    verify_address: str
    target: Engine
    draft: Engine | None
    draft_registry: CollectorRegistry
    verify_registry: CollectorRegistry
    drafts: DraftsInUse
    reload: Callable[[], object]

    @property
    def sessions(self) -> float:
        """Number of sessions that are open at the verify service; a session that has ended is in its prefix cache."""
        return self.verify_registry.get_sample_value("dynatree_num_requests_running") or 0.0

    @property
    def idle(self) -> bool:
        """Whether no session is open on either side; valid only without a prefix cache."""
        kv_caches = [engine.kv_cache for engine in (self.target, self.draft) if engine is not None]
        return all(kv_cache.free_slots == kv_cache.size for kv_cache in kv_caches)


class _Loop:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Awaitable[T]) -> T:
        async def main() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(main(), self._loop).result(120)

    def call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """End what is left of gRPC's tasks, which would print tracebacks when they are garbage."""
        self.run(end_other_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def running_services(
    folder: Path,
    target_model: Path,
    draft_model: Path | None,
    *,
    dtype: str = "auto",
    weights: str = "auto",
    draft_weights: str | None = None,
    resident_layers: int | None = None,
    sessions: int = 4,
    queue: int = MAX_QUEUED,
    idle_seconds: float = IDLE_SECONDS,
    prefix_cache: bool = True,
    batch_rows: int = AUTO_ROWS,
    kv_tokens: int | None = None,
    target_context: int | None = None,
    draft_context: int | None = None,
    max_tree_nodes: int = MAX_TREE_NODES,
    ahead: bool = False,
    fixed_rows: tuple[int, ...] | None = None,
    address: str | None = None,
    security: SecuritySettings = LOCAL,
    verify_security: SecuritySettings = LOCAL,
    channel: ChannelSettings = PLAIN,
    quota: Quota = NO_QUOTA,
    via: Callable[[str], str] = str,
    resume_seconds: float = RESUME_SECONDS,
    tracing: Tracing = OFF,
    histories: SuffixIndexes | None = None,
    record: RecordSettings | None = None,
) -> Iterator[Services]:
    """Serve the pair within a context, on sockets in `folder`, or both at `address`.

    `weights` are those of both models unless `draft_weights` is given; `resident_layers` are those of the target, whose
    other layers are read from a cache in `folder`. `via` maps the verify service's address to the addresses at which
    the draft service connects to it. Without `histories`, no completion drafts from an earlier one.
    """
    shared: dict[str, Any] = {"dtype": dtype, "sessions": sessions, "fixed_rows": fixed_rows}
    target = load_engine(
        ModelSettings(
            str(target_model),
            speculative_slots=max_tree_nodes,
            kv_tokens=kv_tokens,
            max_context=target_context,
            weights=weights,
            resident_layers=resident_layers,
            layer_cache=folder / "layers",
            **shared,
        )
    )
    verify_limits = VerifyLimits(sessions, queue, max_tree_nodes, batch_rows, idle_seconds, prefix_cache)
    default = DefaultPolicy(DEFAULT_POLICY, {})
    draft_limits = DraftLimits(sessions, queue, idle_seconds, prefix_cache, resume_seconds, quota, max_tree_nodes)
    draft, load_again = None, None
    if draft_model is not None:
        draft_settings = ModelSettings(
            str(draft_model),
            speculative_slots=2 * max_tree_nodes,
            chooses_tokens=False,
            max_context=draft_context,
            weights=draft_weights or weights,
            threads=1,
            **shared,
        )
        services = VerifyServices("", channel, 10.0, ahead)
        whole = DraftSettings(draft_settings, services, default, draft_limits, OperationSettings("", 0.5))
        draft, load_again = load_engine(draft_settings), loading_again(whole)
    threads = ModelThread("verify-model"), ModelThread("draft-model")
    operations = Operation(verify_security, tracing=tracing), Operation(security, tracing=tracing)
    loop = _Loop()

    async def start() -> tuple[Server, DraftServer, Replicas]:
        verify_address = address or f"unix:{folder}/verify.sock"
        verify_server = await start_verify(target, threads[0], verify_address, verify_limits, operations[0])
        ngrams = NGramDrafting(threads[1], 10.0)
        replicas = Replicas(via(verify_server.address), Connector(channel), ngrams.target)
        await replicas.start(10.0)
        if draft:
            translation = await translation_for(draft, threads[1], replicas, 10.0)
            source = source_of(draft, threads[1], prefix_cache=prefix_cache, ahead=ahead, translation=translation)
            replicas.rebuild_with(source.build_target)
        else:
            source = await ngrams.source(replicas)
        draft_address = address or f"unix:{folder}/draft.sock"
        draft_server = await start_draft(
            source,
            threads[1],
            replicas,
            draft_address,
            default,
            draft_limits,
            operations[1],
            histories or SuffixIndexes(),
            record=record,
            load_again=load_again,
        )
        return verify_server, draft_server, replicas

    verify_server, draft_server, replicas = loop.run(start())
    try:
        yield Services(
            draft_server.server.address,
            verify_server.address,
            target,
            draft,
            operations[1].registry,
            operations[0].registry,
            draft_server.drafts,
            lambda: loop.call(draft_server.reloader.ask),
        )
    finally:
        loop.run(draft_server.server.stop(0.5))
        loop.run(draft_server.close())
        loop.run(replicas.close())
        loop.run(verify_server.stop(0.5))
        threads[0].shutdown()
        loop.close()
        if target.source is not None:
            target.source.close()
