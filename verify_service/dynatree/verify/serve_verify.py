"""The command `dynatree verify`: serve a target model."""

from __future__ import annotations

import logging

from dynatree.common.logs import announce_ready
from dynatree.engine.engine import Engine
from dynatree.engine.kv.prefix_cache import PrefixCache
from dynatree.engine.loading import load_engine
from dynatree.engine.model_thread import ModelThread
from dynatree.serving.admission import Admission
from dynatree.serving.operation import Operation
from dynatree.serving.server import Server
from dynatree.serving.service_process import run_service
from dynatree.v1 import verify_pb2_grpc
from dynatree.verify.fault_watch import FaultWatch
from dynatree.verify.metrics import VerifyMetrics
from dynatree.verify.pass_costs import PassCosts
from dynatree.verify.scheduler import Scheduler
from dynatree.verify.service import SERVICE_NAME, VerifyService
from dynatree.verify.settings import VerifyLimits, VerifySettings
from dynatree.verify.verifier import Verifier

log = logging.getLogger(__name__)


def run(settings: VerifySettings) -> int:
    """Serve until a signal arrives; the exit status."""
    return run_service(serve(settings))


async def serve(settings: VerifySettings) -> None:
    """Load the target model, then serve it until a signal arrives.

    Raises:
        StartupError: The model, an address or a file cannot be used.
    """
    operation = settings.operation
    with Operation.running(operation, "verify") as running:
        thread = ModelThread("verify-model")
        engine = await thread.run(load_engine, settings.model)
        server = await start_verify(engine, thread, operation.address, settings.limits, running)
        info = engine.info
        ready = f"{info.name} ({info.dtype}, {info.device}) on {server.address}"
        await server.wait(operation.grace, lambda: announce_ready("verify", ready))
        thread.shutdown()


async def start_verify(
    engine: Engine, thread: ModelThread, address: str, limits: VerifyLimits, operation: Operation
) -> Server:
    """Start a server for a target model at `address`; `thread` is the thread that loaded the model.

    Raises:
        StartupError: The address or a file of the security settings cannot be used.
    """
    in_16_bits = engine.kv_cache.dtype.itemsize == 2
    sessions = min(limits.sessions, engine.most_sessions or limits.sessions)
    if sessions < limits.sessions:
        log.warning(
            "%s: %d sessions at once, and not %d, because its recurrent layers keep too much memory for more; "
            "--prefix-cache off takes less",
            engine.info.name,
            sessions,
            limits.sessions,
        )
    cache = PrefixCache(
        engine.kv_cache,
        enabled=limits.prefix_cache,
        only_prompts=in_16_bits and not engine.batch_invariant,
        most=sessions if engine.kv_cache.shape.recurrent else None,
    )
    verifier = Verifier(engine, limits.max_tree_nodes, cache)
    admission = Admission(sessions, engine.kv_cache.size, limits.queue)
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
    service.read_ahead()
    return server
