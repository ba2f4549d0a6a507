"""Metrics over HTTP, for Prometheus: an endpoint, and what both services count."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
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

from dynatree.common.errors import StartupError
from dynatree.common.files import Reloaded, failed_reloads
from dynatree.common.security import SecuritySettings

log = logging.getLogger(__name__)

# Seconds. Queueing and prompts take up to minutes, tokens from a millisecond on.
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SCRAPE_SECONDS = 10.0  # from a connection to the end of its answer
MAX_SCRAPES = 8  # connections at once


def new_registry() -> CollectorRegistry:
    """A registry with figures of the process: memory, processor time, open files, files that are not in force."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter, which nobody asks for
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    gauge(
        registry, "reload_failed", "Certificates, keys and tokens that are not in force as they stand.", failed_reloads
    )
    return registry


def gauge(registry: CollectorRegistry, name: str, text: str, value: Callable[[], float]) -> None:
    """A figure that is asked for when it is scraped."""
    Gauge(f"dynatree_{name}", text, registry=registry).set_function(value)


class _Server(ThreadingMixIn, HTTPServer):
    """Answers each connection in a thread of its own, its TLS handshake too: a silent one holds up none.

    A connection is closed when its time is up, whatever was said on it, and the oldest of them makes room for one more
    than there may be.
    """

    daemon_threads = True
    request_queue_size = 64
    tls: Reloaded[ssl.SSLContext] | None = None

    def __init__(self, *args: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_SCRAPES)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Connection] = {}  # the oldest first
        super().__init__(*args)

    def service_actions(self) -> None:
        """Called between two connections, and every so often."""
        with self._lock:
            for request, connection in list(self._open.items()):
                if time.monotonic() - connection.began > SCRAPE_SECONDS:
                    self._hang_up(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a new thread, once there are not too many."""
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
        """In that thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer one connection, unless it says nothing that makes sense, or is closed meanwhile."""
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
        """What a scrape asks for may make no sense, so that it leaves one line, and no traceback."""
        log.warning("a scrape failed: %r", sys.exc_info()[1])

    def server_close(self) -> None:
        """Close them all."""
        super().server_close()
        with self._lock:
            for request in list(self._open):
                self._hang_up(request)

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(request, None)
        self._places.release()

    def _hang_up(self, request: socket.socket) -> None:
        """End what waits for a connection; its thread closes it."""
        with suppress(OSError):
            socket.socket.shutdown(self._open.pop(request).current, socket.SHUT_RDWR)


@dataclass
class _Connection:
    """One that is answered.

    Attributes:
        current: The socket to shut down: the one that was accepted, or the TLS one that took its place.
        began: When it was accepted.
    """

    current: socket.socket
    began: float


class _Server6(_Server):
    address_family = socket.AF_INET6


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
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context

    return Reloaded([certificate, key], read)
