"""Metrics over HTTP, for Prometheus: an endpoint, and what both services count."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)

from dynatree.common.errors import StartupError
from dynatree.common.security import SecuritySettings

# Seconds. Queueing and prompts take up to minutes, tokens from a millisecond on.
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def new_registry() -> CollectorRegistry:
    """A registry with figures of the process: memory, processor time, open files."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


def gauge(registry: CollectorRegistry, name: str, text: str, value: Callable[[], float]) -> None:
    """A figure that is asked for when it is scraped."""
    Gauge(f"dynatree_{name}", text, registry=registry).set_function(value)


def serve_metrics(address: str, registry: CollectorRegistry, security: SecuritySettings) -> Callable[[], None]:
    """Answer `GET /metrics` at `host:port`, over TLS where the service has a certificate; returns what ends it.

    Raises:
        StartupError: The address is taken, makes no sense, or is open to others without encryption.
    """
    security.check_plain(address)
    host, _, port = address.rpartition(":")
    files = {}
    if security.certificate is not None:
        files = {"certfile": str(security.certificate), "keyfile": str(security.key)}
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry, **files)  # type: ignore[arg-type]
    except (OSError, ValueError, OverflowError) as error:
        raise StartupError(f"cannot serve metrics on {address}: {error}") from error

    def end() -> None:
        with suppress(OSError):
            server.shutdown()
            server.server_close()
        thread.join(1.0)

    return end
