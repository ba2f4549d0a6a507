"""How a service is operated: where it listens and who may call, metrics, traces."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from dynatree.common.metrics import new_registry, serve_metrics
from dynatree.common.security import LOCAL, SecuritySettings
from dynatree.common.tracing import OFF, Tracing, send_traces


@dataclass(frozen=True)
class OperationSettings:
    """What the command line says of it.

    Attributes:
        address: Where to listen: `host:port` or `unix:PATH`.
        grace: Seconds that open calls get at a stop.
        security: Who may call.
        metrics: Where to answer Prometheus, `host:port`; None: nowhere.
        traces: The collector's URL; None: there are none.
    """

    address: str
    grace: float
    security: SecuritySettings = LOCAL
    metrics: str | None = None
    traces: str | None = None


def operation_settings(options: argparse.Namespace) -> OperationSettings:
    """Settings from parsed options.

    Raises:
        StartupError: They contradict each other.
    """
    security = SecuritySettings(
        certificate=options.tls_cert,
        key=options.tls_key,
        client_ca=options.client_ca,
        tokens=options.token_file,
        insecure=options.insecure,
        reflection=options.reflection == "on",
    )
    return OperationSettings(options.listen, options.grace, security, options.metrics, options.traces)


@dataclass
class Operation:
    """What a running service tells, and whom it lets in.

    Attributes:
        security: Who may call.
        registry: What is counted.
        tracing: Where spans go.
    """

    security: SecuritySettings = LOCAL
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    tracing: Tracing = OFF

    @classmethod
    @contextmanager
    def running(cls, settings: OperationSettings, service: str) -> Iterator[Operation]:
        """That of a process that runs `service`, for as long as the context lives.

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
