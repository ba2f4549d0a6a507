"""Tests answers in OpenAI's Harmony format, in which gpt-oss writes: how they are parted, asked for and served."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import jsonschema_rs
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dynatree import embedded
from dynatree.common.grammar import Grammar, GrammarKind
from dynatree.draft.text.prompts import Message, PromptEncoder
from dynatree.engine.grammar.compiler import GrammarCompiler
from dynatree.engine.model.vocabulary import token_bytes
from dynatree.gateway.harmony import HarmonyReader, harmony_grammar
from dynatree.gateway.requests import ChatRequest
from dynatree.gateway.tools import Tool
from tests.gateway.test_structured import CHAT, PARAMETERS, SCHEMA, TOOLS
from tests.support.allowed import allowed_tokens
from tests.support.gateways import KEY, running_gateway
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

SPECIAL = [f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end", "return", "call")]
TEMPLATE = """{%- if tools %}{{- '<|start|>developer<|message|># Tools ' }}{{- tools | tojson }}{{- '<|end|>' }}
{%- endif %}{%- for message in messages %}{%- if message.tool_calls %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
{{- '<|start|>assistant to=functions.' + message.tool_calls[0].function.name }}
{{- '<|channel|>commentary json<|message|>' }}{{- message.tool_calls[0].function.arguments | tojson }}{{- '<|call|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
FUNCTIONS = ("weather", "add")
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
Parts = tuple[str, str, list[tuple[str, Any]]]  # reasoning, content, and the name and the arguments of each call


def read(pieces: Sequence[str], **options: Any) -> Parts:
    reader = HarmonyReader(FUNCTIONS, **options)
    reasoning, content, calls = "", "", []
    for part in (*(lambda piece=piece: reader.push(piece) for piece in pieces), reader.end):
        told, found = part()
        reasoning, content = reasoning + reader.reasoning, content + told
        calls += [(call.name, json.loads(call.arguments)) for call in found]
    assert reader.calls == len(calls)
    return reasoning, content, calls


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>An <answer>|",
            ("So.", "An <answer>|", []),
        ),
        ("<|channel|>final<|message|>Yes<|return|>", ("", "Yes", [])),
        (f"<|channel|>analysis<|message|>Sum<|end|><|start|>assistant{CALL}<|call|>", ("Sum", "", [("add", {"a": 1})])),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', ("", "", [("add", {"a": 1})])),
        ("<|channel|>analysis to=functions.add code<|message|>{}", ("", "", [("add", {})])),
        (f"{CALL}<|call|><|start|>assistant{CALL}", ("", "", [("add", {"a": 1})] * 2)),
        (
            "<|channel|>commentary<|message|>First I add.<|end|><|start|>assistant" + CALL,
            ("", "First I add.", [("add", {"a": 1})]),
        ),
        ("<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}", ("", "{}", [])),
        ('<|channel|>commentary to=functions.add json<|message|>{"a": ', ("", '{"a": ', [])),
        ("<|channel|>commentary to=functions.add json<|message|>[1]", ("", "[1]", [])),
        ("An answer without headers <|", ("", "An answer without headers <|", [])),
        ("go on<|end|><|start|>assistant<|channel|>final<|message|>, so", ("", "go on, so", [])),
        ("<|channel|>analysis<|message|>cut sho", ("cut sho", "", [])),
        ("<|channel|>analy", ("", "", [])),
        ("", ("", "", [])),
    ],
)
def test_the_parts_of_an_answer(text: str, parts: Parts) -> None:
    assert read([text]) == read(list(text)) == parts


def test_calls_behind_the_only_one_are_dropped() -> None:
    assert read([f"{CALL}<|call|><|start|>assistant{CALL}"], several=False) == ("", "", [("add", {"a": 1})])


WORDS = st.sampled_from(
    [
        *SPECIAL,
        "analysis",
        "final",
        "commentary",
        " to=functions.add",
        "assistant",
        '{"a": 1}',
        "<|",
        "|>",
        "<",
        " ",
        "é",
    ]
)


@settings(deadline=None)
@given(st.lists(WORDS, max_size=14).map("".join), st.lists(st.integers(0, 80), max_size=6))
def test_how_a_text_is_cut_changes_nothing(text: str, cuts: list[int]) -> None:
    ends = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    assert read([text[begin:end] for begin, end in pairwise(ends)]) == read([text])


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_fixture() -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded.target_path())
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("schema", [None, SCHEMA])
@pytest.mark.parametrize("tools", [True, False])
def test_what_a_grammar_allows_is_read_as_a_call_or_as_an_answer(tokenizer: Any, schema: Any, tools: bool) -> None:
    """The texts are random walks, whose thoughts end soon."""
    if not tools and schema is None:
        return
    end, random = tokenizer.convert_tokens_to_ids("<|end|>"), Random(3)
    compiler, vocabulary = GrammarCompiler(tokenizer, [tokenizer.eos_token_id]), token_bytes(tokenizer)
    chosen = [Tool.model_validate(tool) for tool in TOOLS] if tools else []
    grammar = Grammar(GrammarKind.LARK, harmony_grammar(chosen, schema))
    thoughts = kinds = 0
    for _ in range(12):
        state: Any = compiler.state(grammar)
        text = b""
        while not state.allows(tokenizer.eos_token_id):
            allowed = allowed_tokens(state, len(vocabulary))
            token = end if end in allowed else random.choice(allowed)
            state, text = state.after(token), text + vocabulary[token]
        reasoning, content, calls = read([text.decode()])
        thoughts += bool(reasoning)
        if calls:
            [(name, arguments)] = calls
            jsonschema_rs.validate(PARAMETERS[name], arguments)
            assert (tools, content) == (True, "")
            kinds |= 1
        else:
            jsonschema_rs.validate(SCHEMA, json.loads(content))
            kinds |= 2
    assert 0 < thoughts < 12
    assert kinds == tools + 2 * (schema is not None)


@pytest.fixture(scope="module", name="client")
def client_fixture(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("harmony")
    size = -(-len(tokenizer) // 64) * 64
    target = save_random_model(folder / "target", "llama", 3, max_position_embeddings=2048, vocab_size=size)
    tokenizer.save_pretrained(target)
    draft = save_noisy_copy(folder / "draft", target, seed=4)
    with (
        running_services(folder, target, draft) as services,
        running_gateway(services.draft_address) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


def asked(client: openai.OpenAI, tokenizer: Any, **options: Any) -> dict[str, Any]:
    """Ask for an answer whole and as a stream, whose parts are the same; thoughts end at once."""
    bias = {str(tokenizer.convert_tokens_to_ids("<|end|>")): 100}
    options = {"model": "target", "messages": CHAT, "seed": 5, "max_tokens": 300, "logit_bias": bias, **options}
    message = client.chat.completions.create(**options).choices[0].message.model_dump()
    streamed: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for chunk in client.chat.completions.create(**options, stream=True):
        delta = chunk.choices[0].delta.model_dump()
        for name in ("content", "reasoning_content"):
            streamed[name] += delta.get(name) or ""
        streamed["calls"] += [each["function"] for each in delta.get("tool_calls") or ()]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    whole = {"content": message["content"] or "", "reasoning_content": message.get("reasoning_content", "")}
    assert {**whole, "calls": calls} == {
        **streamed,
        "calls": [{name: each[name] for name in ("arguments", "name")} for each in streamed["calls"]],
    }
    return {**whole, "calls": calls}


def test_answers_are_served_in_parts(client: openai.OpenAI, tokenizer: Any) -> None:
    seen = set()
    for seed in range(6):
        forced = asked(client, tokenizer, tools=TOOLS, tool_choice="required", seed=seed)
        [call] = forced["calls"]
        jsonschema_rs.validate(PARAMETERS[call["name"]], json.loads(call["arguments"]))
        format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        limited = asked(client, tokenizer, response_format=format_, seed=seed)
        jsonschema_rs.validate(SCHEMA, json.loads(limited["content"]))
        seen |= {bool(each["reasoning_content"]) for each in (forced, limited)}
        either = asked(client, tokenizer, response_format=format_, tools=TOOLS, seed=seed)
        assert bool(either["calls"]) != bool(either["content"])
    assert seen == {True, False}, "some answers begin with a thought"


def test_special_tokens_are_in_the_text_on_request(client: openai.OpenAI, tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    options: Any = {"model": "target", "messages": CHAT, "max_tokens": 3, "logit_bias": {str(end): 1000}}
    for skips, text in ((False, "<|end|>" * 3), (True, "")):
        answer = client.chat.completions.create(**options, extra_body={"skip_special_tokens": skips})
        assert answer.choices[0].message.content == text


def test_reasoning_goes_back_as_the_template_writes_it(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer)
    assert encoder.tool_format == "harmony"
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    body = {
        "messages": [
            {"role": "user", "content": "1?"},
            {"role": "assistant", "reasoning_content": "Think.", "content": "Yes."},
            {"role": "user", "content": "2?"},
            {"role": "assistant", "reasoning_content": "Call.", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "a"},
        ]
    }
    chat = ChatRequest.model_validate(body).chat
    messages = [
        Message(each["role"], each["content"], tool_calls=json.dumps(each.get("tool_calls", []))) for each in chat
    ]
    text = tokenizer.decode(encoder.chat(messages, special_tokens=False))
    assert "<think>" not in text
    assert "<|start|>assistant<|message|>Yes.<|end|>" in text
    assert "<|channel|>analysis<|message|>Call.<|end|>" in text
    assert "to=functions.add<|channel|>commentary json<|message|>{}<|call|>" in text


def test_a_text_that_is_limited_as_a_whole_is_not_parted() -> None:
    for fields, parted in (
        ({}, True),
        ({"guided_regex": "a"}, False),
        ({"guided_json": "{}"}, False),
        ({"guided_json": {}}, True),
        ({"skip_special_tokens": False}, False),
    ):
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
        assert body.in_harmony("harmony") == parted, fields
        assert not body.in_harmony("hermes")
