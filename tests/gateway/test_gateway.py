"""Tests the gateway through OpenAI's own client: for all options, the tokens are those of the gRPC client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import requests
from openai.types import Completion as OpenAICompletion

from dynatree.client import Client
from tests.support.gateways import Gateway
from tests.support.gateways import client_fixture as client_fixture
from tests.support.gateways import gateway_fixture as gateway_fixture
from tests.support.gateways import grpc_client_fixture as grpc_client_fixture
from tests.support.gateways import model_fixture as model_fixture

PROMPT = "It was a dark night, and the “old” house"
OWN = {"return_token_ids": True}  # an extension that returns token ids


def ids_of(choice: Any) -> list[int]:
    ids = choice.model_extra["token_ids"]
    assert isinstance(ids, list)
    return ids


# Completions

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "sampled": ({"temperature": 0.8, "seed": 7}, {"temperature": 0.8, "seed": 7}),
    "by default": ({"seed": 7}, {"temperature": 1.0, "seed": 7}),
    "a negative seed": ({"seed": -2}, {"temperature": 1.0, "seed": 2**64 - 2}),
    "filters": (
        {"temperature": 1, "top_p": 0.9, "seed": 3, "extra_body": {"top_k": 40, "min_p": 0.02}},
        {"temperature": 1.0, "top_p": 0.9, "seed": 3, "top_k": 40, "min_p": 0.02},
    ),
    "penalty": ({"temperature": 0, "extra_body": {"repetition_penalty": 1.3}}, {"repetition_penalty": 1.3}),
    "counts": ({"temperature": 0, "frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    "presence": ({"temperature": 0, "presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    "bias": ({"temperature": 0, "logit_bias": {"32": 4, "11": -5.5}}, {"logit_bias": {32: 4, 11: -5.5}}),
    "stop": ({"temperature": 0, "stop": "the"}, {"stop": "the"}),
    "stops": ({"temperature": 0, "stop": ["\n", ","]}, {"stop": ["\n", ","]}),
    "policy": (
        {"temperature": 0, "extra_body": {"policy": "linear", "policy_settings": {"depth": 3}, "ignore_eos": True}},
        {"policy": "linear", "policy_settings": {"depth": 3}, "ignore_eos": True},
    ),
    "words": (
        {"temperature": 0, "extra_body": {"policy": "fixed", "policy_settings": {"root": "single", "depth": 3}}},
        {"policy": "fixed", "policy_settings": {"root": "single", "depth": 3}},
    ),
    "neutral values": (
        {"temperature": 0, "frequency_penalty": 0, "presence_penalty": 0, "best_of": 1, "user": "somebody"},
        {},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_completions_have_the_grpc_clients_tokens(
    client: openai.OpenAI, grpc_client: Client, model: str, name: str
) -> None:
    options, ours = OPTIONS[name]
    options = {"model": model, "prompt": PROMPT, "max_tokens": 24, **options}
    options["extra_body"] = options.get("extra_body", {}) | OWN

    answers = [completed(client, stream, **options) for stream in (False, True)]

    expected = grpc_client.generate(PROMPT, max_new_tokens=24, **ours)
    assert answers == [{0: (expected.text, list(expected.token_ids), expected.finish_reason)}] * 2


def completed(client: openai.OpenAI, stream: bool, **options: Any) -> dict[int, tuple[str, list[int], str]]:
    """Return the text, tokens and finish reason of each choice."""
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
    for none in (None, -1):
        assert text(none) != text(none)


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
    """Evaluation harnesses request the prompt's own log-probabilities, with or without a generated token."""
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


def test_a_prompt_that_is_scored_alone_ends_by_its_length(client: openai.OpenAI, model: str) -> None:
    """The token that is generated and left out may be one at which a completion stops."""
    options: dict[str, Any] = {"model": model, "prompt": PROMPT, "temperature": 0, "extra_body": OWN}
    [token] = ids_of(client.completions.create(**options, max_tokens=1).choices[0])
    options |= {"max_tokens": 0, "echo": True, "extra_body": OWN | {"stop_token_ids": [token]}}
    for stream in (False, True):
        [(text, _, reason)] = completed(client, stream, **options).values()
        assert (text, reason) == (PROMPT, "length")


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "max_tokens": 0}, {"guided_regex": ""}])
def test_a_stream_tells_each_prompts_tokens_once(gateway: Gateway, more: dict[str, Any]) -> None:
    prompts = [[279, 318, 257, 11], [11, 257]]
    body = {"prompt": prompts, "n": 2, "max_tokens": 3, "stream": True, **OWN, **more}
    text = requests.post(f"{gateway.url}/v1/completions", json=body, timeout=60).text

    told: dict[int, list[Any]] = {}
    for line in text.splitlines():
        if line.startswith("data: {"):
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            told.setdefault(choice["index"], []).append(choice.get("prompt_token_ids"))
    assert [told[index][0] for index in range(4)] == [prompts[0], None, prompts[1], None]
    assert {str(later) for each in told.values() for later in each[1:]} == {"None"}


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


@pytest.mark.parametrize("running", [None, False, True])
def test_every_chunk_has_the_usage_that_is_asked_for(gateway: Gateway, running: bool | None) -> None:
    """It is null before the last chunk, as in OpenAI's API, or the number of tokens so far."""
    options = {"include_usage": True, "continuous_usage_stats": running}
    body = {"prompt": [PROMPT, "a"], "max_tokens": 16, "stream": True, "stream_options": options}
    lines = requests.post(f"{gateway.url}/v1/completions", json=body, timeout=60).text.splitlines()

    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    *usages, last = [event["usage"] for event in events]
    if not running:
        assert set(map(str, usages)) == {"None"}
        return
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[-1] == last["completion_tokens"] == 32
    assert usages[-1].items() <= last.items()


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


def test_a_tokenizer_without_a_template_has_no_chats(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Who are you?"}])
