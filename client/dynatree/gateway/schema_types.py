"""The types that JSON schemas allow, as far as a look at a schema tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
_DEEPEST = 8  # schemas within schemas that are looked at


def types(schema: Any, root: Schema, depth: int = 0) -> set[str]:
    """Return the types that a schema allows; empty if it does not tell. References count from `root`."""
    schema = resolved(schema, root)
    if depth > _DEEPEST:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return set().union(*map(types_of, values))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            each = [types(alternative, root, depth + 1) for alternative in schema[key]]
            return set().union(*each) if all(each) else set()
    return set()


def types_of(value: Any) -> set[str]:
    """Return the types of JSON schemas that a value has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == value // 1 else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


def resolved(schema: Any, root: Schema) -> Schema:
    """Return the schema that a schema refers to, or itself; empty if there is none. References count from `root`."""
    for _ in range(_DEEPEST + 1):
        if not isinstance(schema, Mapping):
            return {}
        if not isinstance(schema.get("$ref"), str):
            return schema
        target: Any = root
        for part in schema["$ref"].removeprefix("#").split("/")[1:]:
            target = target.get(part) if isinstance(target, Mapping) else None
        schema = target
    return {}
