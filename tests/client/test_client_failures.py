"""Tests the client library against a scripted service: every error, waiting, and every way to stop."""

import asyncio
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import IO, Any

import grpc
import pytest

from dynatree.client import (
    AsyncClient,
    AsyncCompletionStream,
    AuthenticationError,
    Client,
    Completion,
    CompletionStream,
    DeadlineExceededError,
    DynaTreeError,
    InvalidRequestError,
    ModelMismatchError,
    RequestCancelledError,
    ServerBusyError,
    ServerError,
    ServerUnavailableError,
)
from dynatree.client._base import BaseClient, Deadline
from dynatree.v1 import tree_pb2
from tests.support.fake_draft_service import (  # noqa: F401 - fixtures
    Fail,
    FakeDraftService,
    Hang,
    client_fixture,
    generate_async,
    last,
    message,
    service_fixture,
    serving,
)
from tests.support.paths import ROOT
from tests.support.processes import wait_until

ERRORS = {code: ServerError for code in grpc.StatusCode if code is not grpc.StatusCode.OK} | {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatchError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ServerBusyError,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
}


# Errors


@pytest.mark.parametrize("code", ERRORS, ids=lambda code: code.name)
def test_each_code_has_its_error(client: Client, service: FakeDraftService, code: grpc.StatusCode) -> None:
    service.script = [message("Hé", 1), message("", 2), Fail(code)]
    for call in (lambda: client.generate("Once"), lambda: generate_async(service)):
        with pytest.raises(DynaTreeError) as caught:
            call()
        error = caught.value
        assert type(error) is ERRORS[code]
        assert error.code is code
        assert "as scripted" in error.details
        assert "as scripted" in str(error)
        # Received tokens are never lost.
        assert (error.text, error.token_ids) == ("Hé", (1, 2))
        assert "tokens received: 2" in str(error)


def test_a_request_that_the_server_dropped_is_sent_anew(service: FakeDraftService) -> None:
    """The core of gRPC drops it silently when too many calls wait; it has not reached the service."""
    service.script = [Fail(grpc.StatusCode.CANCELLED, "CANCELLED")]
    with Client(service.address, connect_timeout=0.7) as client:
        with pytest.raises(ServerUnavailableError, match="dropped the request"):
            client.generate("Once")
        assert len(service.requests) > 1
    with Client(service.address, resume=False) as client, pytest.raises(ServerUnavailableError):
        client.generate("Once")


@pytest.mark.parametrize(("refused", "asked"), [("queue", 2), ("quota", 1)])
def test_a_quota_is_not_looked_for_at_another_server(tmp_path: Path, refused: str, asked: int) -> None:
    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    with serving(folder("a")) as first, serving(folder("b")) as second:
        for service in (first, second):
            service.script = [Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, trailing=(("dynatree-refused", refused),))]
        with Client(f"{first.address},{second.address}") as client, pytest.raises(ServerBusyError):
            client.generate("Once")
        assert len(first.requests) + len(second.requests) == asked


def test_an_answer_that_is_whole_needs_no_status(client: Client, service: FakeDraftService) -> None:
    """The connection broke after the last message, so nothing is missing."""
    service.script = [message("Hé", 1), last(), Fail(grpc.StatusCode.UNAVAILABLE, "Socket closed")]
    assert client.generate("Once").text == "Hé"
    assert generate_async(service).text == "Hé"
    assert len(service.requests) == 2


def test_errors_of_model_info(client: Client, service: FakeDraftService) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            await client.model_info()

    service.info_failure = Fail(grpc.StatusCode.FAILED_PRECONDITION)
    with pytest.raises(ModelMismatchError):
        client.model_info()
    with pytest.raises(ModelMismatchError):
        asyncio.run(run())


def test_messages_before_a_failure_reach_a_slow_reader(client: Client, service: FakeDraftService) -> None:
    def read(stream: CompletionStream) -> None:
        next(stream)
        assert service.ended.wait(20)
        for _ in stream:
            pass

    async def read_async(stream: AsyncCompletionStream) -> None:
        await anext(stream)
        assert await asyncio.to_thread(service.ended.wait, 20)
        async for _ in stream:
            pass

    async def run() -> tuple[int, ...]:
        async with AsyncClient(service.address) as client, client.stream("Once") as stream:
            with pytest.raises(ServerError):
                await read_async(stream)
            return stream.token_ids

    service.script = [*(message(str(i), i) for i in range(5)), Fail(grpc.StatusCode.INTERNAL)]
    stream = client.stream("Once")
    with pytest.raises(ServerError) as caught:
        read(stream)
    assert caught.value.token_ids == stream.token_ids == (0, 1, 2, 3, 4)
    service.ended.clear()
    assert asyncio.run(run()) == (0, 1, 2, 3, 4)
    assert list(stream) == []


@pytest.mark.parametrize("end", [[], [last(tree_pb2.FINISH_REASON_UNSPECIFIED)]], ids=["none", "unspecified"])
def test_a_stream_that_ends_wrongly(client: Client, service: FakeDraftService, end: list[Any]) -> None:
    service.script = [message("Hé", 1), *end]
    for call in (lambda: client.generate("Once"), lambda: generate_async(service)):
        with pytest.raises(ServerError) as caught:
            call()
        assert (caught.value.text, caught.value.token_ids) == ("Hé", (1,))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([message("", 2, index=1), last(index=1)], "ended with 2 of 3 completions"),
        ([message("", 2, index=1), last(index=1), message("", 3, index=2)], "ended with 2 of 3 completions"),
        ([message("", 2, index=1), last(index=1), last(index=3)], "completion 3 was not requested"),
        ([last(index=1), last(0, index=2), message("", 2, index=1)], "unknown finish reason 0"),
    ],
    ids=["one missing", "one without an end", "one too many", "no reason"],
)
def test_a_stream_of_several_that_ends_wrongly(
    client: Client, service: FakeDraftService, script: list[Any], said: str
) -> None:
    service.script = [message("Hé", 1), last(), *script]
    for call in (lambda: client.generate("Once", n=3), lambda: generate_async(service, n=3)):
        with pytest.raises(ServerError, match=said) as caught:
            call()
        assert (caught.value.text, caught.value.token_ids[:2]) == ("Hé", (1, 2))


def test_a_completion_that_was_not_asked_for_ends_the_stream(client: Client, service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), message("no", 2, index=1), Hang()]
    stream = client.stream("Once")
    next(stream)
    with pytest.raises(ServerError, match="completion 1 was not requested"):
        next(stream)
    assert list(stream) == []
    stream.close()
    assert service.abandoned.wait(5)


def test_an_error_carries_what_came_of_all_completions(client: Client, service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), last(), message("llo", 2, index=1), Fail(grpc.StatusCode.INTERNAL)]
    for call in (lambda: client.generate("Once", n=2), lambda: generate_async(service, n=2)):
        with pytest.raises(ServerError) as caught:
            call()
        assert (caught.value.text, caught.value.token_ids) == ("Héllo", (1, 2))


def test_errors_survive_pickling() -> None:
    error = ServerError(grpc.StatusCode.INTERNAL, "no", text="a", token_ids=[1])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.token_ids) == (str(error), error.code, (1,))


# Time


def test_the_deadline_keeps_what_was_received(client: Client, service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    for call in (lambda: client.generate("Once", timeout=1), lambda: generate_async(service, timeout=1)):
        with pytest.raises(DeadlineExceededError) as caught:
            call()
        assert caught.value.text == "Hé"
        assert service.abandoned.wait(5)
        service.abandoned.clear()


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


# Stopping early


def test_close_cancels_on_the_server(client: Client, service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    stream = client.stream("Once")
    assert next(stream).text == "Hé"
    stream.close()
    assert service.abandoned.wait(5)
    assert list(stream) == []
    assert stream.text == "Hé"


@pytest.mark.parametrize("managed", [True, False], ids=["with", "dropped"])
def test_leaving_the_loop_cancels_on_the_server(client: Client, service: FakeDraftService, managed: bool) -> None:
    service.script = [message("Hé", 1), Hang()]
    if managed:
        with client.stream("Once") as stream:
            next(stream)
    else:
        for _ in client.stream("Once"):
            break
    assert service.abandoned.wait(5)


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_streams_that_are_left_early_take_no_memory(client: Client, service: FakeDraftService, how: str) -> None:
    """A call stays in its channel, with some 12 KB, until its last message is read."""
    service.script = [message("Hé", 1), Hang()]

    def leave(count: int) -> float:
        for _ in range(count):
            stream = client.stream("Once")
            next(stream)
            if how == "closed":
                stream.close()
            del stream
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    before = leave(300)
    assert leave(900) - before < 4.0  # MB


def test_a_client_that_is_closed_has_no_connection_whatever_was_lost(tmp_path: Path) -> None:
    """A call keeps its channel's connections until its last message is read."""
    path = tmp_path / "draft.sock"
    before = _sockets()
    with ThreadPoolExecutor(4) as pool, Client(f"unix:{path}", resume=False) as client:
        with silent_service(path) as output:
            client.model_info(timeout=30.0)
            waiting = [pool.submit(client.generate, "Once") for _ in range(4)]
            assert [output.readline() for _ in waiting] == ["called\n"] * 4
        assert {type(each.exception(30.0)) for each in waiting} == {ServerUnavailableError}
        with silent_service(path):
            wait_until(lambda: _is_known(client))
            client.close()
            wait_until(lambda: _sockets() <= before, 10.0)


@contextmanager
def silent_service(path: Path) -> Iterator[IO[str]]:
    """A process that listens on a socket, reports calls and answers none; it is killed at the end."""
    command = [sys.executable, ROOT / "tests" / "support" / "fake_draft_service.py", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


def _is_known(client: Client) -> bool:
    try:
        client.model_info(timeout=1.0)
    except DynaTreeError:
        return False
    return True


def _sockets() -> int:
    """Return the number of sockets of this process."""
    return sum(os.readlink(each).startswith("socket:") for each in Path("/proc/self/fd").iterdir() if each.is_symlink())


def test_close_from_another_thread_ends_the_loop(client: Client, service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    stream = client.stream("Once")
    timer = threading.Timer(0.2, stream.close)
    timer.start()
    assert [chunk.text for chunk in stream] == ["Hé"]
    timer.join()


@pytest.mark.long
def test_an_interrupt_anywhere_leaves_a_client_that_answers_and_closes(service: FakeDraftService) -> None:
    program = ROOT / "tests" / "support" / "interrupt_everywhere.py"
    result = subprocess.run([sys.executable, program, service.address], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 100


def test_closing_the_client_ends_its_streams_with_an_error(service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    client = Client(service.address)
    stream = client.stream("Once")
    next(stream)
    client.close()
    with pytest.raises(RequestCancelledError) as caught:
        next(stream)
    assert caught.value.text == "Hé"


def test_closing_the_async_client_ends_its_streams_with_an_error(service: FakeDraftService) -> None:
    async def run() -> None:
        client = AsyncClient(service.address)
        stream = client.stream("Once")
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(RequestCancelledError) as caught:
            await waiting
        assert caught.value.text == "Hé"

    service.script = [message("Hé", 1), Hang()]
    asyncio.run(run())


@pytest.mark.parametrize("managed", [True, False], ids=["async with", "aclosing"])
def test_leaving_the_async_loop_cancels_on_the_server(service: FakeDraftService, managed: bool) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            stream = client.stream("Once")
            async with stream if managed else aclosing(stream):
                async for _ in stream:
                    break
            assert await asyncio.to_thread(service.abandoned.wait, 5)
            assert [chunk async for chunk in stream] == []
            assert stream.text == "Hé"

    service.script = [message("Hé", 1), Hang()]
    asyncio.run(run())


def test_aclose_from_another_task_ends_the_loop(service: FakeDraftService) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            stream, texts, closing = client.stream("Once"), [], []
            async for chunk in stream:
                texts.append(chunk.text)
                closing.append(asyncio.ensure_future(stream.aclose()))
            assert texts == ["Hé"]
            await closing[0]

    service.script = [message("Hé", 1), Hang()]
    asyncio.run(run())


def test_cancelling_the_task_cancels_on_the_server(service: FakeDraftService) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            task = asyncio.create_task(client.generate("Once"))
            await arrival(service)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(service.abandoned.wait, 5)

    service.script = [message("Hé", 1), Hang()]
    asyncio.run(run())


async def arrival(service: FakeDraftService) -> None:
    """Wait until a request has reached the service."""
    while not service.requests:
        await asyncio.sleep(0.01)


def test_asyncio_timeout_is_a_timeout(service: FakeDraftService) -> None:
    async def let_pass(limit: asyncio.Timeout) -> None:
        await arrival(service)
        limit.reschedule(0)

    async def generate(client: AsyncClient) -> None:
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
            group.create_task(let_pass(limit))
            await client.generate("Once")

    async def run() -> None:
        async with AsyncClient(service.address) as client:
            with pytest.raises(TimeoutError):
                await generate(client)

    service.script = [Hang()]
    asyncio.run(run())
    assert service.abandoned.wait(5)


def test_a_closed_client_says_so(service: FakeDraftService) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            pass
        await client.close()
        with pytest.raises(RuntimeError, match="the client is closed"):
            await client.model_info()

    with Client(service.address) as client:
        pass
    client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.generate("Once")
    asyncio.run(run())
