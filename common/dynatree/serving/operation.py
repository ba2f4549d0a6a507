"""Operational settings of a service: listening address, security, metrics, traces, and the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from dynatree.serving.metrics import new_registry, serve_metrics
from dynatree.serving.security import LOCAL, SecuritySettings
from dynatree.serving.tracing import OFF, Tracing, send_traces


@dataclass(frozen=True)
class OperationSettings:
    """Operational settings of a service.

    Attributes:
        address: Listening address, `host:port` or `unix:PATH`.
        grace: Seconds that open calls have left when the service stops.
        security: Security settings of the server.
        metrics: Address of the Prometheus endpoint, `host:port`; None means no endpoint.
        traces: URL of the trace collector; None means no traces.
        log_format: Format of the log's lines, "text" or "json".
        log_level: Level of the least important lines in the log.
    """

    address: str
    grace: float
    security: SecuritySettings = LOCAL
    metrics: str | None = None
    traces: str | None = None
    log_format: str = "text"
    log_level: str = "info"


@dataclass
class Operation:
    """Security, metrics and traces of a running service.

    Attributes:
        security: Security settings of the server.
        registry: Registry of the metrics.
        tracing: Destination of spans.
    """

    security: SecuritySettings = LOCAL
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    tracing: Tracing = OFF

    @classmethod
    @contextmanager
    def running(cls, settings: OperationSettings, service: str) -> Iterator[Operation]:
        """The operation of a process that runs `service`; metrics and traces stop when the context ends.

        Raises:
            StartupError: An address or a file cannot be used, or a package is missing.
        """
        settings.security.check_plain(settings.address)
        tracing = send_traces(settings.traces, f"dynatree-{service}") if settings.traces else OFF
        registry = new_registry()
        end_metrics = serve_metrics(settings.metrics, registry, settings.security) if settings.metrics else None
        try:
            yield cls(settings.security, registry, tracing)
        finally:
            if end_metrics is not None:
                end_metrics()
            tracing.end()
