"""Tests the cost of bodies and answers for the gateway: event loop time and memory."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import reduce
from operator import getitem
from typing import Any

import pytest
import requests
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from dynatree.gateway.answers import TextAnswer
from dynatree.gateway.bodies import read_body
from dynatree.gateway.counts import Counts
from dynatree.gateway.encoding import SLICE, encoded
from dynatree.gateway.errors import ApiError
from dynatree.gateway.limits import Limits
from dynatree.gateway.memory import check_answer
from dynatree.gateway.open_requests import OpenRequests
from dynatree.gateway.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.support.gateways import Gateway
from tests.support.gateways import gateway_fixture as gateway_fixture
from tests.support.processes import EmbeddedServices

STEP_SECONDS = 0.05  # CPU seconds that the event loop may spend on a body at once
BODY_SECONDS = 1.0  # CPU seconds that a body may take altogether
MODELS = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)

# A body repeats an item up to the size limit: the text before it, the item, the text after it. `%d` is a new number.
ITEMS = {
    "unknown names": ("{", '"%d":1', "}"),
    "unknown names that say nothing": ("{", '"%d":null', "}"),
    "names twice": ("{", '"prompt":"a"', "}"),
    "names of one letter": ("{", '"a":[]', "}"),
    "empty lists": ("[", "[]", "]"),
    "empty objects": ("[", "{}", "]"),
    "empty texts": ('{"prompt":[', '""', "]}"),
    "prompts": ('{"prompt":[', '"%d"', "]}"),
    "prompts of ids": ('{"prompt":[', "[%d]", "]}"),
    "ids": ('{"prompt":[', "7", '],"stop":5}'),
    "ids that are none": ('{"prompt":[', "-1", "]}"),
    "large ids": ('{"tokens":[', "4294967295", '],"model":5}'),
    "fractions": ('{"prompt":[', "1e9", "]}"),
    "true": ('{"prompt":[', "true", "]}"),
    "null": ('{"tools":[', "null", "]}"),
    "messages": ('{"messages":[', "{}", "]}"),
    "messages with text": ('{"messages":[', '{"role":"user","content":""}', "]}"),
    "parts": ('{"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}"),
    "parts of other kinds": ('{"messages":[{"role":"user","content":[', '{"type":"image"}', "]}]}"),
    "parts in messages": (
        '{"messages":[',
        '{"role":"user","content":[' + ",".join(['{"type":"text","text":""}'] * 40) + "]}",
        "]}",
    ),
    "labels": ('{"messages":[{"role":"user","content":"a","metadata":{', '"%d":{}', "}}]}"),
    "deep nothing": ('{"x":{"y":{', '"%d":""', "}}}"),
    "stops": ('{"prompt":"a","stop":[', '"%d"', "]}"),
    "stop tokens": ('{"prompt":"a","stop_token_ids":[', "%d", "]}"),
    "biases": ('{"prompt":"a","logit_bias":{', '"%d":1', "}}"),
    "biases of no tokens": ('{"prompt":"a","logit_bias":{', '"x%d":"a"', "}}"),
    "settings": ('{"prompt":"a","policy_settings":{', '"%d":[]', "}}"),
    "a setting": ('{"prompt":"a","policy_settings":{"a":[', '""', "]}}"),
    "tools": ('{"messages":[],"tools":[', '{"type":"function","function":{"name":"f%d"}}', "]}"),
    "a scheme": ('{"prompt":"a","scheme":[', "[]", "]}"),
    "a format": ('{"prompt":"a","response_format":{"type":[', "%d", "]}}"),
    "commas in a text": ('{"prompt":"', ",", '","stop":5}'),
    "quotes in a text": ('{"prompt":"', '\\"', '","stop":5}'),
    "backslashes in a text": ('{"prompt":"', "\\\\", '","stop":5}'),
    "escapes": ('{"prompt":"', "\\u00e9", '","stop":5}'),
    "escapes of pairs": ('{"prompt":"', "\\ud83d\\ude00", '","stop":5}'),
    "half escapes": ('{"prompt":"', "\\ud800", '","stop":5}'),
    "letters of three bytes": ('{"prompt":"', "\u20ac", '","stop":5}'),
    "a long name": ('{"', "a", '":1}'),
    "a long role": ('{"messages":[{"role":"', "a", '","content":null}]}'),
    "a long number": ('{"seed":', "1", "}"),
    "a long fraction": ('{"temperature":0.', "1", "}"),
    "a long exponent": ('{"temperature":1e', "1", "}"),
    "a long user": ('{"prompt":5,"user":"', "\u20ac", '"}'),
    "blanks before deep lists": ("{", "\n", '"a":' + "[" * 300),
    "letters before deep lists": ('{"prompt":"', "a", '","a":' + "[" * 300),
    "values before deep lists": ('{"prompt":[', '""', '],"a":' + "[" * 300),
    "open lists": ("", "[", ""),
    "open objects": ("", '{"a":', ""),
    "open texts": ("", '"', ""),
    "blanks": ("", " ", ""),
    "no JSON": ("", "x", ""),
}
TEXTS = ("text", "escape", "quotes", "backslashes", "letters", "long", "open", "blanks", "no JSON", "half")


def body_of(name: str, size: int) -> bytes:
    """Return a body of this kind with the largest allowed size."""
    start, item, end = ITEMS[name]
    between = "" if any(word in name for word in TEXTS) and "texts" not in name.replace("open texts", "") else ","
    room = size - len(start.encode()) - len(end.encode())
    if "%d" not in item:
        return (start + between.join([item] * (room // len((item + between).encode()))) + end).encode()
    length, items = 0, []
    while (length := length + len(item) + len(between) - 2 + len(str(len(items)))) < room:
        items.append(item % len(items))
    return (start + between.join(items) + end).encode()


@pytest.fixture
def _uncollected() -> Iterator[None]:
    """Keep the garbage of other tests from being collected during a measurement."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("name", ITEMS)
def test_no_body_holds_up_the_event_loop(name: str) -> None:
    limits = Limits()
    body = body_of(name, limits.body_bytes)
    assert len(body) > 0.99 * limits.body_bytes

    for model in MODELS:
        error, step, whole = asyncio.run(_read(body, model, limits))

        assert 400 <= error.status < 500
        assert len(json.dumps(error.body())) < 5000
        assert step < STEP_SECONDS, f"{step} s of CPU at once for {model.__name__}"
        assert whole < BODY_SECONDS, f"{whole} s of CPU for {model.__name__}"


@pytest.mark.parametrize(
    ("body", "model", "path"),
    [
        ({"prompt": "a"}, CompletionRequest, ()),
        ({"messages": [{"role": "user", "content": "a"}]}, ChatRequest, ("messages", 0)),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            ChatRequest,
            ("messages", 0, "content", 0),
        ),
    ],
)
def test_of_unknown_names_one_is_an_error(body: Any, model: type[BaseModel], path: tuple[Any, ...]) -> None:
    reduce(getitem, path, body).update({f"x{number}": number for number in range(1, 1000)})
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    assert len(raised.value.errors()) < 4  # this error, and those of the other types of content
    assert ApiError.of_body(raised.value, body).param == ".".join(map(str, (*path, "x1")))


SIZED: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "prompts": (128, lambda count: {"prompt": ["a"] * count}),
    "prompts of ids": (128, lambda count: {"prompt": [[7]] * count}),
    "stop tokens": (1024, lambda count: {"prompt": "a", "stop_token_ids": [7] * count}),
    "messages": (4096, lambda count: {"messages": [{"role": "user", "content": "a"}] * count}),
    "parts": (
        1024,
        lambda count: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * count}]},
    ),
}


@pytest.mark.parametrize("name", SIZED)
def test_lists_have_a_longest(name: str) -> None:
    most, body = SIZED[name]
    model = ChatRequest if "messages" in body(1) else CompletionRequest
    model.model_validate(body(most))
    with pytest.raises(ValidationError, match=f"at most {most} items"):
        model.model_validate(body(most + 1))


@pytest.mark.parametrize("field", ["logit_bias", "policy_settings"])
def test_an_object_with_too_many_fields_is_one_error(field: str) -> None:
    fields = {f"x{number}": {} for number in range(1025)}  # each wrong
    with pytest.raises(ValidationError, match="has 1025 fields; at most 1024") as raised:
        CompletionRequest.model_validate({"prompt": "a", field: fields})
    assert raised.value.error_count() == 1


def test_the_name_of_a_user_is_hashed_where_it_is_longer_than_a_principal() -> None:
    principals = [CompletionRequest(prompt="a", user="u" * length).principal for length in (256, 257)]
    assert [len(each) for each in principals] == [256, 64]


async def _read(body: bytes, model: type[Any], limits: Limits) -> tuple[ApiError, float, float]:
    """Return the error that refuses a body, and the CPU seconds of the loop's longest step and of the process."""
    longest = 0.0
    ended = False

    async def turns() -> None:
        nonlocal longest
        while not ended:
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    async def pieces() -> AsyncIterator[dict[str, Any]]:
        for start in range(0, len(body), 2**16):
            await asyncio.sleep(0)
            yield {"type": "http.request", "body": body[start : start + 2**16], "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    messages = pieces()
    with OpenRequests(limits).opened(watches=False) as opened:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "state": {"open_request": opened}}
        request = Request(scope, lambda: anext(messages))
        looking = asyncio.ensure_future(turns())
        began = time.process_time()
        try:
            with pytest.raises(ApiError) as raised:
                await read_body(request, model, limits)
        finally:
            ended = True
            await looking
        return raised.value, longest, time.process_time() - began


@pytest.mark.parametrize("seed", range(20))
def test_values_are_counted_as_they_are_wherever_a_body_is_cut(seed: int) -> None:
    chance = random.Random(seed)
    names = ["", "a", 'q"', "\\", '\\"', "\\\\", "[{,", "\u20ac", "\\u"]

    def value(depth: int) -> Any:
        match chance.randrange(6 if depth else 3):
            case 0:
                return chance.choice(names)
            case 1:
                return chance.choice([None, True, 0, -1.5e9])
            case 2 | 3:
                return [value(depth - 1) for _ in range(chance.randrange(4))] if depth else []
            case _:
                return {chance.choice(names) + str(key): value(depth - 1) for key in range(chance.randrange(4))}

    def counted(found: Any) -> tuple[int, int, int]:
        """Return the number of commas, strings and containers."""
        if isinstance(found, str):
            return 0, 1, 0
        if not isinstance(found, list | dict):
            return 0, 0, 0
        parts = [counted(each) for each in (found.values() if isinstance(found, dict) else found)]
        sums = [sum(column) for column in zip(*parts, strict=True)] or [0, 0, 0]
        return sums[0] + max(0, len(found) - 1), sums[1] + len(found) * isinstance(found, dict), sums[2] + 1

    for _ in range(20):
        sample = value(5)
        text = json.dumps(sample, ensure_ascii=chance.random() < 0.5).encode()
        counts = Counts()
        at = 0
        while at < len(text):
            size = chance.choice([1, 2, 3, 50])
            counts.add(text[at : at + size])
            at += size
        assert (counts.values, counts.strings, counts.containers) == counted(sample)


@pytest.mark.parametrize(
    ("item", "most"), [(b"7,", 1_048_576), (b'"",', 65_536), (b"[],", 16_384), (b"{},", 16_384)], ids=str
)
def test_counts_have_bounds(item: bytes, most: int) -> None:
    Counts().add(item * most)
    with pytest.raises(ApiError, match="at most"):
        Counts().add(item * (most + 1))


@pytest.mark.parametrize("seed", range(10))
def test_an_answer_in_pieces_is_the_answer(seed: int) -> None:
    chance = random.Random(seed)

    def value(depth: int) -> Any:
        match chance.randrange(8 if depth else 4):
            case 0:
                return chance.choice(["", 'a\n\u20ac"', None, True, 0, -9999.0])
            case 1:
                return [chance.random() for _ in range(chance.choice([0, 1, SLICE, SLICE + 1, 3 * SLICE]))]
            case 2:
                return [{"a": [1, 2], "b": {}} for _ in range(chance.choice([0, SLICE, 2 * SLICE + 1]))]
            case 3:
                return {}
            case _:
                return {str(key): value(depth - 1) for key in range(chance.randrange(5))}

    choices = [
        {"index": place, "logprobs": value(3), "text": "t" * 10 ** chance.randrange(6)}
        for place in range(chance.randrange(6))
    ]
    answer = {"id": "x", "choices": [], "usage": value(2)}
    pieces = encoded(answer, choices)
    plain = json.dumps({**answer, "choices": choices}, ensure_ascii=False, separators=(",", ":"))
    assert b"".join(pieces).decode() == plain


CONTEXT = 2048
LARGE: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [7] * 2040, "echo": True, "logprobs": 20, "n": 64, "max_tokens": 0}, "n"),
    ({"prompt": [[7] * 2000] * 128, "echo": True, "logprobs": 5, "max_tokens": 0}, "max_tokens"),
    ({"prompt": ["abcd" * 500] * 128, "echo": True, "logprobs": 20}, ""),
    ({"prompt": [[7]] * 128, "logprobs": 20, "max_tokens": 1000}, "max_tokens"),
    ({"prompt": "a", "logprobs": 20, "max_tokens": 2**31, "n": 64}, "n"),
    ({"prompt": ["a"] * 128, "max_tokens": 2000, "n": 64}, "n"),
    ({"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "n": 64}, "n"),
]
FITS: list[dict[str, Any]] = [
    {"prompt": [7] * 2040, "echo": True, "logprobs": 20, "max_tokens": 0},
    {"prompt": ["abcd" * 300] * 128, "echo": True, "logprobs": 1, "max_tokens": 1},
    {"prompt": "a", "max_tokens": 2000, "n": 64},
    {"prompt": ["a"] * 128, "max_tokens": 2000},
    {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5},
    {"messages": [{"role": "user", "content": "a"}], "n": 64},
]


def check(body: dict[str, Any]) -> None:
    asked = (ChatRequest if "messages" in body else CompletionRequest).model_validate(body)
    prompts = [asked.chat] if isinstance(asked, ChatRequest) else asked.prompts
    check_answer(asked, prompts, CONTEXT, Limits().held_bytes)


@pytest.mark.parametrize(("body", "param"), LARGE)
def test_an_answer_that_would_not_fit_is_refused_before_its_work(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        check(body)
    assert (refused.value.status, refused.value.param or "") == (400, param)
    assert "ask for fewer" in refused.value.message


@pytest.mark.parametrize("body", FITS)
def test_answers_that_fit_are_made(body: dict[str, Any]) -> None:
    check(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_small_request_for_a_large_answer_is_refused(gateway: Gateway, stream: bool) -> None:
    body = {**LARGE[0][0], "stream": stream}
    answer = requests.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


def test_an_echoed_prompt_is_made_once(embedded_services: EmbeddedServices, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's log-probabilities are computed once for all choices, whole or streamed."""
    from tests.support.gateways import served_here

    made: list[int] = []
    original = TextAnswer.log_probs

    def counting(self: TextAnswer, token_ids: Any, *others: Any) -> Any:
        made.append(len(token_ids))
        return original(self, token_ids, *others)

    monkeypatch.setattr(TextAnswer, "log_probs", counting)
    prompt = list(range(100, 300))
    body = {"prompt": prompt, "echo": True, "logprobs": 5, "n": 3, "max_tokens": 4, "seed": 1}

    def act(url: str) -> None:
        whole = requests.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert made.count(len(prompt)) == 1
        streamed = requests.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60)
        assert made.count(len(prompt)) == 2
        for choice in whole["choices"]:
            told: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
            for line in streamed.text.split("\n\n"):
                event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {"choices": []}
                for each in event["choices"]:
                    if each["index"] == choice["index"] and each["logprobs"]:
                        for name, values in each["logprobs"].items():
                            told[name] += values
            for name, values in choice["logprobs"].items():
                assert told[name][: len(prompt)] == values[: len(prompt)]
                assert len(told[name]) == len(values) == len(prompt) + 4

    served_here(embedded_services.draft_address, act, Limits())


def test_the_bytes_that_are_counted_of_log_probabilities_are_enough() -> None:
    """A position with its likeliest tokens takes at most the counted bytes, in memory and as JSON."""
    import tracemalloc

    from dynatree.gateway.memory import LOG_PROB_BYTES, TOKEN_BYTES
    from dynatree.gateway.token_texts import TokenTexts

    places, top = 500, 20
    texts = TokenTexts([f" token{number}".encode() for number in range(1000)])
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        ids = tuple(1000 - place % 700 for place in range(places))
        values = tuple(-place / 7 for place in range(places))
        likeliest = tuple(tuple((300 + each, -each / 3 - place) for each in range(top)) for place in range(places))
        answer = TextAnswer("m", texts)
        told = answer.log_probs(ids, values, likeliest, range(places))
        pieces = encoded(answer.whole([], {}), [answer.choice(0, "", told, "length")])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pieces
    assert peak - before < places * (TOKEN_BYTES + (1 + top) * LOG_PROB_BYTES)
