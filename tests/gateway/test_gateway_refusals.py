"""Tests the requests that the gateway refuses, and its messages, with `embedded_services`."""

from __future__ import annotations

from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import grpc
import openai
import pytest
import requests

from dynatree.client import InvalidRequestError
from dynatree.gateway.errors import ApiError
from tests.support.gateways import Gateway
from tests.support.gateways import client_fixture as client_fixture
from tests.support.gateways import gateway_fixture as gateway_fixture
from tests.support.gateways import grpc_client_fixture as grpc_client_fixture
from tests.support.gateways import model_fixture as model_fixture

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a field that is not here": ({"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported"),
    "a deep field that is not here": ({"prompt": "a", "stream_options": {"x": 1}}, "stream_options.x", "not supported"),
    "another format": (
        {"prompt": "a", "response_format": {"type": "xml"}},
        "response_format.type",
        "response_format.type xml is not supported",
    ),
    "a frequency": ({"prompt": "a", "frequency_penalty": 2.1}, "frequency_penalty", "less than or equal to 2"),
    "a presence": ({"prompt": "a", "presence_penalty": -3}, "presence_penalty", "greater than or equal to -2"),
    "a type": ({"prompt": "a", "max_tokens": "7"}, "max_tokens", "integer"),
    "a range": ({"prompt": "a", "top_p": -0.1}, "top_p", "greater than or equal to 0"),
    "too many texts": ({"prompt": ["a"] * 129}, "prompt", "at most 128 items"),
    "too many lists of tokens": ({"prompt": [[1]] * 129}, "prompt", "at most 128 items"),
    "a template's variables": (
        {"prompt": "a", "chat_template_kwargs": {"a": 1}},
        "chat_template_kwargs",
        "is not supported",
    ),
    "any length": ({"prompt": "a", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    "llama.cpp's length": ({"prompt": "a", "n_predict": -1}, "n_predict", "not supported; expected max_tokens"),
    "no prompt": ({}, "prompt", "required"),
    "an empty prompt": ({"prompt": []}, "prompt", "at least 1"),
    "a prompt of both": ({"prompt": ["a", 1]}, "prompt.1", "valid string"),
    "no tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens", "without echo"),
    "a temperature above the limit": ({"prompt": "a", "temperature": 500}, "temperature", "or equal to 100"),
    "a seed of more than 64 bits": ({"prompt": "a", "seed": 2**64}, "seed", "less than"),
    "best of more": ({"prompt": "a", "best_of": 3}, "best_of", "best_of differs from n"),
    "a token outside the vocabulary": ({"prompt": [99999]}, "", "vocabulary"),
    "two constraints": (
        {"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]},
        "guided_choice",
        "several fields limit",
    ),
    "an unknown policy": ({"prompt": "a", "policy": "magic"}, "", "magic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_by_name(gateway: Gateway, name: str) -> None:
    body, param, words = REFUSED[name]

    answer = requests.post(f"{gateway.url}/v1/completions", json=body, timeout=60)

    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"] or "") == (400, "invalid_request_error", param)
    assert words in error["message"]


TOO_LONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "ids": ("completions", {"prompt": [7] * 2048}, "prompt"),
    "ids with the usual length": ("completions", {"prompt": [7] * 2040}, "prompt"),
    "ids and a length": ("completions", {"prompt": [7] * 2040, "max_tokens": 9}, "max_tokens"),
    "ids that no length helps": ("completions", {"prompt": [7] * 2048, "max_tokens": 9}, "prompt"),
    "one of several": ("completions", {"prompt": [[7], [7] * 2100]}, "prompt"),
    "text": ("completions", {"prompt": " the" * 2100}, "prompt"),
    "text of megabytes": ("completions", {"prompt": " the" * 500_000, "max_tokens": 3}, "prompt"),
    "scores": ("completions", {"prompt": " the" * 2100, "max_tokens": 0, "echo": True, "logprobs": 0}, "prompt"),
    "a stream": ("completions", {"prompt": " the" * 2100, "stream": True}, "prompt"),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_does_not_fit_the_context_is_told_in_the_words_that_clients_look_for(gateway: Gateway, name: str) -> None:
    path, body, param = TOO_LONG[name]

    answer = requests.post(f"{gateway.url}/v1/{path}", json=body, timeout=60)

    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, you requested ")
    assert "embedded-target" in error["message"]
    assert "max_new_tokens" not in error["message"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "not JSON"),
        (b"[" * 10_000, "not JSON"),
        (b"[" * 20_000, "too many objects and lists"),
        (b"[]", "should be an object"),
        (b'{"prompt": NaN}', "prompt"),
        (b'{"prompt": "\\ud800"}', "not JSON"),
        (b'\xef\xbb\xbf{"prompt": 5}', "prompt"),
        (b'{"prompt": "a", "policy": "fixed", "policy_settings": {"root": "double"}}', "one of committed, single"),
        (b'{"prompt": "a", "policy": "linear", "policy_settings": {"depth": "8"}}', "depth is '8', expected a number"),
        (b'{"prompt": "a", "policy_settings": {"root": "%s"}}' % (b"x" * 65), "at most 64 characters"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(gateway: Gateway, data: bytes, words: str) -> None:
    headers = {"Content-Type": "application/json"}

    answer = requests.post(f"{gateway.url}/v1/completions", data=data, headers=headers, timeout=60)

    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_the_hint_at_a_templates_variables_is_for_chats_alone(gateway: Gateway) -> None:
    answer = requests.post(f"{gateway.url}/v1/completions", json={"prompt": "a", "think": False}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "think is not supported"


def test_what_an_error_quotes_is_cut(gateway: Gateway) -> None:
    for body in ({"prompt": "a", "model": "m" * 10**6}, {"prompt": "a", "m" * 10**6: 1}):
        answer = requests.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 2000


def test_a_body_that_is_not_called_json_is_refused(gateway: Gateway) -> None:
    """Without asking first, a page of another origin can send only text."""
    answer = requests.post(
        f"{gateway.url}/v1/completions", data=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}, timeout=60
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "invalid_content_type")


USER: Any = {"role": "user", "content": "Who are you?"}
DEVELOPER: Any = {"role": "developer", "content": "Be brief."}
CALL: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE: Any = {"type": "image_url", "image_url": {"url": "data:,"}}

CHATS_REFUSED: dict[str, tuple[list[Any], dict[str, Any], str, str]] = {
    "a tool of another type": ([USER], {"tools": [{"type": "web_search"}]}, "tools.0.type", "is not supported"),
    "a tool's name": ([USER], {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name", ""),
    "an effort": ([USER], {"reasoning_effort": "high"}, "reasoning_effort", "is not supported"),
    **{
        f"reasoning by {name} {value!r}": ([USER], {name: value}, name, "expected the chat template's own variable")
        for name, value in [
            *(("reasoning_effort", "none"), ("thinking_budget", 0), ("reasoning_budget", 0), ("reasoning_budget", -1)),
            *(("thinking_token_budget", 0), ("thinking_budget_tokens", 0), ("thinking", False), ("reasoning", False)),
        ]
    },
    "a first token": ([USER], {"add_bos_token": False}, "add_bos_token", "is not supported"),
    "no sampling": ([USER], {"do_sample": False}, "do_sample", "is not supported"),
    "a sound": ([USER], {"modalities": ["text", "audio"]}, "modalities", "is not supported"),
    "the prompt's log-probabilities": ([USER], {"prompt_logprobs": 0}, "prompt_logprobs", "is not supported"),
    "special tokens": ([USER], {"skip_special_tokens": "no"}, "skip_special_tokens", "valid boolean"),
    "a template's variables": ([USER], {"chat_template_kwargs": ["a"]}, "chat_template_kwargs", "valid dictionary"),
    "a call": (
        [USER, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "type": "custom"}]}],
        {},
        "messages.1.tool_calls.0.type",
        "is not supported",
    ),
    "an image": (
        [USER, {"role": "user", "content": [IMAGE]}],
        {},
        "messages.1.content.0.type",
        "image_url is not supp",
    ),
    "a number": ([USER, USER, {"role": "user", "content": 5}], {}, "messages.2.content", "valid string"),
    "no content": ([USER, {"role": "user", "content": None}], {}, "messages.1", "needs content"),
    "a type": ([USER, {**USER, "type": "image"}], {}, "messages.1.type", "image is not supported"),
    "a user's reasoning": ([{**USER, "reasoning_content": "a"}], {}, "messages.0", "'user' cannot have reasoning"),
    "a developer's reasoning": ([{**DEVELOPER, "reasoning": "a"}], {}, "messages.0", "cannot have reasoning"),
    "two reasonings": (
        [USER, {"role": "assistant", "reasoning": "a", "reasoning_content": "b"}],
        {},
        "messages.1",
        "reasoning_content and reasoning differ",
    ),
    "no developer's content": ([{"role": "developer"}], {}, "messages.0", "needs content"),
    "llama.cpp's length": ([USER], {"n_predict": 9}, "n_predict", "is not supported; expected max_tokens"),
    "no tokens": ([USER], {"max_tokens": -2}, "max_tokens", "greater than or equal to 1"),
    "no role": ([USER, {"content": "a"}], {}, "messages.1.role", "required"),
    "no message": ([USER, 5], {}, "messages.1", "should be an object"),
    "no text": ([USER, {"role": "user", "content": [{"type": "text"}]}], {}, "messages.1.content.0.text", "required"),
}


@pytest.mark.parametrize("name", CHATS_REFUSED)
def test_what_would_change_a_chats_answer_is_refused_by_its_full_name(gateway: Gateway, name: str) -> None:
    messages, fields, param, words = CHATS_REFUSED[name]

    answer = requests.post(f"{gateway.url}/v1/chat/completions", json={"messages": messages, **fields}, timeout=60)

    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"].startswith(param)
    assert words in error["message"]


def test_a_field_that_the_service_names_in_a_message_is_the_errors_field() -> None:
    words = "messages.1.tool_calls.0.function.arguments: expected a JSON object, without which the chat template fails"
    for details, param in ((words, words.partition(":")[0]), ("the chat template refuses the messages: a: b", None)):
        error = ApiError.of(InvalidRequestError(grpc.StatusCode.INVALID_ARGUMENT, details))
        assert (error.status, error.param) == (400, param)
        assert details in error.message


def test_a_model_that_is_not_served_is_not_found(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served") as raised:
        client.completions.create(model="gpt-9", prompt="a")
    assert raised.value.code == "model_not_found"
    served = client.models.retrieve(model)
    assert (served.id, (served.model_extra or {})["chat_template"]) == (model, False)  # the bundled pair has none
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_body_has_a_largest_size(gateway: Gateway) -> None:
    """The size may be declared or not."""
    big = b'{"prompt": "' + b"a" * (5 * 2**20) + b'"}'
    headers = {"Content-Type": "application/json"}
    for data in (big, iter([big])):
        answer = requests.post(f"{gateway.url}/v1/completions", data=data, headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/nothing", 404, "GET /v1/nothing: Not Found"),
        ("GET", "/v1/completions", 405, "GET /v1/completions: Method Not Allowed"),
        ("POST", "/v1/responses", 404, "this gateway has /v1/chat/completions, and the client can switch to it (n8n"),
        ("POST", "/v1//responses/", 404, "set_default_openai_api('chat_completions')"),
        ("POST", "/chat/completions", 404, "POST /chat/completions: Not Found; the base URL ends with /v1"),
        ("POST", "/completions/", 404, "the base URL ends with /v1"),
        ("GET", "/models", 404, "the base URL ends with /v1"),
        ("GET", "/v1/models//a//b", 404, "the model '/a//b' is not served"),
    ],
)
def test_there_are_no_other_routes(gateway: Gateway, method: str, path: str, status: int, words: str) -> None:
    answer = requests.request(method, gateway.url + path, timeout=60)

    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


@pytest.mark.parametrize("path", ["/v1//models", "//v1/models", "/v1///models//", "//health", "/v1//models/{model}"])
def test_slashes_of_a_base_url_change_nothing(gateway: Gateway, model: str, path: str) -> None:
    connection = HTTPConnection(urlsplit(gateway.url).netloc, timeout=60)  # which sends the path as it is
    connection.request("GET", path.format(model=model))
    answer = connection.getresponse()

    assert answer.status == 200, answer.read()
    connection.close()
