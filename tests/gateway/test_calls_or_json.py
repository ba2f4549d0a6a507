"""Tests answers that are either calls of functions or JSON of a format: that the grammar is the union of both, and that
an answer is read as what it is, however it is cut.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from dynatree.common.grammar import Grammar, GrammarKind
from dynatree.gateway.calls_or_json import call_openings, calls_or_json_grammar
from dynatree.gateway.errors import ApiError
from dynatree.gateway.tools import call_grammar
from tests.gateway.test_calls import TOOLS, Read, allows, read, walks

FORMATS = ("hermes", "qwen3_coder", "llama3", "mistral", "mistral_named")
# JSON of these schemas looks like calls to a reader that looks for them everywhere.
NAMED = {
    "type": "object",
    "properties": {
        "name": {"enum": ["weather", "weathers", "add", 1]},
        "arguments": {"$ref": "#/$defs/none"},
        "note": {"enum": ['<tool_call>\n{"name": "add"}\n</tool_call>', 'add{"a": 1}', "é"]},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"none": {"type": "object", "properties": {}, "additionalProperties": False}},
}
REFERRED = {"$ref": "#/$defs/node", "$defs": {"node": {**NAMED, "properties": {"name": {"$ref": "#/$defs/none"}}}}}
REFERRED["$defs"] |= NAMED["$defs"]  # type: ignore[operator]
CLOSED: dict[str, dict[str, Any]] = {"named": NAMED, "referred": REFERRED}
ANY: dict[str, Any] = {"type": "object"}


def lark(tool_format: str, schema: dict[str, Any]) -> str:
    return calls_or_json_grammar(TOOLS, schema, tool_format, several=tool_format != "llama3")


def read_both_ways(text: str, tool_format: str) -> Read:
    """Read a text whole and by its characters."""
    whole, cut = (read(pieces, openings=call_openings(TOOLS, tool_format)) for pieces in ([text], list(text)))
    assert cut == whole
    return whole


def check_calls(text: str, tool_format: str) -> None:
    content, calls = read_both_ways(text, tool_format)
    assert content == ""
    assert calls
    for name, arguments in calls:
        [schema] = [tool.function.parameters for tool in TOOLS if tool.function.name == name]
        jsonschema_rs.validate(schema, arguments)


@pytest.mark.parametrize("schema", CLOSED)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_the_grammar_is_the_union_of_calls_and_json(tool_format: str, schema: str) -> None:
    union = lark(tool_format, CLOSED[schema])
    calls = call_grammar(TOOLS, tool_format, several=tool_format != "llama3")
    for text in walks(Grammar(GrammarKind.LARK, calls), 6):
        assert allows(union, text), text
        check_calls(text, tool_format)
    for text in walks(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(CLOSED[schema])), 12):
        assert allows(union, text), text
        assert read_both_ways(text, tool_format) == (text, [])
    for text in walks(Grammar(GrammarKind.LARK, union), 24, on=0.5):
        if text.startswith(tuple(call_openings(TOOLS, tool_format))):
            check_calls(text, tool_format)
        else:
            jsonschema_rs.validate(CLOSED[schema], json.loads(text))
            assert read_both_ways(text, tool_format) == (text, [])


OBJECTS = ('{"name": "weather", "arguments": {}}', '{"name": "add", "parameters": {"a": 1}}', '{"add": 1}', "{}")


@pytest.mark.parametrize("tool_format", ["hermes", "qwen3_coder", "mistral", "mistral_named"])
@pytest.mark.parametrize("text", OBJECTS)
def test_any_object_is_content(tool_format: str, text: str) -> None:
    assert allows(lark(tool_format, ANY), text)
    assert read_both_ways(text, tool_format) == (text, [])
    for other in ("Hello", f" {text}", f"{text} {text}", '{"a":1}'):
        assert not allows(lark(tool_format, ANY), other)


@pytest.mark.parametrize("tool_format", ["hermes", "mistral", "mistral_named"])
def test_a_format_may_have_its_own_layout(tool_format: str) -> None:
    union = lark(tool_format, {**NAMED, "x-guidance": {"whitespace_flexible": True, "key_separator": ":"}})
    [call] = walks(Grammar(GrammarKind.LARK, call_grammar(TOOLS, tool_format, several=False)), 1)
    assert allows(union, call)
    assert allows(union, '{\n  "name":1\n}')


@pytest.mark.parametrize(
    ("tool_format", "schema"),
    [
        *((each, {"type": "array"}) for each in ("llama3", "mistral", "mistral_named")),
        *((each, {}) for each in ("llama3", "mistral", "mistral_named")),
        *((each, {"type": ["object", "array"]}) for each in ("llama3", "mistral", "mistral_named")),
        ("mistral", {"$ref": "#/$defs/none"}),
        ("llama3", ANY),
        ("llama3", {**NAMED, "additionalProperties": True}),
        ("llama3", {**NAMED, "properties": {"name": {}, "parameters": {}}}),
        ("llama3", {**NAMED, "anyOf": [ANY]}),
        ("llama3", {**NAMED, "x-guidance": {"item_separator": ","}}),
        ("llama3", {"anyOf": [NAMED, NAMED]}),
    ],
)
def test_json_that_might_begin_as_a_call_does_is_refused(tool_format: str, schema: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="could not be told from this target") as refused:
        lark(tool_format, schema)
    assert (refused.value.status, refused.value.param) == (400, "response_format")


@pytest.mark.parametrize("tool_format", ["hermes", "qwen3_coder"])
def test_json_of_any_kind_stands_beside_calls_in_tags(tool_format: str) -> None:
    union = lark(tool_format, {"enum": [None, [1], "<tool_call>\n"]})
    for text in ("null", "[1]", json.dumps("<tool_call>\n")):
        assert allows(union, text)
        assert read_both_ways(text, tool_format) == (text, [])


def test_an_answer_that_ends_too_early_is_content() -> None:
    for text in ("", "<tool", "<tool_call>\n", '<tool_call>\n{"name": "add"'):
        assert read_both_ways(text, "hermes") == (text, [])
    for text in ("{", '{"name": "we', '{"name": "add", "parameters": {"a"'):
        assert read_both_ways(text, "llama3") == (text, [])
