"""Prepares JSON schemas for llguidance: what it would answer wrongly is refused by name, or written in another way."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from dynatree.common.errors import GrammarError
from dynatree.common.valid_unicode import check_unicode

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # their values are schemas
_DATA = ("const", "enum", "default", "examples")  # their values are no schemas
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_IGNORED = ("contentEncoding", "contentMediaType")  # llguidance allows any text
_LAYOUT = ("item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern")  # of `x-guidance`
_LARGEST = 2**53  # llguidance reads numbers as floats of 64 bits
_SLIVER = 1e-9
_UNSPELT = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # control characters without an escape of one letter

# White space as ECMA-262 defines it for `\s`; that of Rust has U+0085 and lacks U+FEFF.
_SPACES = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)

# RFC 3339, section 5.6, with the days of each month, and without leap seconds, whose rules need the time zone.
_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]+)?([zZ]|[+-]{_CLOCK})"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}


def prepared(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema for llguidance whose texts are all valid under the original schema.

    Raises:
        GrammarError: The schema has a keyword or a value that llguidance would not follow, or is not valid Unicode.
        RecursionError: It is nested too deeply.
    """
    check_unicode("the JSON schema", json.dumps(schema, ensure_ascii=False), GrammarError)
    out = _followed(schema)
    schemas = [*_schemas_in(out)]
    while _narrow(schemas):  # a bound that has moved is no integer, so its opposite ones may have to move too
        pass
    return out


def _followed(schema: dict[str, Any]) -> dict[str, Any]:
    _check(schema)
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            out[key] = value
        elif key == "patternProperties" and isinstance(value, dict):
            out[key] = {_with_spaces(pattern): _prepared(each) for pattern, each in value.items()}
        elif key in _MAPS and isinstance(value, dict):
            out[key] = {name: _prepared(each) for name, each in value.items()}
        elif key == "pattern" and isinstance(value, str):
            out[key] = _with_spaces(value)
        else:
            out[key] = _prepared(value)
    name = out.get("format")
    if isinstance(name, str) and name in _FORMATS:
        if not isinstance(out.setdefault("allOf", []), list):
            raise GrammarError("allOf is not a list")
        del out["format"]
        out["allOf"].append({"pattern": _FORMATS[name]})
    return out


def _prepared(value: Any) -> Any:
    if isinstance(value, list):
        return [_prepared(each) for each in value]
    return _followed(value) if isinstance(value, dict) else value


def _schemas_in(value: Any, *, by_name: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the schemas of a document, and the objects that hold some `by_name`, where any name may stand."""
    if isinstance(value, dict):
        yield value
        for key, each in value.items():
            if by_name or key not in _DATA:
                yield from _schemas_in(each, by_name=key in _MAPS and not by_name)
    elif isinstance(value, list):
        for each in value:
            yield from _schemas_in(each)


def _narrow(schemas: Sequence[dict[str, Any]]) -> bool:
    """Move an exclusive bound that is an integer inwards by a sliver if an opposite bound is less than 1 from it.

    Between the two, llguidance would include the exclusive one. It merges schemas, so that both may stand anywhere.

    Returns:
        Whether a bound has moved.
    """
    moved = False
    for exclusive, inclusive, others, whole, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), math.floor, 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), math.ceil, -1),
    ):
        opposite = [each[key] for each in schemas for key in others if isinstance(each.get(key), float)]
        near = {whole(bound) for bound in opposite if math.isfinite(bound) and not bound.is_integer()}
        for schema in schemas:
            bound = schema.get(exclusive)
            bound = schema.get(inclusive) if bound is True else bound  # as draft 4 writes it
            if isinstance(bound, int | float) and not isinstance(bound, bool) and bound in near:
                schema[exclusive] = bound + sign * max(_SLIVER, math.ulp(bound))
                moved = True
    return moved


def _check(schema: dict[str, Any]) -> None:
    for key in _IGNORED:
        if key in schema:
            raise GrammarError(f"{key} is not supported in a JSON schema")
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, dict):
        raise GrammarError("x-guidance is not an object")
    for key in guidance:
        if key not in _LAYOUT:
            raise GrammarError(f"x-guidance has the option {key!r}, expected one of {', '.join(_LAYOUT)}")
    for key in _NUMBERS:
        if not _is_of_64_bits(schema, key):
            _check_number(schema.get(key))
    for key in ("const", "enum"):
        _check_data(schema.get(key))
    required = schema.get("required")
    most = 1 + (len(required) if isinstance(required, list) else 0)
    fewest = schema.get("minProperties")
    if isinstance(fewest, int | float) and fewest > most:  # llguidance counts a property that is repeated
        raise GrammarError(
            f"minProperties is {fewest}, expected at most {most}, the number of required properties and one"
        )


def _is_of_64_bits(schema: dict[str, Any], key: str) -> bool:
    """Whether a bound of integers lies at or beyond those of 64 bits, which llguidance applies anyway."""
    bound = schema.get(key)
    if schema.get("type") != "integer" or not isinstance(bound, int):
        return False
    return bound >= 2**63 - 1 if key == "maximum" else key == "minimum" and bound <= -(2**63)


def _check_data(value: Any) -> None:
    if isinstance(value, str):
        if found := _UNSPELT.search(value):
            raise GrammarError(f"the JSON schema has a constant with the control character {found[0]!r}")
    elif isinstance(value, dict):
        for name, each in value.items():
            _check_data(name)
            _check_data(each)
    elif isinstance(value, list):
        for each in value:
            _check_data(each)
    else:
        _check_number(value)


def _check_number(value: Any) -> None:
    if isinstance(value, int | float) and abs(value) > _LARGEST:
        raise GrammarError(f"the JSON schema has the number {value}, expected numbers up to 2**53")


def _with_spaces(pattern: str) -> str:
    r"""Return a pattern with classes of ECMA-262's white space for `\s` and `\S`; classes may be nested."""
    classes = {"s": f"[{_SPACES}]", "S": f"[^{_SPACES}]"}
    return _ESCAPE.sub(lambda found: classes.get(found[1], found[0]), pattern)
