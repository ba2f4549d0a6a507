"""Tests what the fields mean that unmodified clients send, by the models of the bodies alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dynatree.gateway.requests import ChatRequest, CompletionRequest, TokenizeRequest
from dynatree.gateway.tools import Tool

USER: Any = {"role": "user", "content": "Who are you?"}
# Messages that clients send, and as what the chat template reads them.
MESSAGES: dict[str, tuple[Any, Any]] = {
    "lm-eval's": ({**USER, "type": "text"}, USER),
    "an item": ({**USER, "type": "message"}, USER),
    "of parts": (
        {
            "role": "user",
            "type": "text",
            "content": [{"type": "text", "text": "Who are "}, {"type": "text", "text": "you?"}],
        },
        USER,
    ),
    "a developer's": ({"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be brief."}),
    "without thoughts": ({**USER, "reasoning_content": None, "reasoning": ""}, USER),
    "a result without content": (
        {"role": "tool", "tool_call_id": "1"},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_the_template_reads(name: str) -> None:
    sent, expected = MESSAGES[name]
    body = {"messages": [USER, sent]}
    assert ChatRequest.model_validate(body).chat == [USER, expected]
    assert TokenizeRequest.model_validate(body).text_or_chat == [USER, expected]


@settings(max_examples=50, deadline=None)
@given(
    st.none() | st.text(), st.none() | st.text(), st.sampled_from([("reasoning",), ("reasoning_content", "reasoning")])
)
def test_what_the_assistant_thought_stands_before_its_content(
    thought: str | None, content: str | None, fields: tuple[str, ...]
) -> None:
    message = {"role": "assistant", "content": content, **dict.fromkeys(fields, thought)}
    [read] = ChatRequest.model_validate({"messages": [message]}).chat
    before = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    assert read == {"role": "assistant", "content": before + (content or "")}


@pytest.mark.parametrize(
    ("fields", "tool_format", "several"),
    [
        ({}, "hermes", True),
        ({"parallel_tool_calls": True}, "mistral", True),
        ({"parallel_tool_calls": False}, "hermes", False),
        ({"parallel_tool_calls": True}, "llama3", False),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "hermes", False),
    ],
)
def test_several_calls_are_the_requests_and_the_templates_choice(
    fields: dict[str, Any], tool_format: str, several: bool
) -> None:
    body = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}], **fields}
    assert ChatRequest.model_validate(body).several_calls(tool_format) == several


def test_a_functions_type_says_nothing() -> None:
    function = {"name": "f", "description": "a"}
    [plain, typed] = [
        Tool.model_validate({"type": "function", "function": {**function, **more}})
        for more in ({}, {"type": "function"})
    ]
    assert typed.described == plain.described
    with pytest.raises(ValidationError, match="function"):
        Tool.model_validate({"type": "function", "function": {**function, "type": "other"}})


def test_a_negative_length_is_that_of_the_context_in_chats_alone() -> None:
    for name in ("max_tokens", "n_predict"):
        assert ChatRequest.model_validate({"messages": [USER], name: -1}).new_tokens is None
        with pytest.raises(ValidationError):
            CompletionRequest.model_validate({"prompt": "a", name: -1})


@pytest.mark.parametrize("schema", [None, {}, {"type": "array", "items": {"type": "integer"}}])
def test_a_format_of_objects_may_have_a_schema(schema: Any) -> None:
    body = {"prompt": "a", "response_format": {"type": "json_object", "schema": schema}}
    assert CompletionRequest.model_validate(body).constraint == {"json_schema": schema or {"type": "object"}}
