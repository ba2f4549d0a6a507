"""A gateway started by its command line in a forked process, and clients of it.

A test module imports the fixtures that it uses by their functions' names.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import openai
import pytest

from dynatree.client import Client
from dynatree.gateway.limits import Limits
from dynatree.gateway.serve_gateway import GatewaySettings, serve
from dynatree.serving.security import LOCAL, SecuritySettings
from tests.support.forked import Forked
from tests.support.processes import START_SECONDS, EmbeddedServices, wait_until

_ADDRESS = re.compile(r"as HTTP on (\S+)\s")
_STOP_SECONDS = 20.0
KEY = "not-needed"


@dataclass
class Gateway:
    """A running gateway: its URL, its process, and what an ended one has printed."""

    url: str
    process: Forked
    printed: str | None = None

    @property
    def log(self) -> str:
        return self.process.log.read_text() if self.printed is None else self.printed


def wait_for(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(0.02)
    return held


@contextmanager
def running_gateway(server: str, *options: str) -> Iterator[Gateway]:
    """Run a gateway in front of the draft service at `server`, on a free port unless the options name one."""
    listen = () if "--listen" in options else ("--listen", "127.0.0.1:0")
    arguments = ("gateway", "--server", server, *listen, *options)
    with TemporaryDirectory() as folder:
        process = Forked(arguments, Path(folder) / "gateway.log")
        gateway = Gateway("", process)
        try:
            wait_until(lambda: _ADDRESS.search(gateway.log) or process.poll() is not None, START_SECONDS)
            found = _ADDRESS.search(gateway.log)
            assert found, gateway.log
            gateway.url = found[1]
            yield gateway
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            gateway.printed = gateway.log


def served_here(server: str, act: Callable[[str], None], limits: Limits, security: SecuritySettings = LOCAL) -> None:
    """Call `act` in a thread with the URL of a gateway that runs in this process with the given limits."""

    async def main() -> None:
        url = asyncio.get_running_loop().create_future()
        settings = GatewaySettings(server, "127.0.0.1:0", security, limits=limits)
        serving = asyncio.ensure_future(serve(settings, url.set_result))
        try:
            await asyncio.to_thread(act, await url)
        finally:
            signal.raise_signal(signal.SIGTERM)
            await serving

    asyncio.run(main())


@pytest.fixture(scope="module", name="gateway")
def gateway_fixture(embedded_services: EmbeddedServices) -> Iterator[Gateway]:
    with running_gateway(embedded_services.draft_address) as gateway:
        yield gateway


@pytest.fixture(scope="module", name="client")
def client_fixture(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module", name="grpc_client")
def grpc_client_fixture(embedded_services: EmbeddedServices) -> Iterator[Client]:
    with Client(embedded_services.draft_address) as client:
        yield client


@pytest.fixture(scope="module", name="model")
def model_fixture(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id
