"""The client library against a scripted service: every call in both clients, every error, every way to stop."""

import asyncio
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_draft_service import Fail, FakeDraftService, Hang, last, message, serving

import dynatree.client
from dynatree.client import (
    AsyncClient,
    AsyncCompletionStream,
    Chunk,
    Client,
    Completion,
    CompletionStream,
    DeadlineExceededError,
    DynaTreeError,
    InvalidRequestError,
    ModelMismatchError,
    RequestCancelledError,
    RoundPart,
    ServerBusyError,
    ServerError,
    ServerUnavailableError,
)
from dynatree.v1 import tree_pb2

ERRORS = {code: ServerError for code in grpc.StatusCode if code is not grpc.StatusCode.OK} | {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatchError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ServerBusyError,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeDraftService]:
    with serving(tmp_path) as service:
        yield service


@pytest.fixture
def client(service: FakeDraftService) -> Iterator[Client]:
    with Client(service.address) as client:
        yield client


def generate_async(service: FakeDraftService, **options: Any) -> Completion:
    async def run() -> Completion:
        async with AsyncClient(service.address) as client:
            return await client.generate("Once", **options)

    return asyncio.run(run())


# Completions


def test_generate_gathers_the_whole_stream(client: Client) -> None:
    completion = client.generate("Once")
    assert (completion.text, completion.token_ids) == ("Héllo", (1, 2, 3))
    assert (completion.finish_reason, completion.prompt_tokens) == ("length", 4)
    assert completion.stats.acceptance_by_depth == (0.5, 0.25)
    assert completion.stats.round_parts == {"wire": RoundPart(total_seconds=0.5, p50_seconds=0.25)}
    assert completion.stats.seed == 2**64 - 1


def test_both_clients_return_the_same(client: Client, service: FakeDraftService) -> None:
    assert generate_async(service) == client.generate("Once")


def test_a_completion_is_a_json_object(client: Client) -> None:
    completion = client.generate("Once").to_dict()
    assert json.loads(json.dumps(completion)) == completion
    assert list(completion) == ["text", "token_ids", "prompt_tokens", "finish_reason", "stats"]
    assert completion["stats"]["round_parts"] == {"wire": {"total_seconds": 0.5, "p50_seconds": 0.25}}


def test_every_statistic_of_the_protocol_is_there(client: Client) -> None:
    fields = last().completion.statistics.DESCRIPTOR.fields_by_name
    assert set(client.generate("Once").to_dict()["stats"]) == set(fields)


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_finish_reasons(client: Client, service: FakeDraftService, reason: str) -> None:
    service.script = [last(tree_pb2.FinishReason.Value(f"FINISH_REASON_{reason.upper()}"))]
    assert client.generate("Once").finish_reason == reason


def test_stream_yields_chunks_then_has_the_completion(client: Client) -> None:
    stream = client.stream("Once")
    with pytest.raises(RuntimeError, match="not been read to its end"):
        _ = stream.completion
    # The last message adds nothing, so it is no chunk.
    assert list(stream) == [Chunk("Hé", (1,)), Chunk("", (2,)), Chunk("llo", (3,))]
    assert stream.completion.text == stream.text == "Héllo"
    assert list(stream) == []


def test_async_stream_yields_chunks_then_has_the_completion(service: FakeDraftService) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            stream = client.stream("Once")
            assert [chunk.text async for chunk in stream] == ["Hé", "", "llo"]
            assert stream.completion.token_ids == stream.token_ids == (1, 2, 3)
            assert [chunk async for chunk in stream] == []

    asyncio.run(run())


def test_the_last_message_may_carry_text(client: Client, service: FakeDraftService) -> None:
    end = last()
    end.MergeFrom(message("!", 9))
    service.script = [end]
    stream = client.stream("Once")
    assert list(stream) == [Chunk("!", (9,))]
    assert stream.completion.text == "!"


def test_model_info(client: Client, service: FakeDraftService) -> None:
    async def run() -> dynatree.client.ServiceInfo:
        async with AsyncClient(service.address) as client:
            return await client.model_info()

    info = client.model_info()
    assert (info.draft.name, info.draft.parameters, info.target.vocab_size) == ("small", 7, 50_304)
    assert info.policies == ("dynatree", "linear")
    assert asyncio.run(run()) == info


def test_threads_share_a_client(client: Client) -> None:
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(client.generate("Once").text)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["Héllo"] * 4


def test_tasks_share_a_client(service: FakeDraftService) -> None:
    async def run() -> list[Completion]:
        async with AsyncClient(service.address) as client:
            return await asyncio.gather(*(client.generate("Once") for _ in range(4)))

    assert [completion.text for completion in asyncio.run(run())] == ["Héllo"] * 4


def test_channel_options_take_precedence(service: FakeDraftService) -> None:
    service.script = [message("x" * 1000, 1), last()]
    options = [("grpc.max_receive_message_length", 500)]
    with Client(service.address, channel_options=options) as client, pytest.raises(ServerBusyError, match="larger"):
        client.generate("Once")


# Requests


def test_defaults_leave_optional_fields_out(client: Client, service: FakeDraftService) -> None:
    client.generate("Once")
    (request,) = service.requests
    assert request.text == "Once"
    assert not any(request.HasField(name) for name in ("max_new_tokens", "policy"))
    assert not any(request.sampling.HasField(name) for name in ("top_p", "seed"))


def test_every_option_reaches_the_server(client: Client, service: FakeDraftService) -> None:
    client.generate(
        [5, 0, 2**32 - 1],
        max_new_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        seed=2**64 - 1,
        stop=["a", "b"],
        ignore_eos=True,
        policy="linear",
        policy_settings={"depth": 8},
    )
    (request,) = service.requests
    assert list(request.token_ids.ids) == [5, 0, 2**32 - 1]
    assert request.max_new_tokens == 7
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.75, 2**64 - 1)
    assert (list(request.stop), request.ignore_eos) == (["a", "b"], True)
    assert (request.policy.name, dict(request.policy.settings)) == ("linear", {"depth": 8.0})


def test_what_the_server_defines_is_sent_as_it_is(client: Client, service: FakeDraftService) -> None:
    client.generate([], max_new_tokens=0, temperature=-1.0, top_p=7.0, seed=0, stop="END", policy_settings={"depth": 2})
    (request,) = service.requests
    assert request.WhichOneof("prompt") == "token_ids"
    assert request.HasField("max_new_tokens")
    assert request.sampling.HasField("seed")
    assert (request.sampling.temperature, request.sampling.top_p) == (-1.0, 7.0)
    assert list(request.stop) == ["END"]
    assert request.policy.name == ""


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ([True], {}, "token id"),
        ([-1], {}, "token id"),
        ([2**32], {}, "token id"),
        ("\udcff", {}, "prompt"),
        ("Once", {"max_new_tokens": -1}, "max_new_tokens"),
        ("Once", {"max_new_tokens": 2**32}, "max_new_tokens"),
        ("Once", {"top_k": -1}, "top_k"),
        ("Once", {"seed": -1}, "seed"),
        ("Once", {"seed": 2**64}, "seed"),
        ("Once", {"temperature": 1e-60}, "temperature"),
        ("Once", {"top_p": 10**400}, "top_p"),
    ],
)
def test_values_that_cannot_be_sent(client: Client, prompt: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"invalid request: {said}") as caught:
        client.generate(prompt, **options)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (b"Once", {}),
        (None, {}),
        ([1.0], {}),
        (["1"], {}),
        ("Once", {"temperature": "hot"}),
        ("Once", {"temperature": True}),
        ("Once", {"top_k": 1.5}),
        ("Once", {"ignore_eos": "no"}),
        ("Once", {"stop": [b"END"]}),
        ("Once", {"policy": 3}),
        ("Once", {"temprature": 1.0}),
    ],
)
def test_wrong_types(client: Client, prompt: Any, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        client.generate(prompt, **options)


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
        # Nothing that was received is lost.
        assert (error.text, error.token_ids) == ("Hé", (1, 2))
        assert "tokens received: 2" in str(error)


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
        for _ in stream:
            time.sleep(0.05)

    async def read_async(stream: AsyncCompletionStream) -> None:
        async for _ in stream:
            await asyncio.sleep(0.05)

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
    assert asyncio.run(run()) == (0, 1, 2, 3, 4)
    assert list(stream) == []


@pytest.mark.parametrize("end", [[], [last(tree_pb2.FINISH_REASON_UNSPECIFIED)]], ids=["none", "unspecified"])
def test_a_stream_that_ends_wrongly(client: Client, service: FakeDraftService, end: list[Any]) -> None:
    service.script = [message("Hé", 1), *end]
    for call in (lambda: client.generate("Once"), lambda: generate_async(service)):
        with pytest.raises(ServerError) as caught:
            call()
        assert (caught.value.text, caught.value.token_ids) == ("Hé", (1,))


def test_errors_survive_pickling() -> None:
    error = ServerError(grpc.StatusCode.INTERNAL, "no", text="a", token_ids=[1])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code, copy.token_ids) == (str(error), error.code, (1,))


# Time


def test_the_deadline_keeps_what_was_received(client: Client, service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    for call in (lambda: client.generate("Once", timeout=0.3), lambda: generate_async(service, timeout=0.3)):
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
def test_nobody_at_the_address(tmp_path: Path, limits: dict[str, float]) -> None:
    async def run() -> None:
        async with AsyncClient(address, **limits) as client:
            await client.generate("Once")

    def call() -> None:
        with Client(address, **limits) as client:
            client.generate("Once")

    address = f"unix:{tmp_path}/nobody.sock"
    for attempt in (call, lambda: asyncio.run(run())):
        start = time.monotonic()
        with pytest.raises(ServerUnavailableError, match=f"{address} within 0.3 s") as caught:
            attempt()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - start < 3


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
    with Client(f"unix:{tmp_path}/draft.sock") as client:
        with serving(tmp_path):
            client.generate("Once")
        with pytest.raises(ServerUnavailableError, match="draft"):
            client.generate("Once")


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", "unix:"])
def test_addresses_that_are_none(address: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="host:port or unix:PATH"):
            kind(address)


@pytest.mark.parametrize("name", ["timeout", "connect_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_timeouts_that_are_none(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a positive number"):
        Client("localhost:1", **{name: value})


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


def test_close_from_another_thread_ends_the_loop(client: Client, service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    stream = client.stream("Once")
    timer = threading.Timer(0.2, stream.close)
    timer.start()
    assert [chunk.text for chunk in stream] == ["Hé"]
    timer.join()


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
            stream = client.stream("Once")
            asyncio.get_running_loop().call_later(0.2, lambda: asyncio.ensure_future(stream.aclose()))
            assert [chunk.text async for chunk in stream] == ["Hé"]

    service.script = [message("Hé", 1), Hang()]
    asyncio.run(run())


def test_cancelling_the_task_cancels_on_the_server(service: FakeDraftService) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            task = asyncio.create_task(client.generate("Once"))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(service.abandoned.wait, 5)

    service.script = [message("Hé", 1), Hang()]
    asyncio.run(run())


def test_asyncio_timeout_is_a_timeout(service: FakeDraftService) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.generate("Once")

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


# The package


def test_the_export_list_is_sorted_and_complete() -> None:
    names = dynatree.client.__all__
    assert names == sorted(names)
    public = {name for name, value in vars(dynatree.client).items() if not name.startswith("_")}
    assert public == set(names)


def test_importing_it_needs_no_model_packages() -> None:
    code = "import sys, dynatree.client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy", "dynatree.common"} & set(loaded)


def test_a_request_too_large_for_any_server_is_refused_here(service: FakeDraftService) -> None:
    with Client(service.address) as client, pytest.raises(InvalidRequestError, match="a server takes at most"):
        client.generate("x" * 5_000_000)
    assert not service.requests


def test_a_proxy_of_the_web_is_not_for_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("localhost:0")
    server.start()
    try:
        # it answers, if only that it knows no such method; through the proxy nobody would
        with Client(f"localhost:{port}") as client, pytest.raises(ServerError, match="is not a draft service"):
            client.model_info()
    finally:
        server.stop(None)


def test_a_port_beyond_the_last_is_no_address() -> None:
    with pytest.raises(ValueError, match="host:port"):
        Client("localhost:99999")
