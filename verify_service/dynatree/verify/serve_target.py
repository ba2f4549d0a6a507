"""`dynatree verify`: serve a target model."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from dynatree.common import embedded
from dynatree.common.admission import Admission
from dynatree.common.engine import Engine, ModelSettings, load_engine
from dynatree.common.limits import IDLE_SECONDS, MAX_QUEUED, MAX_SESSIONS, MAX_TREE_NODES
from dynatree.common.logs import announce_ready
from dynatree.common.model_thread import ModelThread
from dynatree.common.operation import Operation, OperationSettings, operation_settings
from dynatree.common.prefix_cache import PrefixCache
from dynatree.common.server import Server
from dynatree.common.service_process import model_settings, run_service
from dynatree.v1 import verify_pb2_grpc
from dynatree.verify.fault_watch import FaultWatch
from dynatree.verify.metrics import VerifyMetrics
from dynatree.verify.pass_costs import PassCosts
from dynatree.verify.scheduler import Scheduler
from dynatree.verify.service import SERVICE_NAME, VerifyService
from dynatree.verify.verifier import Verifier

AUTO_ROWS = 256  # of a pass, where the command line names no number


@dataclass(frozen=True)
class VerifyLimits:
    """What sessions may ask for, and hold.

    Attributes:
        sessions: That may be open at once.
        queue: That may wait.
        max_tree_nodes: Of the largest tree.
        batch_rows: Of the largest pass.
        idle_seconds: How long a session may wait for its peer.
        prefix_cache: Whether ended sessions leave their keys and values to those that begin alike.
    """

    sessions: int = MAX_SESSIONS
    queue: int = MAX_QUEUED
    max_tree_nodes: int = MAX_TREE_NODES
    batch_rows: int = AUTO_ROWS
    idle_seconds: float = IDLE_SECONDS
    prefix_cache: bool = True


def run(options: argparse.Namespace) -> int:
    """Serve until a signal."""
    limits = VerifyLimits(
        options.max_sessions,
        options.queue,
        options.max_tree_nodes,
        options.batch_rows or AUTO_ROWS,
        options.idle_timeout,
        options.prefix_cache == "on",
    )
    settings = model_settings(
        options,
        options.target_model,
        embedded.target_path(),
        speculative_slots=limits.max_tree_nodes,
        measured_rows=limits.batch_rows,
        resident_layers=options.resident_layers,
        layer_cache=options.layer_cache,
        tensor_parallel=options.tensor_parallel,
    )
    return run_service(lambda: serve(settings, limits, operation_settings(options)), options)


async def serve(settings: ModelSettings, limits: VerifyLimits, operation: OperationSettings) -> None:
    """Load the target, then serve it until a signal.

    Raises:
        StartupError: The model, an address or a file cannot be used.
    """
    with Operation.running(operation, "verify") as running:
        thread = ModelThread("verify-model")
        engine = await thread.run(load_engine, settings)
        server = await start_verify(engine, thread, operation.address, limits, running)
        info = engine.info
        ready = f"{info.name} ({info.dtype}, {info.device}) on {server.address}"
        await server.wait(operation.grace, lambda: announce_ready("verify", ready))
        thread.shutdown()


async def start_verify(
    engine: Engine, thread: ModelThread, address: str, limits: VerifyLimits, operation: Operation
) -> Server:
    """Serve a target at `address`; `thread` is the one that loaded it.

    Raises:
        StartupError: The address or a file of the security settings cannot be used.
    """
    in_16_bits = engine.arena.dtype.itemsize == 2
    cache = PrefixCache(
        engine.arena, enabled=limits.prefix_cache, only_prompts=in_16_bits and not engine.batch_invariant
    )
    verifier = Verifier(engine, limits.max_tree_nodes, cache)
    admission = Admission(limits.sessions, engine.arena.size, limits.queue)
    metrics = VerifyMetrics(operation.registry, admission)
    watch = FaultWatch(metrics.not_finite, lambda: thread.run(verifier.is_sound))
    scheduler = Scheduler(
        watch.over(lambda parts: thread.run(verifier.run, parts)),
        PassCosts(engine.info.forward_costs),
        limits.batch_rows,
        on_pass=metrics.passed,
    )
    service = VerifyService(verifier, thread, scheduler, admission, metrics, limits.idle_seconds, operation.tracing)
    server = Server([SERVICE_NAME], limits.idle_seconds, operation.security, limits.sessions + limits.queue)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(service, server.grpc_server)  # type: ignore[no-untyped-call]
    await server.start(address)
    return server
