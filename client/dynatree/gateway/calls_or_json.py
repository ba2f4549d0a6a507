"""Answers that are either calls of functions or JSON of a format: their grammar, and how their beginning tells which.

OpenAI's `response_format` limits the text of an answer, not its calls. So where a request has `tools` too, an answer is
either. JSON of the format must not begin as a call does, else neither the grammar nor a reader could tell which it is:

    Hermes, Qwen3-Coder   <tool_call>                      no JSON begins so
    Mistral               [                                JSON of an object does not
    Mistral, named        NAME                             JSON of an object does not
    Llama 3               {"name": "NAME", "parameters":   an object whose schema forbids `parameters` does not
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynatree.gateway.errors import ApiError
from dynatree.gateway.schema_types import resolved, types
from dynatree.gateway.tools import CALL_BEGIN, COMBINING, Tool, call_grammar, written_format

_OBJECTS_ONLY = 'expected a schema of the type "object"'
_CLOSED_ONLY = (
    'expected a schema with the type "object" and "additionalProperties": false that neither has the property '
    "'parameters' nor combines schemas"
)


def calls_or_json_grammar(tools: Sequence[Tool], schema: Mapping[str, Any], tool_format: str, *, several: bool) -> str:
    """Return the Lark grammar of one call, or of `several`, or else of JSON that follows a schema.

    Raises:
        ApiError: The JSON might begin as a call in this format does.
    """
    expected = _expected(schema, tool_format)
    if expected is not None:
        reason = "response_format with tools: its JSON could not be told from this target's calls of functions"
        raise ApiError(400, f"{reason}; {expected}", param="response_format", code="unsupported_value")
    calls = call_grammar(tools, tool_format, several=several)
    return f"start: calls | format\ncalls{calls.removeprefix('start')}\nformat: %json {written_format(schema)}"


def call_openings(tools: Sequence[Tool], tool_format: str) -> list[str]:
    """Return the texts that calls begin with in the grammar, and JSON of a format does not."""
    names = [tool.function.name for tool in tools]
    return {
        "llama3": [f'{{"name": "{name}", "parameters": ' for name in names],
        "mistral": ["["],
        "mistral_named": names,
    }.get(tool_format, [f"{CALL_BEGIN}\n"])


def _expected(schema: Mapping[str, Any], tool_format: str) -> str | None:
    """Return which schemas can be told from calls in a format; None if this one can."""
    if tool_format in ("mistral", "mistral_named"):
        return None if types(schema, schema) == {"object"} else _OBJECTS_ONLY
    if tool_format != "llama3":
        return None
    root = resolved(schema, schema)
    properties = root.get("properties", {})
    closed = root.get("type") == "object" and root.get("additionalProperties") is False
    closed = closed and isinstance(properties, dict) and "parameters" not in properties
    # another layout than that of calls would give the JSON other lexemes
    apart = closed and "x-guidance" not in schema and COMBINING.isdisjoint(root) and "allOf" not in root
    return None if apart else _CLOSED_ONLY
