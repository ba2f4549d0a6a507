"""Tests that half of a surrogate pair, which JSON can spell and UTF-8 cannot, is refused wherever it stands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import requests
from transformers import AutoTokenizer

from dynatree.v1 import draft_pb2, draft_pb2_grpc, tree_pb2
from tests.gateway.test_gateway_chats import TEMPLATE
from tests.support.gateways import running_gateway
from tests.support.model_zoo import save_random_model
from tests.support.services import running_services

HALF = r"\ud800"  # as JSON spells it
OBJECT = f'{{"const": "{HALF}"}}'


@dataclass(frozen=True)
class Served:
    """The draft service of a model with a chat template, and a gateway in front of it."""

    stub: draft_pb2_grpc.DraftServiceStub
    url: str


@pytest.fixture(scope="module", name="served")
def served_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("unicode")
    target = save_random_model(folder / "target", "llama", seed=3)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    with (
        running_services(folder, target, None) as services,
        running_gateway(services.draft_address) as gateway,
        grpc.insecure_channel(services.draft_address) as channel,
    ):
        yield Served(draft_pb2_grpc.DraftServiceStub(channel), gateway.url)  # type: ignore[no-untyped-call]


def refused(call: Callable[[], Iterable[Any]]) -> str:
    """Return the details of a call that is refused as invalid."""
    with pytest.raises(grpc.RpcError) as error:
        list(call())
    failure: Any = error.value
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT, failure
    return str(failure.details())


# Fields of a chat, and of its message, in JSON
CHATS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "tools": ({"tools": f'[{{"name": "{HALF}"}}]'}, {}),
    "tool_calls": ({}, {"tool_calls": f'[{{"name": "{HALF}"}}]'}),
    "chat_template_kwargs": ({"template_variables": f'{{"a": "{HALF}"}}'}, {}),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_with_half_of_a_pair_is_refused_by_the_draft_service(served: Served, name: str) -> None:
    fields, said = CHATS[name]
    message = draft_pb2.ChatMessage(role="assistant", content="Hi", **said)
    chat = draft_pb2.Chat(messages=[message], **fields)
    words = f"{name} is not valid Unicode: it has half of a surrogate pair"
    request = draft_pb2.GenerateRequest(chat=chat, max_new_tokens=1)
    assert refused(lambda: served.stub.Generate(request, timeout=60)).startswith(words)
    counted = draft_pb2.TokenizeRequest(chat=chat)
    assert refused(lambda: [served.stub.Tokenize(counted, timeout=60)]).startswith(words)


SCHEMA = "the JSON schema is not valid Unicode: it has half of a surrogate pair"
GRAMMARS: dict[str, tuple[tree_pb2.GrammarKind, str, str]] = {
    "a constant": (tree_pb2.GRAMMAR_KIND_JSON_SCHEMA, OBJECT, SCHEMA),
    "a name": (tree_pb2.GRAMMAR_KIND_JSON_SCHEMA, f'{{"properties": {{"{HALF}": {{}}}}}}', SCHEMA),
    "a pattern": (tree_pb2.GRAMMAR_KIND_JSON_SCHEMA, f'{{"patternProperties": {{"{HALF}": {{}}}}}}', SCHEMA),
    "a title": (tree_pb2.GRAMMAR_KIND_JSON_SCHEMA, f'{{"title": "{HALF}"}}', SCHEMA),
    "a layout": (tree_pb2.GRAMMAR_KIND_JSON_SCHEMA, f'{{"x-guidance": {{"item_separator": "{HALF}"}}}}', SCHEMA),
    "an option": (tree_pb2.GRAMMAR_KIND_JSON_SCHEMA, f'{{"x-guidance": {{"{HALF}": 1}}}}', SCHEMA),
    "a schema in a grammar": (tree_pb2.GRAMMAR_KIND_LARK, f"start: %json {OBJECT}", SCHEMA),
    "a name in a grammar": (tree_pb2.GRAMMAR_KIND_LARK, f'start: %json {{"properties": {{"{HALF}": {{}}}}}}', SCHEMA),
    "a text in a grammar": (tree_pb2.GRAMMAR_KIND_LARK, f'start: "{HALF}"', "hex escape"),
    "an expression": (tree_pb2.GRAMMAR_KIND_REGEX, HALF, "not a Unicode scalar value"),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_with_half_of_a_pair_is_refused_by_the_draft_service(served: Served, name: str) -> None:
    kind, text, words = GRAMMARS[name]
    grammar = tree_pb2.Grammar(kind=kind, text=text)
    request = draft_pb2.GenerateRequest(text="Hi", max_new_tokens=1, grammar=grammar)
    assert words in refused(lambda: served.stub.Generate(request, timeout=60))


USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "HALF"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "HALF"}}
BODIES: dict[str, dict[str, Any]] = {
    "content": {"messages": [{"role": "user", "content": "HALF"}]},
    "a part of content": {"messages": [{"role": "user", "content": [{"type": "text", "text": "HALF"}]}]},
    "role": {"messages": [{"role": "HALF", "content": "Hi"}]},
    "name": {"messages": [{**USER, "name": "HALF"}]},
    "reasoning_content": {"messages": [{"role": "assistant", "content": "Hi", "reasoning_content": "HALF"}]},
    "tool_call_id": {"messages": [{"role": "tool", "content": "Hi", "tool_call_id": "HALF"}]},
    "arguments of a call": {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
    "description of a tool": {"messages": [USER], "tools": [TOOL]},
    "parameters of a tool": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"HALF": {}}}}}],
    },
    "chat_template_kwargs": {"messages": [USER], "chat_template_kwargs": {"a": ["HALF"]}},
}
LIMITED: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "HALF"}}}},
    "guided_choice": {"guided_choice": ["HALF"]},
    "guided_regex": {"guided_regex": "HALF"},
    "guided_json as text": {"guided_json": OBJECT},
    "structured_outputs.json as text": {"structured_outputs": {"json": OBJECT}},
    "guided_grammar with a schema": {"guided_grammar": f"start: %json {OBJECT}"},
}


def check_refused(url: str, body: dict[str, Any]) -> None:
    """Check the answer to a body in which each `HALF` is half of a surrogate pair."""
    data = json.dumps({"max_tokens": 1, **body} if "tokenize" not in url else body).replace("HALF", HALF)
    answer = requests.post(url, data=data, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("name", BODIES)
def test_a_chat_with_half_of_a_pair_is_refused_by_the_gateway(served: Served, name: str) -> None:
    for path in ("v1/chat/completions", "tokenize"):
        check_refused(f"{served.url}/{path}", BODIES[name])


@pytest.mark.parametrize("name", LIMITED)
def test_a_limit_with_half_of_a_pair_is_refused_by_the_gateway(served: Served, name: str) -> None:
    check_refused(f"{served.url}/v1/chat/completions", {"messages": [USER], **LIMITED[name]})
    check_refused(f"{served.url}/v1/completions", {"prompt": "Hi", **LIMITED[name]})
