"""The health check that containers run, against real servers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dynatree.common import healthcheck
from dynatree.common.server import Server


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

    assert asyncio.run(check()) == "it has no service named 'livenes'"


def test_a_server_without_health_does_not_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(None, tmp_path) == 1
    assert "does not serve: UNIMPLEMENTED" in capsys.readouterr().err


def _run(address: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "dynatree.common.healthcheck", address)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _main(servicer: health.HealthServicer | None, folder: Path) -> int:
    """The status of the check of a server with this health servicer."""
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
