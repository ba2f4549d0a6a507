"""The client library and its server: addresses, timeouts, and servers that start late, go away or hang."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from dynatree.client import (
    AsyncClient,
    Client,
    Completion,
    DeadlineExceededError,
    DynaTreeError,
    ServerError,
    ServerUnavailableError,
)
from dynatree.client._base import BaseClient, Deadline
from tests.support.fake_draft_service import (  # noqa: F401 - fixtures
    Fail,
    FakeDraftService,
    Hang,
    client_fixture,
    generate_async,
    message,
    service_fixture,
    serving,
)


def test_the_deadline_keeps_what_was_received(client: Client, service: FakeDraftService) -> None:
    calls: list[Callable[[float], Completion]] = [
        lambda seconds: client.generate("Once", timeout=seconds),
        lambda seconds: generate_async(service, timeout=seconds),
    ]
    service.script = [message("Hé", 1), Hang()]
    for call in calls:
        for seconds in (1.0, 30.0):  # on a busy machine the message may take more than a second
            with pytest.raises(DeadlineExceededError) as caught:
                call(seconds)
            assert service.abandoned.wait(60)
            service.abandoned.clear()
            if caught.value.text:
                break
        assert caught.value.text == "Hé"


def test_the_client_has_a_timeout_for_all_calls(service: FakeDraftService) -> None:
    service.script = [Hang()]
    with Client(service.address, timeout=0.3) as client, pytest.raises(DeadlineExceededError):
        client.generate("Once")


@pytest.mark.parametrize("limits", [{"connect_timeout": 0.3}, {"timeout": 0.3}], ids=lambda limits: next(iter(limits)))
def test_nobody_at_the_address(tmp_path: Path, limits: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the caller's timeout, even if the wait begins late, as on a busy machine."""

    def begin(client: BaseClient, timeout: float | None) -> Deadline:
        deadline = deadline_of(client, timeout)
        time.sleep(0.02)
        return deadline

    async def run() -> None:
        async with AsyncClient(address, **limits) as client:
            await client.generate("Once")

    def call() -> None:
        with Client(address, **limits) as client:
            client.generate("Once")

    deadline_of = BaseClient._deadline
    monkeypatch.setattr(BaseClient, "_deadline", begin)
    address = f"unix:{tmp_path}/nobody.sock"
    for attempt in (call, lambda: asyncio.run(run())):
        with pytest.raises(ServerUnavailableError, match=f"{address} within 0.3 s") as caught:
            attempt()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_server_that_starts_late_is_found(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path}/draft.sock") as client:
        completions: list[Completion] = []
        thread = threading.Thread(target=lambda: completions.append(client.generate("Once")))
        thread.start()
        time.sleep(0.3)
        with serving(tmp_path):
            thread.join()
    assert completions[0].text == "Héllo"


def test_a_server_that_goes_away(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path}/draft.sock", connect_timeout=2) as client:
        with serving(tmp_path):
            client.generate("Once")
        with pytest.raises(ServerUnavailableError, match="draft"):
            client.generate("Once")


@pytest.mark.long
def test_a_server_that_hangs_is_passed_over(service: FakeDraftService) -> None:
    """The server accepts connections but never answers, like a stopped process."""
    with socket.create_server(("localhost", 0)) as silent:
        hanging = f"localhost:{silent.getsockname()[1]}"
        for addresses in (f"{hanging},{service.address}", f"{service.address},{hanging}"):
            with Client(addresses) as client:
                for _ in range(2):  # it is tried in one of the two calls
                    started = time.monotonic()
                    assert client.generate("Once").token_ids
                    assert time.monotonic() - started < 6.0


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", "unix:", "http://localhost:50051", None, 5])
def test_addresses_that_are_none(address: Any) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="host:port, unix:PATH or dns:///name:port"):
            kind(address)


@pytest.mark.parametrize("name", ["timeout", "connect_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_timeouts_that_are_none(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a positive number"):
        Client("localhost:1", **{name: value})


@pytest.mark.parametrize("name", ["timeout", "connect_timeout"])
@pytest.mark.parametrize("value", ["5", True])
def test_timeouts_of_another_type(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a number of seconds, not {type(value).__name__}"):
        Client("localhost:1", **{name: value})


@pytest.mark.parametrize(
    ("value", "error"),
    [("Jörg", ValueError), ("a\nb", ValueError), ("x" * 257, ValueError), (5, TypeError), (None, TypeError)],
)
def test_principals_that_are_none(value: Any, error: type[Exception]) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(error, match=r"^principal must be"):
            kind("localhost:1", principal=value)


@pytest.mark.parametrize("value", [9e9, 1e300, 10**400])
def test_a_timeout_beyond_what_grpc_can_count_is_none_that_has_passed(service: FakeDraftService, value: float) -> None:
    with Client(service.address, timeout=value, connect_timeout=value) as client:
        assert client.generate("Once").text == client.generate("Once", timeout=value).text == "Héllo"


def test_a_proxy_of_the_web_is_not_for_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no server listens there
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("localhost:0")
    server.start()
    try:
        # the server answers that it lacks the method; the proxy would not answer
        with Client(f"localhost:{port}") as client, pytest.raises(ServerError, match="is not a draft service"):
            client.model_info()
    finally:
        server.stop(None)


def test_a_port_beyond_the_last_is_no_address() -> None:
    with pytest.raises(ValueError, match="host:port"):
        Client("localhost:99999")


def _told_async(address: str, calls: int) -> list[str]:
    async def run() -> list[str]:
        async with AsyncClient(address) as client:
            return [each.target.name for each in await asyncio.gather(*(client.model_info() for _ in range(calls)))]

    return asyncio.run(run())


def _told(address: str, calls: int) -> list[str]:
    with Client(address) as client, ThreadPoolExecutor(8) as pool:
        return [each.target.name for each in pool.map(lambda _: client.model_info(), range(calls))]


@pytest.mark.parametrize("told", [_told, _told_async])
def test_each_of_many_calls_tries_every_server(
    tmp_path: Path, service: FakeDraftService, told: Callable[[str, int], list[str]]
) -> None:
    """The calls take turns at the servers, and none tries the dead server twice in place of the other."""
    assert told(f"unix:{tmp_path}/nobody.sock,{service.address}", 200) == ["large"] * 200


def test_a_request_that_one_server_refuses_goes_to_the_other_beside_many(tmp_path: Path) -> None:
    with serving(tmp_path, "busy.sock") as busy, serving(tmp_path) as free:
        busy.script = [Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")]
        with Client(f"{busy.address},{free.address}") as client, ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(lambda _: client.generate("Once").text, range(100)))
    assert texts == ["Héllo"] * 100


def test_a_question_waits_for_a_server_that_restarts(tmp_path: Path) -> None:
    """Questions about models and tokens wait as long as a completion of which nothing has come."""
    with Client(f"unix:{tmp_path}/draft.sock") as client, ThreadPoolExecutor(1) as pool:
        with serving(tmp_path):
            client.model_info()
        asked = pool.submit(client.model_info)
        with pytest.raises(ServerUnavailableError):
            client.model_info(timeout=0.5)
        with serving(tmp_path):
            assert asked.result(10.0).target.name == "large"


def test_a_client_that_is_closed_while_a_question_waits_says_so(tmp_path: Path) -> None:
    async def ask() -> None:
        async with AsyncClient(address) as other:
            with serving(tmp_path):
                await other.model_info()
            asked = asyncio.ensure_future(other.model_info())
            await asyncio.sleep(0.5)
            await other.close()
            await asked

    address = f"unix:{tmp_path}/draft.sock"
    with Client(address) as client, ThreadPoolExecutor(1) as pool:
        with serving(tmp_path):
            client.model_info()
        asked = pool.submit(client.model_info)
        time.sleep(0.5)
        client.close()
        with pytest.raises(DynaTreeError):
            asked.result(10.0)
    with pytest.raises(DynaTreeError):
        asyncio.run(ask())
