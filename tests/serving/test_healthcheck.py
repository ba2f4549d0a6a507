"""Tests the health check that containers run, against real servers."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dynatree.serving import healthcheck
from dynatree.serving.server import Server
from tests.support.certificates import Authority, Pair


def test_a_server_that_serves_is_status_0_and_silent(tmp_path: Path) -> None:
    async def check() -> subprocess.CompletedProcess[str]:
        server = Server([])
        await server.start(f"unix:{tmp_path}/server.sock")
        try:
            return await asyncio.to_thread(_run, server.address)
        finally:
            await server.stop(0)

    finished = asyncio.run(check())
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_a_server_that_has_stopped_is_one_line(tmp_path: Path) -> None:
    async def start_and_stop() -> str:
        server = Server([])
        await server.start(f"unix:{tmp_path}/server.sock")
        await server.stop(0)
        return server.address

    address = asyncio.run(start_and_stop())
    finished = _run(address)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith(f"{address} does not serve: UNAVAILABLE: ")
    assert finished.stderr.count("\n") == 1


def test_a_draining_server_does_not_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert _main(servicer, tmp_path) == 1
    assert capsys.readouterr().err.endswith("does not serve: NOT_SERVING\n")


def test_a_service_that_there_is_not(tmp_path: Path) -> None:
    async def check() -> str | None:
        server = Server([])
        await server.start(f"unix:{tmp_path}/server.sock")
        try:
            return await asyncio.to_thread(healthcheck.failure, server.address, 5.0, "livenes")
        finally:
            await server.stop(0)

    assert asyncio.run(check()) == "the server has no service named 'livenes'"


def test_a_server_without_health_does_not_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(None, tmp_path) == 1
    assert "does not serve: UNIMPLEMENTED" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "exit_status"), [(200, 0), (503, 1)])
def test_a_gateway_is_asked_over_http(status: int, exit_status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with _http_server(status) as port:
        assert healthcheck.main([f"http://127.0.0.1:{port}"]) == exit_status
    reason = f"http://127.0.0.1:{port} does not serve: 503 Service Unavailable\n"
    assert capsys.readouterr().err == ("" if status == 200 else reason)


def test_a_gateways_certificate_is_checked(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with _http_server(200, authority.pair("gateway")) as port:
        url = f"https://localhost:{port}"
        assert healthcheck.http_failure(url, 5.0, authority.file) is None
        assert "CERTIFICATE_VERIFY_FAILED" in (healthcheck.http_failure(url, 5.0) or "")


def test_a_gateway_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with _http_server(200) as port:
        pass
    assert healthcheck.main([f"http://127.0.0.1:{port}"]) == 1
    assert "Connection refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("http://127.0.0.1:1", "--service", "liveness"),
        ("https://127.0.0.1:1", "--ca", "/no/such/file"),
        ("ftp://127.0.0.1:1",),
        ("http://",),
        ("http://127.0.0.1:port",),
    ],
)
def test_what_makes_no_sense_of_a_gateway(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        healthcheck.main(arguments)


@contextmanager
def _http_server(status: int, pair: Pair | None = None) -> Iterator[int]:
    """Run a server that answers GET /health with this status; return its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if pair is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pair.certificate, pair.key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _run(address: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "dynatree.serving.healthcheck", address)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _main(servicer: health.HealthServicer | None, folder: Path) -> int:
    """Return the exit status of the check of a server with this health servicer."""
    address = f"unix:{folder}/server.sock"
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        if servicer:
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        server.add_insecure_port(address)
        server.start()
        try:
            return healthcheck.main([address])
        finally:
            server.stop(None).wait()
