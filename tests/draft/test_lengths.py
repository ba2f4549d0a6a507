"""Tests that a prompt and its completion may fill the target's context, whatever the draft's context and faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from dynatree.client import Client, ContextLengthError
from dynatree.draft.policies import policy_names
from dynatree.draft.target import replicas as replicas_module
from dynatree.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from tests.support.gateways import wait_for
from tests.support.grpc_proxy import GENERATE, VERIFY, GrpcProxy, ProxyLoop
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import Services, running_services

CONTEXT = 40  # of the target
SHORT, LONG = 16, 160  # of the draft
LENGTHS = (SHORT - 2, SHORT - 1, SHORT, SHORT + 1, CONTEXT - 1)
WORD = " the"  # one token
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module", name="models")
def models_fixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with ids that the draft's tokenizer lacks, and an often right draft, both with a chat template."""
    folder = tmp_path_factory.mktemp("m")
    target = save_random_model(folder / "target", "llama", seed=1)
    draft = save_noisy_copy(folder / "draft", target, seed=2)
    for each in (target, draft):
        (each / "chat_template.jinja").write_text(TEMPLATE)
    return target, draft


@pytest.fixture(scope="module", name="pairs")
def pairs_fixture(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Services]]:
    """The pair for each context of the draft: shorter than the target's, equal, and longer."""
    with ExitStack() as stack:
        yield {
            context: stack.enter_context(
                running_services(
                    tmp_path_factory.mktemp("s"), *models, target_context=CONTEXT, draft_context=context, sessions=2
                )
            )
            for context in (SHORT, CONTEXT, LONG)
        }


@pytest.fixture(scope="module", name="clients")
def clients_fixture(pairs: dict[int, Services]) -> Iterator[dict[int, Client]]:
    with ExitStack() as stack:
        yield {context: stack.enter_context(Client(pair.draft_address)) for context, pair in pairs.items()}


def ids(count: int) -> list[int]:
    """Return a prompt of `count` tokens."""
    return random.Random(count).choices(range(300, 2000), k=count)


ENTRIES: dict[str, Callable[[int], Any]] = {
    "ids": ids,
    "text": lambda count: WORD * count,
    "chat": lambda count: [{"role": "user", "content": WORD * count}],
}


@pytest.mark.parametrize(
    ("context", "entry"),
    [
        *((SHORT, entry) for entry in ("ids", "chat")),
        (LONG, "ids"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((SHORT, "text"), (LONG, "text"), (LONG, "chat"))),
    ],
)
def test_the_drafts_context_changes_no_completion(clients: dict[int, Client], context: int, entry: str) -> None:
    """Prompts around both contexts, with and without a length, give the completions of a draft of equal context."""
    asked: dict[str, Any] = {"ignore_eos": True, "policy": "linear"}
    for length in LENGTHS:
        prompt, room = ENTRIES[entry](length), CONTEXT - length
        expected = clients[CONTEXT].generate(prompt, **asked).token_ids
        assert len(expected) == room
        for new_tokens in {None, 1, room}:
            completion = clients[context].generate(prompt, max_new_tokens=new_tokens, **asked)
            assert completion.prompt_tokens == length
            assert completion.token_ids == expected[:new_tokens]
            if len(completion.token_ids) > 2:
                assert bool(completion.stats.draft_n) == (length < context)


@pytest.mark.parametrize("policy", policy_names())
def test_no_policy_minds_the_end_of_the_drafts_context(clients: dict[int, Client], policy: str) -> None:
    for options in ({}, {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3}):
        for length in (SHORT - 4, SHORT + 3):
            asked: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True, "policy": policy, **options}
            completions = [clients[context].generate(ids(length), **asked) for context in (SHORT, CONTEXT)]
            assert completions[0].token_ids == completions[1].token_ids


def test_past_the_drafts_context_nothing_is_kept_for_the_draft(
    pairs: dict[int, Services], clients: dict[int, Client]
) -> None:
    kv_cache = pairs[SHORT].draft.kv_cache
    for length, most in ((SHORT - 1, kv_cache.size), (SHORT, 1), (SHORT + 1, 1)):
        held = kv_cache.free_slots
        with clients[SHORT].stream(ids(length), ignore_eos=True) as stream:
            next(stream)
            assert 0 < held - kv_cache.free_slots <= most
        assert wait_for(lambda free=held: kv_cache.free_slots >= free)


def test_a_draft_with_a_shorter_context_is_named_at_the_start(
    models: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_services(tmp_path, *models, target_context=CONTEXT, draft_context=SHORT):
        assert f"the draft's context of {SHORT} tokens is shorter than the target's of {CONTEXT}" in caplog.text


def test_a_prompt_past_the_drafts_context_is_scored(clients: dict[int, Client]) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 1, "prompt_log_probs": True, "top_log_probs": 2}
    for length in (SHORT + 1, CONTEXT - 1):
        short, whole = (clients[context].generate(ids(length), **asked) for context in (SHORT, CONTEXT))
        assert len(short.prompt_log_probs) == length - 1
        assert short.prompt_log_probs == pytest.approx(whole.prompt_log_probs)


@pytest.mark.parametrize("context", [SHORT, LONG])
def test_one_that_goes_on_past_the_drafts_context(pairs: dict[int, Services], context: int) -> None:
    with grpc.insecure_channel(pairs[context].draft_address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
        for new_tokens in (None, 30):
            asked = draft_pb2.GenerateRequest(
                token_ids=draft_pb2.TokenIds(ids=ids(10)), max_new_tokens=new_tokens, ignore_eos=True
            )
            whole = [token for each in stub.Generate(asked, timeout=30) for token in each.token_ids]
            for received in range(0, len(whole), 7):
                asked.resume.token_ids[:] = whole[:received]
                rest = [token for each in stub.Generate(asked, timeout=30) for token in each.token_ids]
                assert whole[:received] + rest == whole


# Requests that are too long


def too_long(prompt_tokens: int, new_tokens: int | None) -> str:
    asked = 1 if new_tokens is None else new_tokens
    return (
        f"This model's maximum context length is {CONTEXT} tokens. However, you requested {prompt_tokens + asked} "
        f"tokens ({prompt_tokens} in the prompt, {asked} in the completion)."
    )


TOO_LONG = [(CONTEXT, None), (CONTEXT + 1, None), (CONTEXT + 10, 5), (CONTEXT, 1), (CONTEXT - 1, 2), (1, CONTEXT)]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("context", [SHORT, LONG])
def test_what_does_not_fit_the_targets_context_is_refused(clients: dict[int, Client], context: int, entry: str) -> None:
    for length, new_tokens in TOO_LONG:
        # options that other checks refuse do not change the error
        for options in ({}, {"top_log_probs": 99, "policy": "magic", "logit_bias": {9999: 1.0}}):
            asked: dict[str, Any] = {"max_new_tokens": new_tokens, **options}
            with pytest.raises(ContextLengthError) as refused:
                clients[context].generate(ENTRIES[entry](length), **asked)
            assert refused.value.details.startswith(too_long(length, new_tokens))
            assert "The model is target." in refused.value.details
            assert (refused.value.context_length, refused.value.prompt_tokens) == (CONTEXT, length)


@pytest.mark.parametrize("prompt", ["x" * 100_000, [{"role": "user", "content": ""}] * 1000])
def test_what_is_too_long_for_certain_is_not_encoded(clients: dict[int, Client], prompt: Any) -> None:
    words = f"maximum context length is {CONTEXT} tokens. However, you requested at least [0-9]+ tokens"
    for new_tokens in (None, 5):
        with pytest.raises(ContextLengthError, match=words) as refused:
            clients[LONG].generate(prompt, max_new_tokens=new_tokens)
        assert refused.value.prompt_tokens >= CONTEXT


def test_one_that_goes_on_and_does_not_fit(pairs: dict[int, Services]) -> None:
    with grpc.insecure_channel(pairs[SHORT].draft_address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
        for received in (0, 1, CONTEXT, 2 * CONTEXT):
            asked = draft_pb2.GenerateRequest(
                token_ids=draft_pb2.TokenIds(ids=ids(CONTEXT)), resume=draft_pb2.Resume(token_ids=ids(received))
            )
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.Generate(asked, timeout=30))
            assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE  # type: ignore[attr-defined]
            assert refused.value.details().startswith(too_long(CONTEXT, None))  # type: ignore[attr-defined]


def test_the_verify_service_says_the_same(pairs: dict[int, Services]) -> None:
    with grpc.insecure_channel(pairs[SHORT].verify_address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)  # type: ignore[no-untyped-call]
        for length, new_tokens in TOO_LONG:
            opening = verify_pb2.OpenSession(prompt_ids=ids(length), max_new_tokens=new_tokens, top_log_probs=99)
            with pytest.raises(grpc.RpcError) as refused:
                next(stub.Verify(iter([verify_pb2.VerifyRequest(open=opening)]), timeout=30))
            assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE  # type: ignore[attr-defined]
            assert refused.value.details().startswith(too_long(length, new_tokens))  # type: ignore[attr-defined]


# Faults


@contextmanager
def two_contexts(
    folder: Path, models: tuple[Path, Path], contexts: tuple[int, int], *, both: bool
) -> Iterator[list[GrpcProxy]]:
    """Addresses of two draft services, and a way to lose the first one's verify service.

    The first draft service has its own verify service only; the second has `both`, the first one's before its own.
    """
    with ExitStack() as stack:
        loop = ProxyLoop()
        stack.callback(loop.close)
        verifies: list[GrpcProxy] = []
        drafts: list[GrpcProxy] = []
        for name, context in zip("ab", contexts, strict=True):
            (folder / name).mkdir()

            def via(address: str, name: str = name) -> str:
                verifies.append(stack.enter_context(loop.proxy(f"unix:{folder}/v{name}.sock", address)))
                return ",".join(way.address for way in (verifies if both else verifies[-1:]))

            pair = running_services(folder / name, *models, target_context=context, via=via, sessions=2)
            services = stack.enter_context(pair)
            drafts.append(stack.enter_context(loop.proxy(f"unix:{folder}/d{name}.sock", services.draft_address)))
        yield [*drafts, *verifies]


def cut_once(way: GrpcProxy, wanted: str, number: int) -> list[bool]:
    """Lose one response of a call; return a function that tells whether that has happened."""
    happened: list[bool] = []

    async def hook(method: str, is_request: bool, number_: int, message: bytes) -> None:
        if (method, is_request, number_) == (wanted, False, number) and not happened:
            happened.append(True)
            way.cut()
            await asyncio.Event().wait()

    way.hook = hook
    return happened


ASKED: dict[str, Any] = {"ignore_eos": True, "policy": "linear", "policy_settings": {"depth": 2}, "n": 2}


@pytest.mark.parametrize(
    ("lost", "contexts"),
    [
        ("verify", (CONTEXT, 24)),
        ("draft", (24, CONTEXT)),
        pytest.param("verify", (24, CONTEXT), marks=pytest.mark.long),
        pytest.param("draft", (CONTEXT, 24), marks=pytest.mark.long),
    ],
)
def test_a_fault_does_not_change_a_length(
    models: tuple[Path, Path], contexts: tuple[int, int], lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completion ends where it would have ended at its first replica, whether service or client resumes it."""
    monkeypatch.setattr(replicas_module.random, "random", lambda: 0.0)  # choose the first of equal replicas
    monkeypatch.setattr("dynatree.client._base.randrange", lambda count: 0)
    with two_contexts(tmp_path, models, contexts, both=lost == "verify") as (
        first_draft,
        second_draft,
        first_verify,
        _,
    ):
        addresses = [second_draft.address] if lost == "verify" else [first_draft.address, second_draft.address]
        with Client(addresses[0], timeout=30.0) as client:
            whole = client.generate(ids(8), **ASKED)
        assert [len(each.token_ids) for each in (whole, *whole.alternatives)] == [contexts[0] - 8] * 2
        happened = cut_once(first_verify, VERIFY, 3) if lost == "verify" else cut_once(first_draft, GENERATE, 4)
        with Client(",".join(addresses), timeout=30.0) as client:
            completion = client.generate(ids(8), **ASKED)
    assert happened
    assert completion.stats.resumes == 1
    assert (completion.token_ids, completion.finish_reason) == (whole.token_ids, "length")
    if lost == "draft":
        assert [each.token_ids for each in completion.alternatives] == [whole.token_ids]


def test_a_request_goes_to_a_replica_that_has_room_for_it(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas_module.random, "random", lambda: 0.0)  # choose the first of equal replicas
    with (
        two_contexts(tmp_path, models, (24, CONTEXT), both=True) as ways,
        Client(ways[1].address, timeout=30.0) as client,
    ):
        assert client.model_info().target.context_length == CONTEXT
        assert len(client.generate(ids(30), ignore_eos=True).token_ids) == CONTEXT - 30
        assert len(client.generate(ids(8), max_new_tokens=CONTEXT - 8, ignore_eos=True).token_ids) == CONTEXT - 8
        with pytest.raises(ContextLengthError, match=f"length is {CONTEXT} tokens"):
            client.generate(ids(30), max_new_tokens=11)
    assert "is shorter than the target's" not in caplog.text
