"""Grammars that are costly to compile or to follow, for tests of limits and for hostile traffic."""

from __future__ import annotations

import json
from typing import Any

from dynatree.common.grammar import Grammar, GrammarKind


def schema(value: Any) -> Grammar:
    """The grammar of a JSON schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, value if isinstance(value, str) else json.dumps(value))


def regex(text: str) -> Grammar:
    """The grammar of a regular expression."""
    return Grammar(GrammarKind.REGEX, text)


def an_object(**properties: Any) -> dict[str, Any]:
    """The schema of an object with just these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def nested(depth: int) -> str:
    """A schema of nested arrays."""
    return '{"items": ' * depth + "{}" + "}" * depth


def exploding(kind: str) -> dict[str, Any]:
    """A schema of 2^20 alternatives, as the keyword `kind` combines them."""
    parts = {f"s{each}": {kind: [{"$ref": f"#/$defs/s{each + 1}"}] * 2} for each in range(20)}
    return {"$defs": {**parts, "s20": an_object(x={"type": "integer"})}, "$ref": "#/$defs/s0"}


def crossed(count: int) -> dict[str, Any]:
    """A schema that both of two chains of alternatives must allow."""
    parts = {
        f"s{each}": {"anyOf": [{"$ref": f"#/$defs/s{each + 1}"}, an_object(**{f"p{each}": {"type": "null"}})]}
        for each in range(count)
    }
    return {"$defs": {**parts, f"s{count}": {}}, "allOf": [{"$ref": "#/$defs/s0"}, {"$ref": "#/$defs/s1"}]}


ENDLESS = an_object(b={"$ref": "#/$defs/a"})
COSTLY = {
    "regex that backtracks": regex("(a*)*b|(a|aa)+|(.*a){25}"),
    "regex with many states": regex("(a|b)*a(a|b){30}c"),
    "regex with many repetitions": regex("((a{1,100}){1,100}){1,100}"),
    "regex with parentheses": regex("(" * 60000 + "a" + ")" * 60000),
    "regex with parts": regex("(ab?)" * 20000),
    "pattern with many states": schema({"pattern": "(a|b)*a(a|b){30}c"}),
    "many patterns": schema({"allOf": [{"pattern": f"{chr(97 + each)}.*{chr(98 + each)}"} for each in range(16)]}),
    "exploding anyOf": schema(exploding("anyOf")),
    "exploding allOf": schema(exploding("allOf")),
    "exploding oneOf": schema(exploding("oneOf")),
    "crossed anyOf": schema(crossed(20)),
    "nested 100": schema(nested(100)),
    "nested 200": schema(nested(200)),
    "nested 400": schema(nested(400)),
    "nested 5000": schema(nested(5000)),
    "nested constant": schema('{"enum": [' + "[" * 400 + "]" * 400 + "]}"),
    "properties": schema(an_object(**{f"p{each}": {"type": "null"} for each in range(2500)})),
    "optional properties": schema({"properties": {f"p{each}": {"type": "null"} for each in range(4000)}}),
    "required properties": schema({"type": "object", "required": [f"p{each}" for each in range(5000)]}),
    "no base case": schema({"$defs": {"a": ENDLESS}, "$ref": "#/$defs/a"}),
    "references to itself": schema({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
    "long chain of references": schema(
        {
            "$defs": {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(2500)} | {"a2500": {}},
            "$ref": "#/$defs/a0",
        }
    ),
    "minItems": schema({"type": "array", "minItems": 10**9}),
    "maxItems": schema({"type": "array", "items": {"type": "null"}, "maxItems": 10**9}),
    "minLength": schema({"type": "string", "minLength": 10**9}),
    "maxLength": schema({"type": "string", "maxLength": 10**9, "pattern": "^[a-z]*$"}),
    "maxProperties": schema({"type": "object", "maxProperties": 10**9}),
    "large enum": schema({"enum": [f"value {each}" for each in range(8000)]}),
    "enum of objects": schema({"enum": [{"a": each} for each in range(8000)]}),
    "ambiguous rules": Grammar(GrammarKind.LARK, 'start: start start | x x x x | "a" |\nx: "a"* | x x'),
    "chain of rules": Grammar(
        GrammarKind.LARK, "start: r0\n" + "".join(f"r{each}: r{each + 1}\n" for each in range(9000)) + 'r9000: "b"'
    ),
    "chain of terminals": Grammar(
        GrammarKind.LARK, "start: R0\n" + "".join(f"R{each}: R{each + 1}\n" for each in range(9000)) + 'R9000: "b"'
    ),
    "nested rules": Grammar(GrammarKind.LARK, "start: " + "(" * 60000 + '"a"' + ")" * 60000),
}
