"""Tests chats through OpenAI's client: the template's tokens, fields without effect, and returned messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Required, Union, get_args, get_origin, get_type_hints

import openai
import pytest
import requests
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionAssistantMessageParam, ChatCompletionMessage
from openai.types.chat import completion_create_params as chat_params
from transformers import AutoTokenizer
from typing_extensions import is_typeddict

from dynatree.client import Client
from dynatree.gateway.requests import ChatRequest, CompletionRequest
from tests.support.gateways import KEY, running_gateway
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} At once:{% endif %}"
)
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who <|endoftext|> are you?"}]


@dataclass(frozen=True)
class Chatty:
    """A gateway for a pair whose tokenizer has a chat template, and clients of both."""

    url: str
    openai: openai.OpenAI
    grpc: Client
    target: Path


@pytest.fixture(scope="module", name="chatty")
def chatty_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chatty]:
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
        yield Chatty(gateway.url, client, grpc_client, target)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_completed_by_their_template(chatty: Chatty, stream: bool) -> None:
    client, grpc_client, target = chatty.openai, chatty.grpc, chatty.target
    options: dict[str, Any] = {"model": "target", "messages": CHAT, "max_completion_tokens": 12, "n": 2, "seed": 4}

    [model] = client.models.list().data
    assert (model.model_extra or {})["chat_template"] is True
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


def test_chats_have_log_probs(chatty: Chatty) -> None:
    client, grpc_client = chatty.openai, chatty.grpc

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


def test_parts_of_text_are_one_message(chatty: Chatty) -> None:
    client = chatty.openai
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "is it?"}]}]
    whole: Any = [{"role": "user", "content": "Who is it?"}]

    answers = [
        client.chat.completions.create(model="target", messages=messages, max_tokens=8, temperature=0)
        for messages in (parts, whole)
    ]

    assert answers[0].choices == answers[1].choices


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_message_may_go_on(chatty: Chatty, stream: bool) -> None:
    """The tokens are those of a completion of the unfinished text, over gRPC too."""
    chat: Any = [*CHAT, {"role": "assistant", "content": "I am"}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    options: dict[str, Any] = {"model": "target", "messages": chat, "max_tokens": 8, "temperature": 0}
    tokenizer = AutoTokenizer.from_pretrained(chatty.target)
    text = tokenizer.apply_chat_template(chat, tokenize=False, **fields)
    assert text.endswith("assistant: I am")
    expected = chatty.grpc.generate(text, max_new_tokens=8).text

    create = chatty.openai.chat.completions.create
    if stream:
        chunks = create(**options, stream=True, extra_body=fields)
        told = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    else:
        told = create(**options, extra_body=fields).choices[0].message.content or ""

    assert told == expected == chatty.grpc.generate(chat, max_new_tokens=8, continue_final_message=True).text
    assert told != create(**options).choices[0].message.content
    for both in (True, False):
        with pytest.raises(openai.BadRequestError, match="exactly one of"):
            create(**options, extra_body=dict.fromkeys(fields, both))


def test_no_line_of_an_event_ends_within_a_text(chatty: Chatty) -> None:
    """Python's `splitlines`, as httpx uses it, splits at more characters than the events' own lines end with."""
    text = "a\u2028b\u2029c\x85d\x0b\x0ce"
    body = {"messages": CHAT, "guided_choice": [text], "stream": True}
    answer = requests.post(f"{chatty.url}/v1/chat/completions", json=body, timeout=60)
    *events, last = [line.removeprefix("data: ") for line in answer.content.decode().splitlines() if line]
    assert last == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events) == text


# Tokens


def test_prompts_are_counted_as_they_are_completed(chatty: Chatty) -> None:
    url, tokenizer = chatty.url, AutoTokenizer.from_pretrained(chatty.target)

    def tokenized(**body: Any) -> Any:
        return requests.post(f"{url}/tokenize", json=body, timeout=60).json()

    for text in ("It was", "Zoë ☃ <|endoftext|>", ""):
        told = tokenized(prompt=text, return_token_strs=True)
        assert told["tokens"] == tokenizer(text, split_special_tokens=True)["input_ids"]
        assert told["token_strs"] == tokenizer.convert_ids_to_tokens(told["tokens"])
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 160)
        again = requests.post(f"{url}/detokenize", json={"tokens": told["tokens"]}, timeout=60).json()
        assert again == {"prompt": tokenizer.decode(told["tokens"])}
        bare = tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        assert tokenized(prompt=text, add_special_tokens=False)["tokens"] == bare
    usage = chatty.openai.chat.completions.create(model="target", messages=CHAT, max_tokens=1).usage
    assert usage is not None
    assert tokenized(messages=CHAT, model="target")["count"] == usage.prompt_tokens
    going_on = tokenized(messages=CHAT, continue_final_message=True, add_generation_prompt=False)
    assert going_on["count"] < usage.prompt_tokens
    assert chatty.grpc.tokenize(CHAT).token_ids == tuple(tokenized(messages=CHAT)["tokens"])
    assert chatty.grpc.detokenize(going_on["tokens"]).endswith("are you?")


def test_a_streamed_chat_tells_its_prompts_tokens_first(chatty: Chatty) -> None:
    options: dict[str, Any] = {"model": "target", "messages": CHAT, "max_tokens": 3, "n": 2}
    chunks = chatty.openai.chat.completions.create(**options, stream=True, extra_body={"return_token_ids": True})
    first, *others = [(chunk.choices[0].model_extra or {}).get("prompt_token_ids") for chunk in chunks]
    assert tuple(first or ()) == chatty.grpc.tokenize(CHAT).token_ids
    assert set(others) == {None}


def test_a_chats_template_may_have_variables(chatty: Chatty) -> None:
    variables = {"enable_thinking": False, "unread": None}
    plain = chatty.grpc.tokenize(CHAT).token_ids
    told = chatty.grpc.tokenize(CHAT, chat_template_kwargs=variables).token_ids
    assert chatty.grpc.detokenize(told) == f"{chatty.grpc.detokenize(plain)} At once:"
    body = {"messages": CHAT, "chat_template_kwargs": variables}
    assert requests.post(f"{chatty.url}/tokenize", json=body, timeout=60).json()["tokens"] == list(told)
    answer = chatty.openai.chat.completions.create(
        model="target",
        messages=CHAT,
        max_tokens=1,
        extra_body={"chat_template_kwargs": variables},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(told)


@pytest.mark.parametrize(
    ("route", "body", "param", "words"),
    [
        ("tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "for messages"),
        (
            "tokenize",
            {"messages": CHAT, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "the service sets messages itself",
        ),
        ("tokenize", {"messages": CHAT, "chat_template_kwargs": 5}, "chat_template_kwargs", "dictionary"),
        ("tokenize", {}, "prompt", "either prompt or messages"),
        ("tokenize", {"prompt": "a", "messages": CHAT}, "messages", "either prompt or messages"),
        ("tokenize", {"prompt": ["a"]}, "prompt", "prompt"),
        (
            "tokenize",
            {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
            "for messages",
        ),
        ("tokenize", {"prompt": "a" * 2**20}, None, "context"),
        ("tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "messages.0.content"),
        ("detokenize", {"tokens": [2**31]}, None, "vocabulary"),
        ("detokenize", {"tokens": [1] * 1000}, None, "at most 160"),
        ("detokenize", {"tokens": "a"}, "tokens", "tokens"),
        ("detokenize", {}, "tokens", "tokens"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    chatty: Chatty, route: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    answer = requests.post(f"{chatty.url}/{route}", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert words in answer.json()["error"]["message"]


# Fields without effect

HINTS: dict[str, dict[str, Any]] = {
    "completions": get_type_hints(completion_create_params.CompletionCreateParamsNonStreaming),
    "chat/completions": get_type_hints(chat_params.CompletionCreateParamsNonStreaming),
}
SET = {"model", "messages", "prompt", "max_tokens", "temperature"}  # in each request of these tests
PLAIN: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "It was"},
    "chat/completions": {"messages": [{"role": "user", "content": "It was"}, {"role": "assistant", "content": "Who?"}]},
}
NO_REASONING = ("reasoning_effort", "none")  # which a template may only have as a variable
TYPED = {"type": "text"}  # lm-eval writes it in each message
# Values without effect that the types do not give: numbers, labels, and fields of other servers.
MORE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens", "min_p", "priority"), (0, 0.0)),
    **dict.fromkeys(("top_p", "repetition_penalty", "length_penalty"), (1, 1.0)),
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("parallel_tool_calls", "store", "spaces_between_special_tokens"), (False, True)),
    **dict.fromkeys(("skip_special_tokens", "detokenize", "include_reasoning"), (True,)),
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), ("", "anna", "Zoë ☃", "x" * 2000)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "include_stop_str_in_output", "logprobs", "stream"), (False,)),
    **{name: ([],) for name in ("bad_words", "stop_token_ids", "documents", "logits_processors", "stop")},
    **{name: ({},) for name in ("chat_template_kwargs", "mm_processor_kwargs", "policy_settings", "logit_bias")},
    **dict.fromkeys(("cache_prompt", "timings_per_token", "return_progress"), (False, True)),
    "id_slot": (-1, 3),
    "cache_salt": ("x",),
    "keep_alive": (-1, "5m"),
    "seed": (-1,),
    "top_k": (0, -1),
    "top_logprobs": (0,),
    "metadata": ({"run": "7", "of": ""},),
    "service_tier": ("auto", "default", "flex"),
    "prediction": ({"type": "content", "content": "It was"},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"}, {"type": "text", "json_schema": None}, {"type": None}),
    "audio": ({"voice": None, "format": None},),
    "model": ("",),
    "stop": ("",),
    "logit_bias": ({"5": None}, {"5": 0}),
    "reasoning_effort": ("medium",),
    "verbosity": ("medium",),
    "stream_options": ({"include_usage": None, "include_obfuscation": False, "continuous_usage_stats": None},),
    "unheard_of": (None, False, 0, "", "none", "auto", [], {}),
}


def nothings(hint: Any) -> list[Any]:
    """Yield the values without effect that a type of OpenAI's client admits."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [value for each in arguments for value in nothings(each)]
    if origin is Literal:
        return [value for value in arguments if value in ("none", "auto")]
    if origin in (Required, Annotated):
        return nothings(arguments[0])
    if is_typeddict(hint) or origin is dict:
        return [{}]
    if hint is NoneType:
        return [None]
    if hint is bool:
        return [False]
    return [[]] if isinstance(origin or hint, type) and hasattr(origin or hint, "__iter__") and hint is not str else []


def fields_of_no_effect(route: str) -> list[tuple[str, Any]]:
    hints = HINTS[route]
    by_type = [(name, value) for name in hints.keys() - SET for value in nothings(hints[name])]
    ours = [(name, None) for name in (CompletionRequest if "chat" not in route else ChatRequest).model_fields]
    more = [(name, value) for name, values in MORE.items() for value in values]
    found = [*by_type, *((name, value) for name, value in ours if name not in SET), *more]
    return [each for _, each in sorted({repr(each): each for each in found if each != NO_REASONING}.items())]


def messages_of_no_effect() -> list[dict[str, Any]]:
    """Return a user's and an assistant's message with every field of OpenAI's client and of other servers."""
    assistants = get_type_hints(ChatCompletionAssistantMessageParam)
    known = [{name: value} for name, hint in assistants.items() if name != "content" for value in nothings(hint)]
    written = [{name: None} for name in ChatCompletionMessage.model_fields if name not in ("role", "content")]
    others = [
        *({"annotations": []}, {"reasoning_content": ""}, {"reasoning_content": None}, {"tool_call_id": None}),
        *({"reasoning": ""}, {"reasoning": None}, {"type": "text"}, {"type": "message"}, {"type": None}),
        *({"tool_calls": []}, {"name": None}, {"cache_control": {"type": "ephemeral"}}),
    ]
    return [*known, *written, *others]


def choices(url: str, route: str, fields: dict[str, Any]) -> Any:
    body = {**PLAIN[route], "max_tokens": 3, "temperature": 0, **fields}
    answer = requests.post(f"{url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 200, (fields, answer.text)
    return answer.json()["choices"]


@pytest.mark.parametrize("route", PLAIN)
def test_a_field_at_its_value_of_no_effect_is_as_good_as_none(chatty: Chatty, route: str) -> None:
    """The test covers every field of OpenAI's client and of this server, singly and in random combinations."""
    fields = fields_of_no_effect(route)
    plain = choices(chatty.url, route, {})
    assert len(fields) > 100

    for name, value in fields:
        assert choices(chatty.url, route, {name: value}) == plain, (name, value)
    random = Random(5)
    for _ in range(30):
        several = dict(random.sample(fields, random.randint(2, 40)))
        assert choices(chatty.url, route, several) == plain, several


def test_a_messages_field_at_its_value_of_no_effect_is_as_good_as_none(chatty: Chatty) -> None:
    route = "chat/completions"
    plain = choices(chatty.url, route, {})
    user, assistant = PLAIN[route]["messages"]
    found = messages_of_no_effect()
    together = {name: value for each in found for name, value in each.items()}

    for more in [*found, together]:
        assert choices(chatty.url, route, {"messages": [user, {**assistant, **more}]}) == plain, more
    for more in ({}, {"cache_control": None}, {"annotations": []}, {"prompt_cache_breakpoint": {"mode": "x"}}, TYPED):
        parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "was", **more}]
        assert choices(chatty.url, route, {"messages": [{**user, "content": parts, **more}, assistant]}) == plain
    empty = [user, {**assistant, "content": ""}]
    for content in (None, []):
        silent = choices(chatty.url, route, {"messages": [user, {**assistant, "content": content}]})
        assert silent == choices(chatty.url, route, {"messages": empty})


# Answers as messages of the next request


def test_answers_are_messages_of_the_next_request(chatty: Chatty) -> None:
    """The answers are OpenAI's objects, their dumps, the JSON on the wire, and streams."""
    options: dict[str, Any] = {"model": "target", "max_tokens": 4, "temperature": 0}
    create = chatty.openai.chat.completions.create
    first = create(messages=CHAT, logprobs=True, top_logprobs=1, **options).choices[0].message
    raw = choices(chatty.url, "chat/completions", {"messages": CHAT, "max_tokens": 4})[0]["message"]
    put_together: dict[str, Any] = {}
    for chunk in create(messages=CHAT, stream=True, **options):
        for name, value in chunk.choices[0].delta.model_dump().items():
            put_together[name] = (put_together.get(name) or "") + value if value else put_together.get(name)
    with chatty.openai.chat.completions.stream(messages=CHAT, **options) as stream:
        stream.until_done()
        final = stream.current_completion_snapshot.choices[0].message
    forms: list[Any] = [
        *(first, first.model_dump(), first.model_dump(exclude_unset=True), first.to_dict(), raw),
        *(put_together, final, final.model_dump()),
    ]

    expected = create(messages=[*CHAT, {"role": "assistant", "content": first.content}, *CHAT], **options).choices
    for form in forms:
        assert create(messages=[*CHAT, form, *CHAT], **options).choices == expected, form


def test_completions_are_prompts_of_the_next_request(chatty: Chatty) -> None:
    create = chatty.openai.completions.create
    options: dict[str, Any] = {"model": "target", "max_tokens": 4, "temperature": 0}
    first = create(prompt="It was", extra_body={"return_token_ids": True}, **options).choices[0]
    ids = [*first.model_extra["prompt_token_ids"], *first.model_extra["token_ids"]]  # type: ignore[index]

    longer = create(prompt="It was", **options | {"max_tokens": 8}).choices[0].text
    assert first.text + create(prompt=ids, **options).choices[0].text == longer
    assert create(prompt=first.text or "a", **options).choices


@pytest.mark.parametrize(
    ("words", "options", "param"),
    [
        (200, {}, "messages"),
        (200, {"max_tokens": 5}, "messages"),
        (3, {"max_completion_tokens": 155}, "max_completion_tokens"),
        (3, {"max_tokens": 155}, "max_tokens"),
    ],
)
def test_a_chat_that_does_not_fit_the_context(chatty: Chatty, words: int, options: dict[str, Any], param: str) -> None:
    messages: Any = [{"role": "user", "content": " the" * words}]
    message = "This model's maximum context length is 160 tokens"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            chatty.openai.chat.completions.create(model="target", messages=messages, stream=stream, **options)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
