"""Tests that a completion continues at another service with the same tokens: the messages, and both sides' handling."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from dynatree.client import Client, Completion, ServerUnavailableError
from dynatree.common.errors import PeerUnavailableError, ServiceError
from dynatree.common.messages import Commit
from dynatree.common.tree import TokenTree
from dynatree.draft.target.remote_session import PATIENCE
from dynatree.draft.target.verify_client import VerifyStream
from dynatree.engine.cpu import native
from dynatree.engine.grammar.state import GrammarState
from dynatree.serving import healthcheck
from dynatree.v1 import draft_pb2, draft_pb2_grpc, tree_pb2, verify_pb2, verify_pb2_grpc
from tests.campaigns.recurrent_matrix import saved_pair
from tests.support.grpc_proxy import VERIFY, GrpcProxy, Hook, ProxyLoop, forward_all
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import save_random_model
from tests.support.processes import wait_until
from tests.support.services import Services, running_services

PROMPT = list(range(20, 40))
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "gumbel": {"sampling": tree_pb2.SamplingOptions(temperature=0.9, seed=5)},
    "penalty": {"sampling": tree_pb2.SamplingOptions(repetition_penalty=1.4)},
    "counts": {
        "sampling": tree_pb2.SamplingOptions(frequency_penalty=1.5, logit_bias=dict.fromkeys(range(50, 54), 9.0))
    },
    "stop string": {"stop": ["e"]},
    "log_probs": {"log_probs": True},
    "top_log_probs": {"top_log_probs": 3, "prompt_log_probs": True},
    "two": {"sampling": tree_pb2.SamplingOptions(temperature=0.9, seed=5), "n": 2},
}


@pytest.fixture(scope="module", name="services", params=["llama", pytest.param("qwen3_5_text", marks=pytest.mark.long)])
def services_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("r")
    if request.param == "llama":
        target = save_random_model(folder / "target", request.param, seed=1)
    else:
        target, _ = saved_pair(request.param, folder)
    with running_services(folder, target, save_random_model(folder / "draft", "gpt_neox", seed=2)) as services:
        yield services


@pytest.fixture(name="stub")
def stub_fixture(services: Services) -> Iterator[draft_pb2_grpc.DraftServiceStub]:
    with grpc.insecure_channel(services.draft_address) as channel:
        yield draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]


def request_for(name: str, **changes: Any) -> draft_pb2.GenerateRequest:
    options: dict[str, Any] = {"token_ids": draft_pb2.TokenIds(ids=PROMPT), "max_new_tokens": 12, "ignore_eos": True}
    return draft_pb2.GenerateRequest(**(options | OPTIONS[name] | changes))


def received(responses: list[draft_pb2.GenerateResponse], index: int = 0) -> tuple[str, list[int], list[float]]:
    """Return text, tokens and log-probabilities of one completion."""
    same = [response for response in responses if response.index == index]
    return (
        "".join(response.text for response in same),
        [token for response in same for token in response.token_ids],
        [value for response in same for value in response.log_probs],
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_a_completion_resumed_at_every_message(stub: draft_pb2_grpc.DraftServiceStub, name: str) -> None:
    """The earlier messages and those of the resumed request form the whole completion."""
    whole = list(stub.Generate(request_for(name), timeout=30.0))
    started = whole[0].started
    assert started.target_fingerprint
    for count in range(1, len(whole)):
        before = whole[:count]
        index = sum(response.HasField("completion") for response in before)
        text, tokens, log_probs = received(before, index)
        resume = draft_pb2.Resume(
            index=index, token_ids=tokens, characters=len(text), target_fingerprint=started.target_fingerprint
        )
        after = list(stub.Generate(request_for(name, resume=resume), timeout=30.0))
        assert {response.index for response in after} == set(range(index, max(1, request_for(name).n)))
        rest = received(after, index)
        assert (text + rest[0], tokens + rest[1]) == received(whole, index)[:2]
        assert log_probs + rest[2] == pytest.approx(received(whole, index)[2])
        ends = [response.completion for response in whole if response.HasField("completion")]
        again = [response.completion for response in after if response.HasField("completion")]
        assert [each.finish_reason for each in again] == [each.finish_reason for each in ends[index:]]
        assert again[0].statistics.generated_tokens == ends[index].statistics.generated_tokens


def test_text_that_was_held_back_comes_once(stub: draft_pb2_grpc.DraftServiceStub) -> None:
    """The client may have less text than its tokens have, because characters and stop strings were not certain."""
    whole = received(list(stub.Generate(request_for("greedy"), timeout=30.0)))
    for characters in range(len(whole[0])):
        resume = draft_pb2.Resume(token_ids=whole[1][:8], characters=characters)
        rest = received(list(stub.Generate(request_for("greedy", resume=resume), timeout=30.0)))
        assert rest[0] == whole[0][characters:]


def test_the_first_message_says_what_is_needed_to_resume(stub: draft_pb2_grpc.DraftServiceStub) -> None:
    request = draft_pb2.GenerateRequest(
        text="Once upon", max_new_tokens=3, n=2, sampling=tree_pb2.SamplingOptions(temperature=0.5)
    )
    responses = list(stub.Generate(request, timeout=30.0))
    first = [next(response for response in responses if response.index == index) for index in (0, 1)]
    assert first[0].started == first[1].started
    assert first[0].started.prompt_ids
    assert first[0].started.seed
    assert sum(response.HasField("started") for response in responses) == 2


def under_a_grammar(**resume: Any) -> draft_pb2.GenerateRequest:
    grammar = tree_pb2.Grammar(kind=tree_pb2.GRAMMAR_KIND_REGEX, text="[a-z ]{40}")
    return request_for("two", grammar=grammar, ignore_eos=False, resume=draft_pb2.Resume(**resume))


def test_received_tokens_are_followed_through_a_grammar_once_and_not_on_the_event_loop(
    stub: draft_pb2_grpc.DraftServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a mask over the vocabulary. The second completion of the call begins before the first token."""
    whole = list(stub.Generate(under_a_grammar(), timeout=30.0))
    tokens = [received(whole, index)[1] for index in (0, 1)]
    assert tokens[0] != tokens[1]
    on_loop: list[int] = []
    while_reading: list[int] = []
    after = GrammarState.after

    def noted(state: GrammarState, token: int) -> GrammarState | None:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            on_loop.append(token)
        if threading.current_thread().name.startswith("tokenizer"):
            while_reading.append(token)
        return after(state, token)

    monkeypatch.setattr(GrammarState, "after", noted)
    rest = list(stub.Generate(under_a_grammar(token_ids=tokens[0][:8]), timeout=30.0))
    assert [received(rest, index)[1] for index in (0, 1)] == [tokens[0][8:], tokens[1]]
    assert (on_loop, while_reading) == ([], tokens[0][:8])


@pytest.mark.parametrize("index", [0, 1])
def test_received_tokens_that_do_not_follow_the_grammar(stub: draft_pb2_grpc.DraftServiceStub, index: int) -> None:
    tokens = received(list(stub.Generate(under_a_grammar(), timeout=30.0)), index)[1]
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(under_a_grammar(index=index, token_ids=[*tokens[:4], 0, *tokens[4:8]]), timeout=30.0))
    error: Any = refused.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("resume.token_ids do not follow the grammar")


# The verify service


class FailingWrites:
    """A gRPC call whose writes fail, as between the peer's end of the call and the news of it."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def send_serialized_message(self, message: bytes) -> None:
        raise cygrpc.InternalError("Failed 'execute_batch'")


def test_a_write_that_fails_before_the_status_is_known(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call then gets gRPC's own status INTERNAL, which must not reach the client."""
    sessions: list[VerifyStream] = []
    errors: list[type[ServiceError]] = []

    async def verify(session: VerifyStream, tree: TokenTree, last: Commit) -> Commit:
        sessions.append(session)
        if len(sessions) == 3:
            session._call._cython_call = FailingWrites(session._call._cython_call)
        try:
            return await usual(session, tree, last)
        except ServiceError as error:
            errors.append(type(error))
            raise

    with Client(services.draft_address, resume=False) as client:
        whole = client.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids
        usual = VerifyStream.verify
        monkeypatch.setattr(VerifyStream, "verify", verify)
        completion = client.generate(PROMPT, max_new_tokens=12, ignore_eos=True, policy="linear")
    assert completion.token_ids == whole
    assert completion.stats.resumes == 1
    assert errors == [PeerUnavailableError]


def opened(services: Services, **changes: Any) -> verify_pb2.SessionOpened:
    options: dict[str, Any] = {"prompt_ids": PROMPT, "max_new_tokens": 4, "ignore_eos": True}
    with grpc.insecure_channel(services.verify_address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)  # type: ignore[no-untyped-call]
        model = stub.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest()).model
        request = verify_pb2.OpenSession(draft=model, **(options | changes))
        return next(stub.Verify(iter([verify_pb2.VerifyRequest(open=request)]), timeout=10.0)).opened


def test_a_session_that_goes_on_has_the_completions_limit_and_round(services: Services) -> None:
    first = opened(services).commit
    second = opened(services, prompt_ids=[*PROMPT, *first.token_ids], generated=1, round=7).commit
    assert second.next_round == 7
    assert second.base_length == len(PROMPT) + 2
    fourth = opened(services, prompt_ids=[*PROMPT, 5, 6, 7], generated=3).commit
    assert fourth.finish_reason == tree_pb2.FINISH_REASON_LENGTH
    assert len(fourth.token_ids) == 1


@pytest.mark.parametrize(
    ("generated", "stop", "reason"),
    [([5, 6, 7, 8], [], tree_pb2.FINISH_REASON_LENGTH), ([5, 6], [6], tree_pb2.FINISH_REASON_STOP)],
)
def test_a_completion_that_was_over(
    services: Services, generated: list[int], stop: list[int], reason: tree_pb2.FinishReason
) -> None:
    """Its last message was lost; the session reports the end without a token and without a forward pass."""
    ids = [*PROMPT, *generated]
    commit = opened(services, prompt_ids=ids, generated=len(generated), stop_token_ids=stop).commit
    assert (list(commit.token_ids), commit.finish_reason, commit.base_length) == ([], reason, len(ids))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"generated": len(PROMPT)}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"prompt_ids": [*PROMPT, *range(5, 10)], "generated": 5}, grpc.StatusCode.OUT_OF_RANGE),
    ],
)
def test_claims_that_cannot_be(services: Services, changes: dict[str, Any], code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        opened(services, **changes)
    assert caught.value.code() is code


def test_a_trace_goes_on_with_its_rounds(services: Services, stub: draft_pb2_grpc.DraftServiceStub) -> None:
    with Client(services.draft_address) as client:
        rounds = [each.round for each in client.generate(PROMPT, max_new_tokens=8, trace=True).trace]
    assert rounds == list(range(len(rounds)))
    resume = draft_pb2.Resume(token_ids=[5, 6], round=3)
    responses = list(stub.Generate(request_for("greedy", resume=resume, trace=True), timeout=30.0))
    traced = [response.trace.round for response in responses if response.HasField("trace")]
    assert traced == list(range(3, 3 + len(traced)))


# The draft service


@dataclass(eq=False)
class Proxied:
    """Services, and the two connections by which the draft service reaches its verify services."""

    services: Services
    ways: list[GrpcProxy]
    client: Client
    loop: ProxyLoop

    def complete(self, name: str, **changes: Any) -> Completion:
        """Complete a prompt with these options."""
        return self.client.generate(PROMPT, **({"max_new_tokens": 12, "ignore_eos": True} | ASKED[name] | changes))

    @cache  # noqa: B019 - several tests compare the same completion; the services live as long as their module
    def undisturbed(self, name: str) -> Completion:
        """Complete a prompt with these options while every message passes."""
        return self.complete(name)

    def mend(self) -> None:
        """Let every message pass, on new streams."""
        for way in self.ways:
            way.hook = forward_all
            self.loop.call(way.cut)


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "gumbel": {"temperature": 0.9, "seed": 5},
    "penalty": {"repetition_penalty": 1.4},
    "counts": {"frequency_penalty": 1.5, "logit_bias": dict.fromkeys(range(50, 54), 9.0)},
    "stop string": {"stop": ["e"], "max_new_tokens": 40},
    "log_probs": {"log_probs": True},
    "prompt_log_probs": {"top_log_probs": 3, "prompt_log_probs": True},
    "two": {"temperature": 0.9, "seed": 5, "n": 2},
}


@pytest.fixture(scope="module", name="proxied")
def proxied_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp("p")
    target = save_random_model(folder / "target", "llama", seed=1)
    draft = save_random_model(folder / "draft", "gpt_neox", seed=2)
    loop = ProxyLoop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        ways: list[GrpcProxy] = []

        def via(address: str) -> str:
            ways.extend(stack.enter_context(loop.proxy(f"unix:{folder}/{name}.sock", address)) for name in "ab")
            return ",".join(way.address for way in ways)

        services = stack.enter_context(running_services(folder, target, draft, via=via, resume_seconds=5.0))
        client = stack.enter_context(Client(services.draft_address, timeout=60.0))
        yield Proxied(services, ways, client, loop)


def flat(top: Iterable[Iterable[tuple[int, float]]]) -> Iterator[float]:
    """Return the numbers of the likeliest tokens at some positions."""
    return (number for place in top for each in place for number in each)


def once(proxied: Proxied, is_request: bool, number: int, act: Callable[[GrpcProxy], Awaitable[None]]) -> list[float]:
    """Call a function when message `number` of a session arrives; return a list that then holds the time."""
    happened: list[float] = []

    def hook_of(way: GrpcProxy) -> Hook:
        async def hook(method: str, is_request_: bool, number_: int, message: bytes) -> None:
            if method == VERIFY and (is_request_, number_) == (is_request, number) and not happened:
                happened.append(time.monotonic())
                await act(way)

        return hook

    for way in proxied.ways:
        way.hook = hook_of(way)
    return happened


async def cut(way: GrpcProxy) -> None:
    """Break the connection, so that the message is lost."""
    way.cut()
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        # before the first commit there is nothing to go on from, whatever was asked
        pytest.param(name, number, marks=() if number or name in ("greedy", "two") else pytest.mark.long)
        for name in ASKED
        for number in range(3)
    ],
)
@pytest.mark.parametrize("is_request", [True, False], ids=["request", "answer"])
def test_a_connection_that_breaks(proxied: Proxied, name: str, is_request: bool, number: int) -> None:
    expected = proxied.undisturbed(name)
    happened = once(proxied, is_request, number, cut)
    try:
        completion = proxied.complete(name)
    finally:
        proxied.mend()
    assert happened
    for one, other in zip((completion, *completion.alternatives), (expected, *expected.alternatives), strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        assert one.log_probs == pytest.approx(other.log_probs)
        assert list(flat(one.top_log_probs)) == pytest.approx(list(flat(other.top_log_probs)))
        assert one.prompt_log_probs == pytest.approx(other.prompt_log_probs)
        assert list(flat(one.prompt_top_log_probs)) == pytest.approx(list(flat(other.prompt_top_log_probs)))
    assert len(completion.prompt_log_probs) == (len(PROMPT) - 1 if name == "prompt_log_probs" else 0)
    resumes = completion.stats.resumes
    assert resumes == (number > 0)  # before the first commit the session had not begun
    assert (completion.stats.resume_seconds > 0) == (resumes > 0)


@pytest.mark.long
def test_a_verify_service_that_hangs(proxied: Proxied) -> None:
    """The service answers neither the tree nor a health check, and its connection stays open."""
    expected = proxied.complete("greedy")

    async def hang(way: GrpcProxy) -> None:
        async def for_ever(*_: object) -> None:
            await asyncio.Event().wait()

        way.hook = for_ever
        await for_ever()

    once(proxied, True, 2, hang)
    started = time.monotonic()
    try:
        completion = proxied.complete("greedy")
    finally:
        proxied.mend()
    assert completion.token_ids == expected.token_ids
    assert completion.stats.resumes == 1
    assert time.monotonic() - started < PATIENCE.least + PATIENCE.health + 2.0


def test_a_verify_service_that_is_slow_is_not_left(proxied: Proxied) -> None:
    """Its response is late, but it answers health checks."""

    async def late(way: GrpcProxy) -> None:
        await asyncio.sleep(PATIENCE.least + 1.0)

    once(proxied, False, 2, late)
    try:
        assert proxied.complete("greedy").stats.resumes == 0
    finally:
        proxied.mend()


@pytest.mark.long
def test_no_verify_service_comes_back(proxied: Proxied) -> None:
    """The error contains all committed tokens."""
    expected = proxied.complete("greedy")

    async def gone(way: GrpcProxy) -> None:
        async def broken(*_: object) -> None:
            for each in proxied.ways:
                each.cut()
            await asyncio.Event().wait()

        for each in proxied.ways:
            each.hook = broken
        await broken()

    once(proxied, True, 2, gone)
    started = time.monotonic()
    try:
        with (
            Client(proxied.services.draft_address, resume=False) as client,
            pytest.raises(ServerUnavailableError) as caught,
        ):
            client.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
    finally:
        proxied.mend()
    assert 5.0 <= time.monotonic() - started < 12.0
    assert caught.value.token_ids
    assert expected.token_ids[: len(caught.value.token_ids)] == caught.value.token_ids
    assert "unix:" not in str(caught.value.details).split(": ", 1)[1]  # no address except the client's own
    _wait_until_ready(proxied)
    assert proxied.complete("greedy").token_ids == expected.token_ids


def _wait_until_ready(proxied: Proxied) -> None:
    until = time.monotonic() + 60.0
    while (reason := healthcheck.failure(proxied.services.draft_address, 1.0)) is not None:
        assert time.monotonic() < until, reason
        time.sleep(0.05)


def test_the_draft_service_is_ready_while_a_verify_service_is(
    proxied: Proxied, caplog: pytest.LogCaptureFixture
) -> None:
    """While none is ready, only the first refused request is logged, since clients try again every second."""
    caplog.set_level(logging.INFO, "dynatree.draft.service")
    address = proxied.services.draft_address
    _wait_until_ready(proxied)  # another test may have left no service ready

    async def for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    for losses in (1, 2):
        for way in proxied.ways:
            way.hook = for_ever
            proxied.loop.call(way.cut)
        wait_until(lambda: healthcheck.failure(address, 60.0) == "NOT_SERVING")
        assert healthcheck.failure(address, 60.0, "liveness") is None
        for _ in range(3):
            with (
                Client(address, resume=False) as client,
                pytest.raises(ServerUnavailableError, match="no verify service"),
            ):
                client.generate(PROMPT, max_new_tokens=2)
        assert [each.getMessage() for each in caplog.records].count("request ended") == losses
        proxied.mend()
        _wait_until_ready(proxied)
        assert proxied.complete("greedy").token_ids


@pytest.mark.long
@compiled
@pytest.mark.parametrize(
    ("others", "own", "numerics"),
    [
        ("auto", "auto", ("torch", "x86 kernels")),
        ("auto", "int8", ("torch", "int8 weights, x86 kernels")),
        ("int8", "auto", ("dequantised int8 weights, torch", "x86 kernels")),
        ("int4", "int4", ("dequantised int4 weights, torch", "int4 and int8 weights, x86 kernels")),
    ],
)
def test_a_completion_does_not_go_on_where_other_kernels_compute(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    others: str,
    own: str,
    numerics: tuple[str, str],
) -> None:
    """Other kernels or weights give other bits, so a token may differ. The error has the tokens so far."""
    target, draft = (save_random_model(tmp_path / name, "llama", seed=1) for name in ("target", "draft"))
    ways: list[GrpcProxy] = []
    with ExitStack() as stack:
        loop = ProxyLoop()
        stack.callback(loop.close)
        with monkeypatch.context() as without_kernels:
            without_kernels.setattr(native, "builds", list)
            native.kernels.cache_clear()
            torchs = stack.enter_context(running_services(tmp_path, target, draft, weights=others))
        native.kernels.cache_clear()

        def via(address: str) -> str:
            ways.append(stack.enter_context(loop.proxy(f"unix:{tmp_path}/way.sock", address)))
            return f"{ways[0].address},{torchs.verify_address}"

        folder = tmp_path / "ours"
        folder.mkdir()
        options: dict[str, Any] = {"weights": own, "via": via, "resume_seconds": 1.0}
        ours = stack.enter_context(running_services(folder, target, draft, **options))
        assert torchs.target.info.numerics.startswith(numerics[0])
        assert ours.target.info.numerics == numerics[1]
        client = stack.enter_context(Client(ours.draft_address, resume=False))
        expected = client.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids
        happened: list[GrpcProxy] = []

        async def hook(method: str, is_request: bool, number: int, message: bytes) -> None:
            if happened or (method, is_request, number) == (VERIFY, True, 2):
                happened.append(ways[0])
                await cut(ways[0])

        def until_one_began_on_the_way() -> None:
            for _ in range(30):
                assert client.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids == expected

        ways[0].hook = hook
        with pytest.raises(ServerUnavailableError, match="is ready, but gives different tokens: ") as caught:
            until_one_began_on_the_way()
        assert "x86 kernels" in caplog.text
        assert caught.value.token_ids == expected[: len(caught.value.token_ids)] != []
