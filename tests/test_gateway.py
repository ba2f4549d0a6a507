"""The gateway through OpenAI's own client: the tokens are those of the gRPC client, whatever is asked for."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from certificates import Authority
from conftest import EmbeddedServices
from gateways import Gateway, running_gateway
from model_zoo import save_noisy_copy, save_random_model
from openai.types import Completion as OpenAICompletion
from services import running_services
from transformers import AutoTokenizer

from dynatree.cli.main import main
from dynatree.client import Client
from dynatree.common.security import SecuritySettings

PROMPT = "It was a dark night, and the “old” house"
KEY = "not-needed"
OWN = {"return_token_ids": True}  # an extension: the tokens themselves


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


def ids_of(choice: Any) -> list[int]:
    ids = choice.model_extra["token_ids"]
    assert isinstance(ids, list)
    return ids


# Completions

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "sampled": ({"temperature": 0.8, "seed": 7}, {"temperature": 0.8, "seed": 7}),
    "by default": ({"seed": 7}, {"temperature": 1.0, "seed": 7}),
    "a negative seed": ({"seed": -1}, {"temperature": 1.0, "seed": 2**64 - 1}),
    "filters": (
        {"temperature": 1, "top_p": 0.9, "seed": 3, "extra_body": {"top_k": 40, "min_p": 0.02}},
        {"temperature": 1.0, "top_p": 0.9, "seed": 3, "top_k": 40, "min_p": 0.02},
    ),
    "penalty": ({"temperature": 0, "extra_body": {"repetition_penalty": 1.3}}, {"repetition_penalty": 1.3}),
    "bias": ({"temperature": 0, "logit_bias": {"32": 4, "11": -5.5}}, {"logit_bias": {32: 4, 11: -5.5}}),
    "stop": ({"temperature": 0, "stop": "the"}, {"stop": "the"}),
    "stops": ({"temperature": 0, "stop": ["\n", ","]}, {"stop": ["\n", ","]}),
    "policy": (
        {"temperature": 0, "extra_body": {"policy": "linear", "policy_settings": {"depth": 3}, "ignore_eos": True}},
        {"policy": "linear", "policy_settings": {"depth": 3}, "ignore_eos": True},
    ),
    "neutral values": (
        {"temperature": 0, "frequency_penalty": 0, "presence_penalty": 0, "best_of": 1, "user": "somebody"},
        {},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("stream", [False, True])
def test_completions_have_the_grpc_clients_tokens(
    client: openai.OpenAI, grpc_client: Client, model: str, name: str, stream: bool
) -> None:
    options, ours = OPTIONS[name]
    body = options.get("extra_body", {}) | OWN

    answer = completed(client, stream, model=model, prompt=PROMPT, max_tokens=24, **options | {"extra_body": body})

    expected = grpc_client.generate(PROMPT, max_new_tokens=24, **ours)
    assert answer == {0: (expected.text, list(expected.token_ids), expected.finish_reason)}


def completed(client: openai.OpenAI, stream: bool, **options: Any) -> dict[int, tuple[str, list[int], str]]:
    """The text, tokens and finish reason of each choice."""
    if not stream:
        answer = client.completions.create(**options)
        return {each.index: (each.text, ids_of(each), each.finish_reason) for each in answer.choices}
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    for chunk in client.completions.create(stream=True, **options):
        assert isinstance(chunk, OpenAICompletion)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ids.setdefault(choice.index, []).extend((choice.model_extra or {}).get("token_ids", []))
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert texts.keys() == ids.keys() == reasons.keys()
    return {index: (texts[index], ids[index], reasons[index]) for index in texts}


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_their_choices_one_after_another(
    client: openai.OpenAI, grpc_client: Client, model: str, stream: bool
) -> None:
    prompts = ["Call me", "The sea, the sea", "1, 2, 3,"]

    answer = completed(
        client, stream, model=model, prompt=prompts, n=2, temperature=0.9, seed=5, max_tokens=9, extra_body=OWN
    )

    expected = []
    for prompt in prompts:
        first = grpc_client.generate(prompt, n=2, temperature=0.9, seed=5, max_new_tokens=9)
        expected += [first, *first.alternatives]
    assert answer == {
        index: (each.text, list(each.token_ids), each.finish_reason) for index, each in enumerate(expected)
    }


def test_a_seed_gives_one_text_and_another_seed_another(client: openai.OpenAI, model: str) -> None:
    def text(seed: int | None) -> str:
        return client.completions.create(model=model, prompt=PROMPT, max_tokens=24, seed=seed).choices[0].text

    assert text(5) == text(5) != text(6)
    assert text(None) != text(None)


def test_completions_beside_each_other_have_the_tokens_that_they_have_alone(
    client: openai.OpenAI, grpc_client: Client, model: str
) -> None:
    prompts = [f"{number}, {number + 1}, {number + 2}," for number in range(16)]

    def ask(prompt: str) -> str:
        stream = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0, stream=True)
        return "".join(choice.text for chunk in stream for choice in chunk.choices)

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ask, prompts))
    assert answers == [grpc_client.generate(prompt, max_new_tokens=12).text for prompt in prompts]


@pytest.mark.parametrize("several", [False, True])
def test_prompts_may_be_token_ids(client: openai.OpenAI, grpc_client: Client, model: str, several: bool) -> None:
    prompt = [279, 318, 257, 11]

    answer = completed(
        client, False, model=model, prompt=[prompt, prompt] if several else prompt, temperature=0, extra_body=OWN
    )

    expected = grpc_client.generate(prompt, max_new_tokens=16)  # OpenAI's own default
    one = (expected.text, list(expected.token_ids), expected.finish_reason)
    assert answer == ({0: one, 1: one} if several else {0: one})


def test_log_probs_are_the_grpc_clients(client: openai.OpenAI, grpc_client: Client, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3, extra_body=OWN
    )

    expected = grpc_client.generate(PROMPT, max_new_tokens=8, top_log_probs=3)
    log_probs = answer.choices[0].logprobs
    assert log_probs is not None
    assert log_probs.token_logprobs == list(expected.log_probs)
    assert "".join(log_probs.tokens or ()) == expected.text
    assert log_probs.text_offset == [len("".join((log_probs.tokens or [])[:place])) for place in range(8)]
    tops = [sorted(top.values(), reverse=True) for top in log_probs.top_logprobs or ()]
    for top, theirs in zip(tops, expected.top_log_probs, strict=True):
        assert top[:3] == [value for _, value in theirs]


def test_echo_scores_the_prompt(client: openai.OpenAI, grpc_client: Client, model: str) -> None:
    """As evaluation harnesses ask for it: the prompt's own log-probabilities, with or without a token behind it."""
    expected = grpc_client.generate(PROMPT, max_new_tokens=1, prompt_log_probs=True, top_log_probs=1)
    ids = list(expected.prompt_ids)
    for max_tokens, scored in ((0, ()), (1, expected.log_probs)):
        answer = client.completions.create(
            model=model, prompt=ids, max_tokens=max_tokens, temperature=0, logprobs=1, echo=True, extra_body=OWN
        )

        choice = answer.choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, *expected.prompt_log_probs, *scored]
        assert choice.text == PROMPT + (expected.text if max_tokens else "")
        assert ids_of(choice) == ids + (list(expected.token_ids) if max_tokens else [])
        assert answer.usage is not None
        assert answer.usage.completion_tokens == max_tokens
        for top, likeliest in zip(
            (choice.logprobs.top_logprobs or [])[1:], expected.prompt_top_log_probs, strict=False
        ):
            assert max(top.values()) == likeliest[0][1]


def test_a_stream_echoes_once_and_tells_log_probs_as_they_come(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**options, echo=True).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**options, echo=True, stream=True)]

    assert whole.logprobs is not None
    told = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in told for each in getattr(part, name)] == getattr(whole.logprobs, name)
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_usage_tells_what_speculation_was_worth(client: openai.OpenAI, grpc_client: Client, model: str) -> None:
    options: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    usage = client.completions.create(**options).usage
    *chunks, last = client.completions.create(**options, stream=True, stream_options={"include_usage": True})

    expected = grpc_client.generate(PROMPT, max_new_tokens=32)
    assert last.choices == []
    assert all(chunk.usage is None for chunk in chunks)
    for each in (usage, last.usage):
        assert each is not None
        assert (each.prompt_tokens, each.completion_tokens) == (expected.prompt_tokens, 32)
        assert each.total_tokens == expected.prompt_tokens + 32
        speculation = (each.model_extra or {})["speculative_decoding"]
        assert speculation["rounds"] * speculation["mean_acceptance_length"] == pytest.approx(31)
        assert 0 <= speculation["acceptance_rate"] <= 1


def test_a_stream_tells_its_rounds(gateway: Gateway, grpc_client: Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "stream": True, "trace": True}
    lines = requests.post(f"{gateway.url}/v1/completions", json=body, timeout=60).text.splitlines()

    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    rounds = [choice["trace"] for choice in choices if "trace" in choice]
    expected = grpc_client.generate(PROMPT, max_new_tokens=16, trace=True)
    committed = [token for round_ in rounds for token in round_["committed_ids"]]
    assert committed == list(expected.token_ids[1:])
    assert all(choice["text"] == "" for choice in choices if "trace" in choice)


# Chats

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who <|endoftext|> are you?"}]


@pytest.fixture(scope="module", name="chatty")
def chatty_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[openai.OpenAI, Client, Path]]:
    """A pair whose tokenizer has a chat template, a gateway before it, and clients of both."""
    folder = tmp_path_factory.mktemp("chat")
    target = save_random_model(folder / "target", "llama", seed=3)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    draft = save_noisy_copy(folder / "draft", target, seed=4)
    with (
        running_services(folder, target, draft) as services,
        running_gateway(services.draft_address) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client,
        Client(services.draft_address) as grpc_client,
    ):
        yield client, grpc_client, target


@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_completed_by_their_template(chatty: tuple[openai.OpenAI, Client, Path], stream: bool) -> None:
    client, grpc_client, target = chatty
    options: dict[str, Any] = {"model": "target", "messages": CHAT, "max_completion_tokens": 12, "n": 2, "seed": 4}

    text = AutoTokenizer.from_pretrained(target).apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    first = grpc_client.generate(text, max_new_tokens=12, n=2, temperature=1.0, seed=4)
    expected = {each.index: (each.text, each.finish_reason) for each in (first, *first.alternatives)}
    if not stream:
        answer = client.chat.completions.create(**options)
        assert {each.index: (each.message.content, each.finish_reason) for each in answer.choices} == expected
        assert {each.message.role for each in answer.choices} == {"assistant"}
        return
    texts = {0: "", 1: ""}
    reasons: dict[int, str] = {}
    roles: list[str | None] = []
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert {index: (texts[index], reasons[index]) for index in texts} == expected
    assert roles == ["assistant", "assistant"]


def test_chats_have_log_probs(chatty: tuple[openai.OpenAI, Client, Path]) -> None:
    client, grpc_client, _ = chatty

    answer = client.chat.completions.create(
        model="target", messages=CHAT, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )

    expected = grpc_client.generate(CHAT, max_new_tokens=6, top_log_probs=2)
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert [each.logprob for each in content] == list(expected.log_probs)
    assert b"".join(bytes(each.bytes or ()) for each in content).decode(errors="replace") == expected.text
    assert [[top.logprob for top in each.top_logprobs] for each in content] == [
        [value for _, value in likeliest] for likeliest in expected.top_log_probs
    ]


def test_parts_of_text_are_one_message(chatty: tuple[openai.OpenAI, Client, Path]) -> None:
    client, _, _ = chatty
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "is it?"}]}]
    whole: Any = [{"role": "user", "content": "Who is it?"}]

    answers = [
        client.chat.completions.create(model="target", messages=messages, max_tokens=8, temperature=0)
        for messages in (parts, whole)
    ]

    assert answers[0].choices == answers[1].choices


def test_a_tokenizer_without_a_template_has_no_chats(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model=model, messages=CHAT)


# What is refused

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a field that is not here": ({"prompt": "a", "tools": []}, "tools", "tools is not supported"),
    "a value that is not here": ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty", "less than or equal"),
    "a type": ({"prompt": "a", "max_tokens": "7"}, "max_tokens", "integer"),
    "a range": ({"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
    "no prompt": ({}, "prompt", "required"),
    "an empty prompt": ({"prompt": []}, "prompt", "at least 1"),
    "a prompt of both": ({"prompt": ["a", 1]}, "prompt", "valid"),
    "no tokens": ({"prompt": "a", "max_tokens": 0}, "", "needs echo"),
    "a temperature above the limit": ({"prompt": "a", "temperature": 500}, "temperature", "or equal to 100"),
    "a seed of more than 64 bits": ({"prompt": "a", "seed": 2**64}, "seed", "less than"),
    "best of more": ({"prompt": "a", "best_of": 3}, "", "best_of is not n"),
    "a token outside the vocabulary": ({"prompt": [99999]}, "", "vocabulary"),
    "a prompt past the context": ({"prompt": [7] * 2100}, "", "at most 2048 fit"),
    "an unknown policy": ({"prompt": "a", "policy": "magic"}, "", "magic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_by_name(gateway: Gateway, name: str) -> None:
    body, param, words = REFUSED[name]

    answer = requests.post(f"{gateway.url}/v1/completions", json=body, timeout=60)

    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"] or "") == (400, "invalid_request_error", param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "not JSON"),
        (b"[" * 20_000, "not JSON"),
        (b"[]", "should be an object"),
        (b'{"prompt": NaN}', "prompt"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(gateway: Gateway, data: bytes, words: str) -> None:
    headers = {"Content-Type": "application/json"}

    answer = requests.post(f"{gateway.url}/v1/completions", data=data, headers=headers, timeout=60)

    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("start", "item", "end"),
    [
        (b'{"messages": [{"role": "user", "content": [', b"{}", b"]}]}"),
        (b'{"messages": [', b"{}", b"]}"),
        (b'{"prompt": [', b"-1", b"]}"),
        (b'{"prompt": [', b'""', b"]}"),
        (b'{"prompt": "a", "policy_settings": {"a": [', b'""', b"]}}"),
    ],
)
def test_a_body_that_is_wrong_in_a_million_places_is_refused_at_once(
    gateway: Gateway, start: bytes, item: bytes, end: bytes
) -> None:
    """Checking all of them took 10 s, in which every stream stood still."""
    body = start + b",".join([item] * (3 * 2**20 // (len(item) + 1))) + end
    route = "chat/completions" if b"messages" in start else "completions"
    began = time.monotonic()

    answer = requests.post(
        f"{gateway.url}/v1/{route}", data=body, headers={"Content-Type": "application/json"}, timeout=60
    )

    assert answer.status_code == 400
    assert time.monotonic() - began < 2.0
    assert len(answer.content) < 5000


def test_what_an_error_quotes_is_cut(gateway: Gateway) -> None:
    for body in ({"prompt": "a", "model": "m" * 10**6}, {"prompt": "a", "m" * 10**6: 1}):
        answer = requests.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 2000


def test_a_body_that_is_not_called_json_is_refused(gateway: Gateway) -> None:
    """A page of another origin can send text without asking first, and nothing else."""
    answer = requests.post(
        f"{gateway.url}/v1/completions", data=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}, timeout=60
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "invalid_content_type")


def test_null_is_as_good_as_nothing(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="a", max_tokens=2, stop=None, extra_body={"tools": None, "suffix": None}
    )

    assert len(answer.choices) == 1


def test_a_model_that_is_not_served_is_not_found(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served") as raised:
        client.completions.create(model="gpt-9", prompt="a")
    assert raised.value.code == "model_not_found"
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_body_has_a_largest_size(gateway: Gateway) -> None:
    """Declared or not."""
    big = b'{"prompt": "' + b"a" * (5 * 2**20) + b'"}'
    headers = {"Content-Type": "application/json"}
    for data in (big, iter([big])):
        answer = requests.post(f"{gateway.url}/v1/completions", data=data, headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)])
def test_there_are_no_other_routes(gateway: Gateway, method: str, path: str, status: int) -> None:
    answer = requests.request(method, gateway.url + path, timeout=60)

    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


# Keys, faults, and clients that go


def test_keys_are_the_draft_services_tokens(tmp_path: Path) -> None:
    """Who shows none is not even told what is served."""
    target = save_random_model(tmp_path / "target", "gpt2", seed=1)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=2)
    tokens = tmp_path / "tokens"
    tokens.write_text("anna:sesame-1234567890\n")
    security = SecuritySettings(tokens=tokens)
    with (
        running_services(tmp_path, target, draft, security=security) as services,
        running_gateway(services.draft_address) as gateway,
    ):
        url = f"{gateway.url}/v1"
        with openai.OpenAI(base_url=url, api_key="sesame-1234567890", max_retries=0) as known:
            assert known.models.list().data[0].id == "target"
            assert known.completions.create(model="target", prompt="a", max_tokens=2).choices
        for key in ("wrong", "no key"):
            with (
                openai.OpenAI(base_url=url, api_key=key, max_retries=0) as unknown,
                pytest.raises(openai.AuthenticationError),
            ):
                unknown.completions.create(model="target", prompt="a", max_tokens=2)
        for path, send in (
            ("models", {}),
            ("completions", {"json": {"prompt": "a", "logprobs": 1}}),
            (
                "completions",
                {"json": {"prompt": "a", "model": "guessed"}},
            ),
        ):
            answer = requests.request("POST" if send else "GET", f"{url}/{path}", timeout=60, **send)
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("shown", ["", "Bearer ", "Basic dTpw"])
def test_what_is_no_key_is_as_good_as_none(gateway: Gateway, shown: str) -> None:
    """lm-eval shows an empty key when it was given none."""
    headers = {"Authorization": shown}
    answer = requests.post(f"{gateway.url}/v1/completions", json={"prompt": "a"}, headers=headers, timeout=60)
    assert answer.status_code == 200


def test_a_gateway_without_services_says_so_and_names_no_address(tmp_path: Path) -> None:
    with running_gateway(f"unix:{tmp_path}/nobody.sock", "--timeout", "1") as gateway:
        health = requests.get(f"{gateway.url}/health", timeout=60)
        answer = requests.post(f"{gateway.url}/v1/completions", json={"prompt": "a"}, timeout=60)

        for each in (health, answer):
            assert each.status_code == 503
            assert each.json()["error"]["code"] == "service_unavailable"
            assert "nobody.sock" not in each.text


def test_health_and_metrics(gateway: Gateway) -> None:
    assert requests.get(f"{gateway.url}/health", timeout=60).json() == {"status": "ok"}
    requests.get(f"{gateway.url}/v1/models", timeout=60)
    figures = requests.get(f"{gateway.url}/metrics", timeout=60).text
    assert 'dynatree_gateway_requests_total{code="200",route="/v1/models"}' in figures


def test_answers_name_their_requests(gateway: Gateway) -> None:
    """With the caller's own name, where it is one; the services' logs have it too."""
    url = f"{gateway.url}/v1/models"
    for shown, told in (("mine-1", "mine-1"), ("no name; at all", None)):
        name = requests.get(url, headers={"X-Request-Id": shown}, timeout=60).headers["X-Request-Id"]
        assert name == told or (told is None and len(name) == 32)
    assert wait_for(lambda: "request_id=mine-1" in gateway.log)


def test_pages_of_other_origins_may_call_only_where_they_are_named(
    gateway: Gateway, embedded_services: EmbeddedServices
) -> None:
    headers = {"Origin": "https://example.org"}
    assert (
        "Access-Control-Allow-Origin" not in requests.get(f"{gateway.url}/health", headers=headers, timeout=60).headers
    )
    with running_gateway(embedded_services.draft_address, "--cors", "https://example.org") as open_gateway:
        answer = requests.get(f"{open_gateway.url}/health", headers=headers, timeout=60)
        assert answer.headers["Access-Control-Allow-Origin"] == "https://example.org"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_completion(tmp_path: Path, stream: bool) -> None:
    target = save_random_model(tmp_path / "target", "gpt2", seed=1)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=2)
    with (
        running_services(tmp_path, target, draft, prefix_cache=False) as services,
        running_gateway(services.draft_address) as gateway,
    ):
        host, port = gateway.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "a", "max_tokens": 150, "n": 64, "ignore_eos": True, "stream": stream})
        with socket.create_connection((host, int(port))) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert wait_for(lambda: not services.idle)
        assert wait_for(lambda: services.idle)
        figures = requests.get(f"{gateway.url}/metrics", timeout=60).text
        assert "dynatree_gateway_num_requests_running 1.0" in figures  # the one that asks


def test_a_client_that_leaves_in_the_midst_of_its_body_is_no_failure(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}X-Request-Id: leaver\r\nContent-Length: 1000\r\n\r\nhalf".encode())
        time.sleep(0.2)
    assert wait_for(lambda: "request_id=leaver route=/v1/completions status=499" in gateway.log)
    assert "Traceback" not in gateway.log


def test_a_length_that_is_too_large_is_refused_before_the_body(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 1000000000\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_stop_tells_the_requests_that_it_cuts(embedded_services: EmbeddedServices) -> None:
    body = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "policy": "autoregressive", "temperature": 1, "n": 9}
    with running_gateway(embedded_services.draft_address, "--grace", "1") as gateway:
        url = f"{gateway.url}/v1/completions"
        with ThreadPoolExecutor(1) as threads:
            whole = threads.submit(requests.post, url, json=body, timeout=60)
            with requests.post(url, json=body | {"stream": True}, stream=True, timeout=60) as answer:
                lines = answer.iter_lines()
                next(lines)
                gateway.process.terminate()
                *_, last = [line for line in lines if line]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "service_unavailable"
            assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "service_unavailable")
        gateway.process.wait(20)
    assert "Traceback" not in gateway.log


def test_a_file_that_is_no_socket_stays(embedded_services: EmbeddedServices, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    assert main(["gateway", "--server", embedded_services.draft_address, "--listen", f"unix:{precious}"]) == 1
    assert precious.read_text() == "data"


def test_a_certificate_that_is_not_its_keys_changes_nothing(
    embedded_services: EmbeddedServices, tmp_path: Path
) -> None:
    """A rotation by two renames passes through such a pair."""
    authority = Authority(tmp_path)
    first, second = authority.pair("first"), authority.pair("second")
    live, key = tmp_path / "live.pem", tmp_path / "live.key"
    shutil.copy(first.certificate, live)
    shutil.copy(first.key, key)
    tls = ("--tls-cert", str(live), "--tls-key", str(key))
    with running_gateway(embedded_services.draft_address, *tls) as gateway:

        def shown() -> str:
            host, port = gateway.url.removeprefix("https://").split(":")
            return ssl.get_server_certificate((host, int(port)), timeout=10)

        before = shown()
        shutil.copy(second.certificate, live)
        assert wait_for(lambda: "cannot be read anew" in gateway.log)
        assert shown() == before
        shutil.copy(second.key, key)
        assert wait_for(lambda: shown() != before)


def wait_for(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(0.02)
    return held


def test_a_connection_without_encryption_needs_a_word() -> None:
    for arguments in (
        ["--listen", "0.0.0.0:0"],
        ["--server", "192.0.2.1:50051"],
    ):
        assert main(["gateway", *arguments]) == 1


def test_the_description_is_openapi(gateway: Gateway) -> None:
    description = requests.get(f"{gateway.url}/openapi.json", timeout=60).json()

    assert description["openapi"].startswith("3.")
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics"} <= description[
        "paths"
    ].keys()
