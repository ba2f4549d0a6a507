"""The client library against a scripted service: every error, and what of the completion it keeps."""

import asyncio
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from dynatree.client import (
    AsyncClient,
    AsyncCompletionStream,
    AuthenticationError,
    Client,
    CompletionStream,
    DeadlineExceededError,
    DynaTreeError,
    GrammarError,
    InvalidRequestError,
    ModelMismatchError,
    RequestCancelledError,
    ServerBusyError,
    ServerError,
    ServerUnavailableError,
)
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


def test_a_pause_that_would_exceed_the_timeout_ends_the_request_with_its_error(
    client: Client, service: FakeDraftService
) -> None:
    """The pauses are 0.2, 0.4 and 0.8 s."""
    service.script = [Fail(grpc.StatusCode.UNAVAILABLE)]
    for call in (lambda: client.generate("Once", timeout=1.2), lambda: generate_async(service, timeout=1.2)):
        with pytest.raises(ServerUnavailableError, match="as scripted"):
            call()


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


def test_a_grammar_that_is_at_fault_has_its_own_error(client: Client, service: FakeDraftService) -> None:
    service.script = [Fail(grpc.StatusCode.INVALID_ARGUMENT, trailing=(("dynatree-refused", "grammar"),))]
    with pytest.raises(GrammarError):
        client.generate("Once", regex="a")


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
        assert service.ended.wait(60)
        for _ in stream:
            pass

    async def read_async(stream: AsyncCompletionStream) -> None:
        await anext(stream)
        assert await asyncio.to_thread(service.ended.wait, 60)
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
    assert service.abandoned.wait(60)


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


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


ENDS = {"whole": (last(), 9), "failed": (Fail(grpc.StatusCode.RESOURCE_EXHAUSTED), 9), "closed": (Hang(), 1)}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.usefixtures("_uncollected")
def test_a_stream_is_freed_without_a_garbage_collection(client: Client, service: FakeDraftService, end: str) -> None:
    step, reads = ENDS[end]
    service.script = [message("a", 1), step]

    def used() -> list[weakref.ref[Any]]:
        with client.stream("Once") as stream:
            with suppress(StopIteration, DynaTreeError):
                for _ in range(reads):
                    next(stream)
            return [weakref.ref(stream), weakref.ref(stream._call)]

    async def used_async() -> list[weakref.ref[Any]]:
        async with AsyncClient(service.address) as client, client.stream("Once") as stream:
            with suppress(StopAsyncIteration, DynaTreeError):
                for _ in range(reads):
                    await anext(stream)
            return [weakref.ref(stream), weakref.ref(stream._call)]

    assert [ref() for ref in used()] == [None, None]
    refs = asyncio.run(used_async())
    wait_until(lambda: [ref() for ref in refs] == [None, None])  # gRPC's loop ends the call on its own thread
