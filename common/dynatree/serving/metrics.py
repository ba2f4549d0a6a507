"""Prometheus metrics over HTTP: the endpoint, the registry, and the histogram buckets of both services."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from http.server import HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    MetricsHandler,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from dynatree.common.errors import StartupError
from dynatree.serving.certificates import check_certificates
from dynatree.serving.files import Reloaded, failed_reloads
from dynatree.serving.security import SecuritySettings

log = logging.getLogger(__name__)

# Seconds. Queueing and prefill take up to minutes, a token takes a millisecond or more.
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SCRAPE_SECONDS = 10.0  # from accepting a connection to the end of its response
MAX_SCRAPES = 8  # concurrent connections


def new_registry() -> CollectorRegistry:
    """A registry with process metrics: memory, CPU time, open files, and failed reloads of security files."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they add an unused series for each counter
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    gauge(
        registry,
        "reload_failed",
        "Certificate, key and token files whose current contents are not in force.",
        failed_reloads,
    )
    return registry


def gauge(registry: CollectorRegistry, name: str, text: str, value: Callable[[], float]) -> None:
    """Register a gauge whose value is computed at scrape time."""
    Gauge(f"dynatree_{name}", text, registry=registry).set_function(value)


def counted(registry: CollectorRegistry, name: str, text: str, value: Callable[[], float]) -> None:
    """Register a counter whose value is computed at scrape time."""
    registry.register(_Counted(f"dynatree_{name}", text, value))


class _Counted(Collector):
    def __init__(self, name: str, text: str, value: Callable[[], float]) -> None:
        self._name, self._text, self._value = name, text, value

    def collect(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._text, self._value())]


class _Server(ThreadingMixIn, HTTPServer):
    """Serves each connection, including its TLS handshake, in a separate thread, so a silent one blocks no other.

    A connection is closed when its time is up, even if it is active. At the connection limit, a new connection replaces
    the oldest one.
    """

    daemon_threads = True
    request_queue_size = 64
    tls: Reloaded[ssl.SSLContext] | None = None

    def __init__(self, *args: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_SCRAPES)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Connection] = {}  # oldest first
        super().__init__(*args)

    def service_actions(self) -> None:
        """Close connections whose time is up; the server loop calls this regularly."""
        with self._lock:
            for request, connection in list(self._open.items()):
                if time.monotonic() - connection.began > SCRAPE_SECONDS:
                    self._hang_up(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a new thread. If the most connections are open, close the oldest one first."""
        if not self._places.acquire(blocking=False):
            with self._lock:
                for oldest in list(self._open)[:1]:
                    self._hang_up(oldest)
            self._places.acquire()
        with self._lock:
            self._open[request] = _Connection(request, time.monotonic())
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in its thread, and release its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer one connection; network errors, and a connection that was closed meanwhile, are ignored."""
        with suppress(OSError):
            if self.tls is None:
                super().finish_request(request, client_address)
                return
            with self.tls.value.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as connection:
                with self._lock:
                    if request not in self._open:
                        return
                    self._open[request].current = connection
                connection.do_handshake()
                super().finish_request(connection, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log one line without a traceback, since an invalid request is the caller's fault."""
        log.warning("a scrape failed: %r", sys.exc_info()[1])

    def server_close(self) -> None:
        """Stop listening, and close all connections."""
        super().server_close()
        with self._lock:
            for request in list(self._open):
                self._hang_up(request)

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(request, None)
        self._places.release()

    def _hang_up(self, request: socket.socket) -> None:
        """Shut down a connection, which wakes its thread; the thread closes the socket."""
        with suppress(OSError):
            socket.socket.shutdown(self._open.pop(request).current, socket.SHUT_RDWR)


@dataclass
class _Connection:
    """A connection being served.

    Attributes:
        current: Socket to shut down: the accepted one, or the TLS socket that wraps it.
        began: Monotonic time of its acceptance.
    """

    current: socket.socket
    began: float


class _Server6(_Server):
    address_family = socket.AF_INET6


def serve_metrics(address: str, registry: CollectorRegistry, security: SecuritySettings) -> Callable[[], None]:
    """Serve `GET /metrics` at `host:port`, over TLS if the service has a certificate; returns a function that stops it.

    Raises:
        StartupError: The address is in use, is invalid, or is open to other machines without encryption.
    """
    security.check_plain(address)
    host, _, port = address.rpartition(":")
    kind = _Server6 if ":" in host else _Server
    try:
        tls = _reloaded_context(security)
        server = kind((host.strip("[]"), int(port)), MetricsHandler.factory(registry))
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
        check_certificates((certificate, key), None)  # its error says which files are wrong, and how
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password="")  # a key encrypted since then must not prompt either
        return context

    return Reloaded([certificate, key], read)
