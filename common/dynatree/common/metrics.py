"""Metrics over HTTP, for Prometheus: an endpoint, and what both services count."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)

from dynatree.common.errors import StartupError
from dynatree.common.files import Reloaded
from dynatree.common.security import SecuritySettings

# Seconds. Queueing and prompts take up to minutes, tokens from a millisecond on.
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SILENCE_SECONDS = 10.0  # of a connection that asks for metrics


def new_registry() -> CollectorRegistry:
    """A registry with figures of the process: memory, processor time, open files."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter, which nobody asks for
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


def gauge(registry: CollectorRegistry, name: str, text: str, value: Callable[[], float]) -> None:
    """A figure that is asked for when it is scraped."""
    Gauge(f"dynatree_{name}", text, registry=registry).set_function(value)


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread of its own, its TLS handshake too: a silent one holds up none."""

    daemon_threads = True
    tls: Reloaded[ssl.SSLContext] | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer one connection, unless it says nothing for too long, or nothing that makes sense."""
        request.settimeout(SILENCE_SECONDS)
        with suppress(OSError):
            connection = request if self.tls is None else self.tls.value.wrap_socket(request, server_side=True)
            with connection:
                super().finish_request(connection, client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


def serve_metrics(address: str, registry: CollectorRegistry, security: SecuritySettings) -> Callable[[], None]:
    """Answer `GET /metrics` at `host:port`, over TLS where the service has a certificate; returns what ends it.

    Raises:
        StartupError: The address is taken, makes no sense, or is open to others without encryption.
    """
    security.check_plain(address)
    host, _, port = address.rpartition(":")
    kind = _Server6 if ":" in host else _Server
    try:
        tls = _reloaded_context(security)
        server = make_server(host.strip("[]"), int(port), make_wsgi_app(registry), kind, _Quiet)
    except (OSError, ValueError, OverflowError) as error:
        raise StartupError(f"cannot serve metrics on {address}: {error}") from error
    server.tls = tls
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1.0)

    return end


def _reloaded_context(security: SecuritySettings) -> Reloaded[ssl.SSLContext] | None:
    certificate, key = security.certificate, security.key
    if certificate is None or key is None:
        return None

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context

    return Reloaded([certificate, key], read)
