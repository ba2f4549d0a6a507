"""Tests answers that are limited to schemas, expressions, grammars and calls, through OpenAI's client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jsonschema_rs
import openai
import pytest
import requests
from openai import pydantic_function_tool
from pydantic import BaseModel, Field
from transformers import AutoTokenizer

from tests.gateway.test_gateway_chats import TEMPLATE
from tests.support.gateways import KEY, running_gateway
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

CHAT: Any = [{"role": "user", "content": "Oslo?"}]


class Harbour(BaseModel):
    depth: Annotated[int, Field(ge=0, le=99)]
    open: bool


class Town(BaseModel):
    name: Literal["Oslo", "Rome", "Łódź"]
    code: Annotated[str, Field(pattern="^[a-z]{2}$")]
    harbours: Annotated[list[Harbour], Field(max_length=2)]
    mayor: None


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def a_tool(name: str, **properties: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": an_object(**properties)}}


WEATHER = a_tool(
    "weather", city={"enum": ["Oslo", "Łódź", "</tool_call>"]}, day={"type": "integer", "minimum": 1, "maximum": 7}
)
ADD = a_tool("add", terms={"type": "array", "items": {"enum": [1, 2.5, None]}, "minItems": 1, "maxItems": 3})
TOOLS: Any = [WEATHER, ADD]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
FORCED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}


@dataclass(frozen=True)
class Served:
    """A gateway for a random pair with a chat template, and OpenAI's client of it."""

    url: str
    openai: openai.OpenAI

    def chat(self, **options: Any) -> Any:
        options = {"model": "target", "messages": CHAT, "seed": 5, **options}
        return self.openai.chat.completions.create(**options)

    def refusal(self, **fields: Any) -> Any:
        body = {"messages": CHAT, **fields}
        answer = requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]


@pytest.fixture(scope="module", name="served")
def served_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("structured")
    target = save_random_model(folder / "target", "llama", seed=3, max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    draft = save_noisy_copy(folder / "draft", target, seed=4)
    with (
        running_services(folder, target, draft) as services,
        running_gateway(services.draft_address) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield Served(gateway.url, client)


# Formats

SCHEMA = an_object(town={"enum": ["Oslo", "Rome"]}, size={"type": "integer", "minimum": 0, "maximum": 500})
REGEX = r"[A-Z]{3}-[0-9]{2,4}( é)?"
CHOICE = ["yes", 'no "way"', "é\n\\\x7f", "{}", "yes, sir"]
LARK = 'start: "if " NAME ("!" | "?")\nNAME: /[a-z]{1,8}/'
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "response_format": ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json"),
    "strict": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}},
        "json",
    ),
    "json_object with a schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json"),
    "structured_outputs.json": ({"structured_outputs": {"json": SCHEMA}}, "json"),
    "structured_outputs.json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json"),
    "structured_outputs.regex": ({"structured_outputs": {"regex": REGEX}}, "regex"),
    "structured_outputs.choice": ({"structured_outputs": {"choice": CHOICE}}, "choice"),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": LARK}}, "grammar"),
    "guided_json": ({"guided_json": SCHEMA}, "json"),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, "json"),
    "guided_regex": ({"guided_regex": REGEX}, "regex"),
    "guided_choice": ({"guided_choice": CHOICE}, "choice"),
    "guided_grammar": ({"guided_grammar": LARK}, "grammar"),
    "fields without effect": (
        {"guided_regex": REGEX, "response_format": {"type": "text"}, "guided_json": None},
        "regex",
    ),
}


def check(text: str, kind: str) -> None:
    match kind:
        case "json":
            jsonschema_rs.validate(SCHEMA, json.loads(text))
        case "regex":
            assert re.fullmatch(REGEX, text)
        case "choice":
            assert text in CHOICE
        case "grammar":
            assert re.fullmatch("if [a-z]{1,8}[!?]", text)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_valid_answers_whole_and_streamed(served: Served, name: str) -> None:
    fields, kind = FORMATS[name]

    whole = served.chat(n=3, extra_body=fields).choices
    texts = dict.fromkeys(range(3), "")
    reasons: dict[int, Any] = {}
    for chunk in served.chat(n=3, extra_body=fields, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)

    assert {each.index: (each.message.content, each.finish_reason) for each in whole} == {
        index: (texts[index], reasons[index]) for index in texts
    }
    for each in whole:
        assert each.finish_reason == "stop"
        check(each.message.content, kind)
    completions = served.openai.completions.create(
        model="target", prompt="Oslo", max_tokens=60, seed=5, extra_body=fields
    )
    check(completions.choices[0].text, kind)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_any_json_object_is_begun(served: Served, fields: dict[str, Any]) -> None:
    """A random model hardly ever ends one; with a bias for the brace that ends it, it does."""
    brace = requests.post(f"{served.url}/tokenize", json={"prompt": "}"}, timeout=60).json()["tokens"][-1]
    text = served.chat(logit_bias={str(brace): 100}, extra_body=fields, max_tokens=60).choices[0].message.content
    assert isinstance(json.loads(text), dict)
    assert served.chat(extra_body=fields, max_tokens=5).choices[0].message.content.startswith("{")


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client, about its own field
def test_an_answer_is_parsed_into_its_model(served: Served) -> None:
    options: Any = {"model": "target", "seed": 5, "response_format": Town}
    answer = served.openai.chat.completions.parse(messages=CHAT, **options)
    message = answer.choices[0].message
    assert isinstance(message.parsed, Town)
    with served.openai.chat.completions.stream(messages=CHAT, **options) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.parsed == message.parsed
    for form in (message, message.model_dump(warnings=False), message.to_dict(warnings=False), streamed):
        again: Any = [*CHAT, form, *CHAT]
        assert served.openai.chat.completions.parse(messages=again, **options).choices[0].message.parsed


def test_log_probs_under_a_grammar_are_finite(served: Served) -> None:
    """Fewer tokens than top_logprobs are allowed; the others have the log-probability -9999."""
    options = {"logprobs": True, "top_logprobs": 20, "extra_body": {"guided_choice": ["yes", "no"]}}
    content = served.chat(**options).choices[0].logprobs.content
    values = [top.logprob for each in content for top in each.top_logprobs]
    assert all(len(each.top_logprobs) == 20 for each in content)
    assert all(-9999 <= value <= 0 for value in values)
    assert -9999 in values
    streamed = [
        each
        for chunk in served.chat(**options, stream=True)
        for choice in chunk.choices
        for each in (choice.logprobs.content if choice.logprobs else ())
    ]
    assert streamed == content
    completion = served.openai.completions.create(
        model="target", prompt="Oslo", logprobs=20, seed=5, extra_body={"guided_choice": ["yes", "no"]}
    )
    tops = completion.choices[0].logprobs.top_logprobs  # type: ignore[union-attr]
    assert all(-9999 <= value <= 0 for top in tops or () for value in top.values())


# Functions


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """The checked calls of a message."""
    found = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    for name, arguments in found:
        jsonschema_rs.validate(PARAMETERS[name], arguments)
    assert len({call.id for call in message.tool_calls or ()}) == len(found)
    return found


def test_a_required_call_is_made(served: Served) -> None:
    [choice] = served.chat(tools=TOOLS, tool_choice="required", max_tokens=300).choices
    assert calls_of(choice.message)
    assert choice.message.content is None
    assert choice.finish_reason in ("tool_calls", "length")


def test_without_parallel_calls_there_is_exactly_one(served: Served) -> None:
    choices = served.chat(**FORCED, n=4).choices
    found = [calls_of(each.message) for each in choices]
    assert [len(each) for each in found] == [1] * 4
    assert {each.finish_reason for each in choices} == {"tool_calls"}
    assert len({json.dumps(each) for each in found}) > 1


def test_a_named_function_is_called(served: Served) -> None:
    for tool in TOOLS:
        [choice] = served.chat(
            tools=TOOLS, tool_choice={"type": "function", "function": {"name": tool["function"]["name"]}}
        ).choices
        [(name, _)] = calls_of(choice.message)
        assert (name, choice.finish_reason) == (tool["function"]["name"], "tool_calls")


FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_limits_text_and_calls_stay_possible(served: Served, stream: bool) -> None:
    """A bias decides whether the answer begins as a call or as JSON."""
    for begin in "<{":
        token = requests.post(f"{served.url}/tokenize", json={"prompt": begin}, timeout=60).json()["tokens"][-1]
        options = {"tools": TOOLS, "parallel_tool_calls": False, "response_format": FORMAT, "stream": stream}
        answer = served.chat(logit_bias={str(token): 100}, **options)
        chunks = [chunk.choices[0] for chunk in answer] if stream else []
        messages = [each.delta for each in chunks] or [answer.choices[0].message]
        content = "".join(each.content or "" for each in messages)
        calls = [found for each in messages for found in calls_of(each)]
        reason = (chunks or answer.choices)[-1].finish_reason
        if begin == "{":
            check(content, "json")
        assert (len(calls), bool(content), reason) == ((1, False, "tool_calls") if begin == "<" else (0, True, "stop"))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_format_does_not_limit_calls(served: Served, choice: Any) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    [limited] = served.chat(**options, response_format=FORMAT).choices
    [alone] = served.chat(**options).choices
    assert calls_of(limited.message) == calls_of(alone.message) != []


def test_a_model_is_parsed_where_functions_are_offered(served: Served) -> None:
    options: Any = {"model": "target", "messages": CHAT, "seed": 5, "response_format": Town}
    found = set()
    for begin in "<{":
        token = requests.post(f"{served.url}/tokenize", json={"prompt": begin}, timeout=60).json()["tokens"][-1]
        answer = served.openai.chat.completions.parse(
            **options,
            tools=[pydantic_function_tool(Harbour)],
            parallel_tool_calls=False,
            logit_bias={str(token): 100},
        )
        message = answer.choices[0].message
        found.add((isinstance(message.parsed, Town), len(message.tool_calls or ()) > 0))
    assert found == {(True, False), (False, True)}


def test_without_tools_the_model_is_not_told_of_them(served: Served) -> None:
    plain = served.chat(max_tokens=8)
    none = served.chat(max_tokens=8, tools=TOOLS, tool_choice="none")
    free = served.chat(max_tokens=8, tools=TOOLS)
    assert none.choices == plain.choices
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens < free.usage.prompt_tokens
    assert free.choices[0].message.content
    assert free.choices[0].message.tool_calls is None
    assert free.choices[0].finish_reason == "length"


def test_the_tokens_of_a_chat_with_tools_are_counted(served: Served) -> None:
    body = {"messages": CHAT, "tools": TOOLS}
    counted = requests.post(f"{served.url}/tokenize", json=body, timeout=60).json()["count"]
    assert counted == served.chat(max_tokens=1, tools=TOOLS).usage.prompt_tokens


def test_a_free_answer_may_be_limited_and_calls_are_found_in_it(served: Served) -> None:
    text = 'So: <tool_call>{"name": "add", "arguments": {"terms": [1, "é"]}}</tool_call>'
    [choice] = served.chat(tools=TOOLS, extra_body={"guided_choice": [text]}).choices
    assert choice.message.content == "So:"
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"terms": [1, "é"]}')
    assert choice.finish_reason == "tool_calls"
    content, names = "", []
    for chunk in served.chat(tools=TOOLS, extra_body={"guided_choice": [text]}, stream=True):
        content += chunk.choices[0].delta.content or ""
        names += [each.function.name for each in chunk.choices[0].delta.tool_calls or ()]
    assert (content, names) == ("So:", ["add"])


@pytest.mark.parametrize("parallel", [False, True])
def test_a_free_answer_has_several_calls_only_where_they_may_be_parallel(served: Served, parallel: bool) -> None:
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {{"terms": [{each}]}}}}\n</tool_call>' for each in (1, 2.5)]
    expected = [("add", {"terms": [1]}), ("add", {"terms": [2.5]})][: 1 + parallel]
    options: Any = {
        "tools": TOOLS,
        "parallel_tool_calls": parallel,
        "extra_body": {"guided_choice": ["\n".join(calls)]},
    }
    [whole] = served.chat(**options).choices
    chunks = [chunk.choices[0] for chunk in served.chat(**options, stream=True)]
    assert calls_of(whole.message) == [call for chunk in chunks for call in calls_of(chunk.delta)] == expected
    assert not whole.message.content
    assert not any(chunk.delta.content for chunk in chunks)
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls"


def test_results_are_sent_back_and_further_calls_made(served: Served) -> None:
    """Each answer goes back unchanged: as OpenAI's object, as its dumps, and as its streamed twin."""
    messages: list[Any] = [*CHAT]
    before = 0
    for _ in range(2):
        with served.openai.chat.completions.stream(model="target", messages=messages, seed=5, **FORCED) as stream:
            streamed = stream.get_final_completion().choices[0].message
        answer = served.chat(messages=messages, **FORCED)
        message = answer.choices[0].message
        assert before < answer.usage.prompt_tokens
        before = answer.usage.prompt_tokens
        assert calls_of(streamed) == calls_of(message) != []
        [call] = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"is": "☂"}'}
        counts = set()
        for form in (message.model_dump(), message, message.to_dict(), streamed.model_dump(), streamed):
            counts.add(served.chat(messages=[*messages, form, result], max_tokens=1).usage.prompt_tokens)
        assert len(counts) == 1
        messages += [message.model_dump(), result]
    final = served.chat(messages=messages, tools=TOOLS, max_tokens=5).choices[0]
    assert final.message.content


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "{}",
        "not JSON",
        r'{"a": "\ud800"}',
        "[" * 300 + "]" * 300,
        "[" * 600 + "]" * 600,
        "[" * 980 + "]" * 980,
        "[" * 5000 + "]" * 5000,
        "NaN",
    ],
)
def test_whatever_the_arguments_of_a_call_are_it_is_text(served: Served, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        *CHAT,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    body = {"messages": messages, "max_tokens": 1, "tools": TOOLS}
    answer = requests.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200 or (answer.status_code == 400 and answer.json()["error"]["message"]), answer.text


def test_streamed_calls_are_those_of_the_whole_answer(served: Served) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "n": 2, "max_tokens": 200}
    whole = served.chat(**options).choices
    found: dict[int, list[tuple[str, str]]] = {0: [], 1: []}
    reasons: dict[int, Any] = {}
    for chunk in served.chat(**options, stream=True):
        [choice] = chunk.choices
        assert not choice.delta.content
        for call in choice.delta.tool_calls or ():
            assert call.index == len(found[choice.index])
            assert (call.type, len(call.id)) == ("function", 9)
            found[choice.index].append((call.function.name, call.function.arguments))
        reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for each in whole:
        assert [(call.function.name, call.function.arguments) for call in each.message.tool_calls] == found[each.index]
        assert each.finish_reason == reasons[each.index]


def test_a_stream_of_openais_client_ends_each_call(served: Served) -> None:
    options: Any = {"model": "target", "messages": CHAT, "seed": 5, **FORCED}
    with served.openai.chat.completions.stream(**options) as stream:
        told = [event for event in stream if event.type != "chunk"]
        final = stream.get_final_completion().choices[0]
    [(name, arguments)] = calls_of(final.message)
    events = [event for event in told if event.type == "tool_calls.function.arguments.done"]
    assert len([event for event in told if event.type == "content.delta"]) <= 1  # the empty one that begins the message
    assert [(event.name, json.loads(event.arguments)) for event in events] == [(name, arguments)]
    assert final.finish_reason == "tool_calls"


def test_a_function_may_be_a_model_with_models_in_it(served: Served) -> None:
    """Its schema has references to its own definitions."""
    answer = served.openai.chat.completions.parse(
        model="target",
        messages=CHAT,
        tools=[pydantic_function_tool(Town)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=5,
    )
    [call] = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Town)
    for form in (answer.choices[0].message, answer.choices[0].message.model_dump()):
        result = {"role": "tool", "tool_call_id": call.id, "content": "seen"}
        assert served.chat(messages=[*CHAT, form, result], max_tokens=1).choices


# Refusals

ODD: Any = {"properties": {"a": {}}, "required": [[], {}, 5]}
DEEP: Any = {}
for _ in range(400):
    DEEP = {"not": DEEP}
NAMED: Any = {"type": "function", "function": {"name": "other"}}
CONSTRAINT: Any = {"guided_regex": "a"}
REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "an expression": ({"guided_regex": "(a"}, "guided_regex", "regex"),
    "look-around": ({"guided_regex": "(?=a)b"}, "guided_regex", "look"),
    "a keyword": ({"guided_json": {"type": "object", "not": {}}}, "guided_json", "not"),
    "another keyword": ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    "a condition": ({"guided_json": {"type": "object", "if": {}, "then": {}}}, "guided_json", "if"),
    "another document": (
        {"guided_json": {"$ref": "https://example.org/a.json"}},
        "guided_json",
        "guided_json: the JSON schema is refused: $ref: 'https://example.org/a.json' is in another document",
    ),
    "a schema that is no schema": ({"guided_json": {"type": "thing"}}, "guided_json", "thing"),
    "a schema that is no JSON": ({"guided_json": "{"}, "guided_json", "JSON schema"),
    "a grammar": ({"guided_grammar": "start: other"}, "guided_grammar", "other"),
    "a long schema": ({"guided_json": {"enum": ["x" * 200_000]}}, "guided_json", "expected 1 to 131072"),
    "an empty grammar": ({"guided_grammar": ""}, "guided_grammar", "expected 1 to 131072"),
    "a format's keyword": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "response_format",
        "not",
    ),
    "alternatives that overlap": (
        {"structured_outputs": {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
        "structured_outputs.json",
        "oneOf with alternatives that may overlap is not supported",
    ),
    "several constraints": (
        {**CONSTRAINT, "response_format": {"type": "json_object"}},
        "guided_regex",
        "several fields limit",
    ),
    "several in one": (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.choice",
        "several fields limit",
    ),
    "no choice": ({"guided_choice": []}, "guided_choice", "at least 1"),
    "a choice that is no text": ({"guided_choice": [1]}, "guided_choice.0", "valid string"),
    "an unknown field": (
        {"structured_outputs": {"structural_tag": "a"}},
        "structured_outputs.structural_tag",
        "supported",
    ),
    "no end": ({**CONSTRAINT, "ignore_eos": True}, "ignore_eos", "that guided_regex limits"),
    "no end of a call": ({**FORCED, "ignore_eos": True}, "ignore_eos", "that tools limits"),
    "a call of nothing": ({"tool_choice": "required"}, "tool_choice", "tools does not have"),
    "a call of another": ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice", "tools does not have"),
    "a choice of calls": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "supported"),
    "a choice among some": (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.type",
        "supported",
    ),
    "functions of a completion's kind": ({"functions": [{"name": "f"}]}, "functions", "supported"),
    "a call and a constraint": (
        {**FORCED, **CONSTRAINT},
        "tool_choice",
        "guided_regex limits the answer; expected one of them",
    ),
    "a format and a call's keyword": (
        {"tools": [*TOOLS, a_tool("f.1", a={"not": {}})], "response_format": {"type": "json_object"}},
        "response_format",
        "the JSON schema 'parameters of the function f.1': these keywords are not supp",
    ),
    "a format's keyword beside calls": (
        {"tools": TOOLS, "response_format": {"type": "json_object", "schema": {"not": {}}}},
        "response_format",
        "the JSON schema 'response_format': these keywords are not supp",
    ),
    "parameters": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools.0.function.parameters",
        "object",
    ),
    "a call's keyword": (
        {**FORCED, "tools": [*TOOLS, a_tool("f.1", a={"not": {}})]},
        "tools",
        "tools: the grammar is refused: the JSON schema 'parameters of the function f.1': these keywords are not supp",
    ),
    "deep parameters": (
        {"tools": [ADD, a_tool("f", a=DEEP)]},
        "tools.1.function.parameters.properties.a" + ".not" * 15,
        "tools.1.function.parameters.properties.a.not.not",
    ),
    "a deep schema": ({"guided_json": {"é": [1, DEEP]}}, "guided_json.é.1" + ".not" * 21, "recursion limit exceeded"),
    "required arguments of no kind": (
        {**FORCED, "tools": [{"type": "function", "function": {"name": "f", "parameters": ODD}}]},
        "tools",
        "the JSON schema 'parameters of the function f'",
    ),
    "a call's encoding": (
        {**FORCED, "tools": [a_tool("f", a={"contentEncoding": "a"})]},
        "tools",
        "function f': contentEncoding is not supported",
    ),
    "a call's reference": ({**FORCED, "tools": [a_tool("f", a={"$ref": "#/$defs/none"})]}, "tools", "none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(served: Served, name: str) -> None:
    fields, param, words = REFUSED[name]
    for stream in (False, True):
        error = served.refusal(**fields, stream=stream)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert words in error["message"]
        assert "arguments_0" not in error["message"]


def test_an_empty_expression_gives_the_empty_text(served: Served) -> None:
    (choice,) = served.chat(messages=CHAT, extra_body={"guided_regex": ""}).choices
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
