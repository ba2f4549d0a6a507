"""Calls of functions in the XML of Qwen3-Coder, with a tag for each parameter: their grammar, and how they are read.

    <function=NAME>
    <parameter=PARAMETER>
    VALUE
    </parameter>
    </function>

A text is written as it is, other values as JSON; templates write the constants of Python in earlier calls. Models may
leave out line breaks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dynatree.gateway.schema_types import Schema, types, types_of

BEGIN = "<function="
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>\s*")
_PARAMETER_BEGIN = "<parameter="
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n(?:(.*?)\n)??</parameter>\n(?=<parameter=|</function>)", re.DOTALL)
_LOOSE = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL)
_FUNCTION_END = re.compile(r"</function>\s*")
_PYTHON = {"True": True, "False": False, "None": None}
# Keywords of an object's schema, and of a text's, whose meaning the grammar keeps.
_OF_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXT = {"type", "enum"}
_NOTES = {"title", "description", "default", "examples", "$schema", "strict", "deprecated"}
_DEFINITIONS = ("$defs", "definitions")


def objects(text: str, functions: Mapping[str, Schema]) -> Iterator[Any]:
    """Yield each call of a text as an object with `name` and `arguments`; None for anything else.

    Args:
        text: One or more calls.
        functions: The schema of the parameters of each function, by name.
    """
    place, parameter = 0, _PARAMETER
    while place < len(text):
        begun = _FUNCTION.match(text, place)
        if begun is None or begun[1] not in functions:
            yield None
            return
        arguments, place = {}, begun.end()
        while text.startswith(_PARAMETER_BEGIN, place) and (
            found := parameter.match(text, place) or (parameter := _LOOSE).match(text, place)
        ):
            arguments[found[1]] = _value(found[2] or "", found[1], functions[begun[1]])
            place = found.end()
        ended = _FUNCTION_END.match(text, place)
        if ended is None:
            yield None
            return
        place = ended.end()
        yield {"name": begun[1], "arguments": arguments}


def _value(text: str, name: str, schema: Schema) -> Any:
    """Return a parameter's value: what the text spells if the schema allows a value of its type, else the text."""
    properties = schema.get("properties")
    allowed = types(properties.get(name), schema) if isinstance(properties, dict) else set()
    try:
        value = _PYTHON[text] if text in _PYTHON else json.loads(text, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) or (allowed and not allowed & types_of(value)) else value


def finite(text: str) -> float:
    """Return a number that JSON can spell.

    Raises:
        ValueError: The text is that of another number.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} cannot be written as JSON")
    return value


def call_rules(rule: str, name: str, schema: Schema, notes: Schema) -> list[str] | None:
    """Return the Lark rules of a call, the first named `rule`; None if a value could not be told from its text.

    Args:
        rule: Name of the first rule; those of others begin with it.
        name: The function.
        schema: Of its parameters.
        notes: Keywords that the JSON schemas of values get.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.keys() - _OF_OBJECT - _NOTES or not isinstance(properties, dict) or not isinstance(required, list):
        return None
    if not all(each in properties for each in map(str, required)):
        return None
    parts, rules = [], []
    for place, (parameter, each) in enumerate(properties.items()):
        own = f"{rule}_{place}"
        value = _value_rule(own, each, schema, notes)
        if value is None or re.search(r"[>\n]", parameter):
            return None
        parts.append(own + "?" * (parameter not in required))
        rules += [f"{own}: {json.dumps(f'<parameter={parameter}>{chr(10)}', ensure_ascii=False)} {own}_value", value]
    body = " ".join([json.dumps(f"{BEGIN}{name}>\n"), *parts, json.dumps("</function>")])
    return [f"{rule}: {body}", *rules]


def _value_rule(rule: str, schema: Any, root: Schema, notes: Schema) -> str | None:
    """Return the rule of a value and its end; None if its schema does not tell a text from other values."""
    end = "\n</parameter>\n"
    allowed = types(schema, root)
    if allowed == {"string"}:
        if schema.keys() - _OF_TEXT - _NOTES:
            return None
        if "enum" not in schema:
            return f"{rule}_value[suffix={json.dumps(end)}]: /(?s:.*)/"
        if not all(isinstance(each, str) and end not in f"{each}\n" for each in schema["enum"]):
            return None
        return f"{rule}_value: " + " | ".join(json.dumps(f"{each}{end}", ensure_ascii=False) for each in schema["enum"])
    refers = re.findall(r'"\$ref": "([^"]*)"', json.dumps([schema, *(root.get(key) for key in _DEFINITIONS)]))
    local = all(each.startswith(("#/$defs/", "#/definitions/")) for each in refers)
    if not allowed or "string" in allowed or not local:
        return None
    whole = {**notes, **{key: root[key] for key in _DEFINITIONS if key in root}, **schema}
    return f"{rule}_value: {rule}_json {json.dumps(end)}\n{rule}_json: %json {json.dumps(whole)}"
