"""Tools: the fields of requests that offer them, the grammar that asks for a call, and the calls in an answer."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import from_json

from dynatree.gateway.no_effect import Body
from dynatree.gateway.xml_calls import BEGIN as XML_BEGIN
from dynatree.gateway.xml_calls import call_rules, finite, objects

MAX_TOOLS = 128
MAX_CALLS = 128  # of a message
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"  # Hermes, Qwen and SmolLM write a call between them
_MARKERS = ("[TOOL_CALLS]", "<|python_tag|>")  # Mistral and Llama 3 may write one before the calls
# Keywords of JSON schemas: beside `properties`, they say more of the same object; the others' values are no schemas.
COMBINING = frozenset(("anyOf", "oneOf", "$ref", "if", "dependentSchemas", "patternProperties", "minProperties"))
_DATA = frozenset(("const", "enum", "default", "examples"))
_MAPS = frozenset(("properties", "$defs", "definitions"))  # their values are schemas, by any name
# Of JSON in a Lark grammar, which would otherwise have any white space.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NOT_SPACE = re.compile(r"\S")
_OUTSIDE = re.compile(f'"|{CALL_BEGIN}|{CALL_END}')
_IN_STRING = re.compile(r'["\n]|\\[\s\S]')  # JSON's strings have no line breaks


def _begun(text: str) -> str:
    """Return a pattern of the beginnings of a text."""
    return "".join(f"(?:{re.escape(each)}" for each in text) + ")?" * len(text)


# By format, how else than with a tag calls may begin behind text, and which end of a text may begin them. From `last`
# on, the whole rest is calls, or nothing is. Marks in brackets are special tokens, which the text may lack.
_FIRST_KEYS = ('"name"', '"arguments"', '"type"', '"id"')
_BEGINS = {
    "qwen3_coder": "|(?=<function=(?:{known})>)",
    "mistral": rf"|(?P<last>\[TOOL_CALLS\]|\[\s*\{{{{\s*(?:{'|'.join(_FIRST_KEYS)}))",
    "mistral_named": r"|(?P<last>\[TOOL_CALLS\]|(?<![a-zA-Z0-9_-]){named}\{{)",
}
_ENDS = {
    "qwen3_coder": rf"<function=[a-zA-Z0-9_.-]*|{_begun(XML_BEGIN)}|",
    "mistral": rf"\[\s*(?:\{{\s*(?:{'|'.join(map(_begun, _FIRST_KEYS))}))?|{_begun('[TOOL_CALLS]')}|",
    "mistral_named": r"(?<![a-zA-Z0-9_.[\]-])[a-zA-Z0-9_.[\]-]+|",
}
_XML_END = re.compile(r"(?:</parameter>|<function=[^>\n]{1,128}>)\s{0,8}</function>\s{0,8}(?=</?tool_call>)")
_LONGEST_END = 200  # characters of `_XML_END`
_CALL_KEYS = frozenset(("name", "arguments", "parameters", "type", "id"))
_SURROGATE = re.compile("[\ud800-\udfff]")
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates accept no other length
_ID = f"[a-zA-Z0-9]{{{_ID_LENGTH}}}"

_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Body):
    """A function that the model may call; `strict` changes nothing, since a forced call always follows the schema."""

    type: Literal["function"] | None = None  # which some clients repeat here
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters and parameters.get("type", "object") != "object":
            raise ValueError('expected the schema of an object, with the type "object"')
        return parameters


class Tool(Body):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function

    @property
    def described(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        described = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**described, "parameters": parameters}}


class FunctionName(Body):
    """The name of a function."""

    name: _Name


class NamedTool(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    """A function that the assistant has called, with its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call in a message of the assistant; `index`, which streams have, changes nothing."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None

    @property
    def described(self) -> dict[str, Any]:
        """The call as chat templates read it: with its arguments as an object, if they are JSON or nothing.

        JSON that is deeply nested, or that UTF-8 cannot spell, stays text.
        """
        arguments: Any = self.function.arguments
        with suppress(ValueError):
            arguments = from_json(arguments or "{}")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)]


def _with_different_names(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError(f"two functions have the name {max(names, key=names.count)}")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_with_different_names)]


def call_grammar(tools: Sequence[Tool], tool_format: str, *, several: bool) -> str:
    """Return the Lark grammar of one call, or of `several`, of some functions in the format of a chat template.

    Qwen3-Coder's format writes a string and a number alike. Where a function's schema does not tell which is meant, the
    call is JSON, as in Hermes's format. A call's JSON has the lexemes that `%json` would give it: other JSON may be an
    alternative (calls_or_json.py).
    """
    key = "parameters" if tool_format == "llama3" else "arguments"
    rules = []
    for place, tool in enumerate(tools):
        parameters, notes = closed_parameters(tool)
        xml = tool_format == "qwen3_coder" and call_rules(f"call_{place}", tool.function.name, parameters, notes)
        if xml:
            rules += xml
            continue
        opening, closing = ["{", '"name"', ": ", f'"{tool.function.name}"', ", ", f'"{key}"', ": "], "}"
        if tool_format == "mistral_named":
            opening, closing = [tool.function.name], ""
        schema = json.dumps({**notes, **parameters, "title": notes["title"]})
        rules.append(f'call_{place}: {" ".join(map(json.dumps, opening))} arguments_{place} "{closing}"')
        rules.append(f"arguments_{place}: %json {schema}")
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(tools))))
    begin, end, between = {
        "llama3": ("", "", "; "),
        "mistral": ("[", "]", ", "),
        "mistral_named": ("", "", ""),
    }.get(tool_format, (f"{CALL_BEGIN}\n", f"\n{CALL_END}", f"\n{CALL_END}\n{CALL_BEGIN}\n"))
    more = f" ({json.dumps(between)} call){{0,{MAX_CALLS - 1}}}" if several else ""
    start = " ".join([json.dumps(begin)] * bool(begin) + ["call" + more] + [json.dumps(end)] * bool(end))
    return "\n".join([f"start: {start}", *rules])


def closed_parameters(tool: Tool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of a function's parameters, and the keys for its layout and its errors.

    The parameters are a schema of their own in any grammar, because their references count from their own root.
    """
    parameters = _closed({"type": "object", **(tool.function.parameters or {"properties": {}})})
    # errors name the title
    return parameters, {"x-guidance": LAYOUT, "title": f"parameters of the function {tool.function.name}"}


def written_format(schema: Mapping[str, Any]) -> str:
    """Return the schema of `response_format` for a grammar of calls or JSON, in the layout of calls by default."""
    own = schema.get("x-guidance", {})
    layout = {**LAYOUT, **own} if isinstance(own, dict) else own
    return json.dumps({**schema, "x-guidance": layout, "title": "response_format"})  # errors name the title


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have no properties that it does not name, where it says nothing of others.

    Clients leave `additionalProperties` out, and a small model invents properties without end. A schema that combines
    others for one object stays as it is.
    """

    def combines(value: Any) -> bool:
        if isinstance(value, list):
            return any(map(combines, value))
        if not isinstance(value, dict):
            return False
        together = "allOf" in value or ("properties" in value and not COMBINING.isdisjoint(value))
        return together or any(map(combines, value.values()))

    def closed(value: Any, *, by_name: bool = False) -> Any:
        if isinstance(value, list):
            return [closed(each) for each in value]
        if not isinstance(value, dict):
            return value
        changed = {
            name: each if name in _DATA and not by_name else closed(each, by_name=name in _MAPS and not by_name)
            for name, each in value.items()
        }
        properties, required = value.get("properties"), value.get("required", [])
        if value.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
            named = all(isinstance(name, str) and name in properties for name in required)
            return {"additionalProperties": False, **changed} if named else changed
        return changed

    return schema if combines(schema) else dict(closed(schema))


@dataclass(frozen=True)
class Call:
    """A call that an answer makes; `arguments` is JSON."""

    id: str
    name: str
    arguments: str

    @property
    def json(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Finds the calls in the text of an answer as it arrives. Text that is no call of a known function stays text.

    A call is a JSON object with `name` and `arguments` or `parameters`: between `<tool_call>` and `</tool_call>`, or,
    one or more of them or a list, as the whole answer. As the whole answer, calls may also be names, each with a JSON
    object of arguments after it (`_named`). In Mistral's formats, text may precede these. In that of Qwen3-Coder, a
    call may lack `<tool_call>`. White space beside calls is dropped. How the text is cut changes neither the content
    nor the calls, and a text without calls is the content.

    Args:
        functions: The schema of the parameters of each function, by name.
        openings: Texts that calls begin with. If there are some, an answer that begins otherwise is content.
        several: Whether the answer may have several calls. If not, the calls behind the first are dropped.
        tool_format: How the chat template writes calls.
    """

    def __init__(
        self,
        functions: Mapping[str, Mapping[str, Any]],
        openings: Sequence[str] = (),
        *,
        several: bool = True,
        tool_format: str = "",
    ) -> None:
        self._functions = functions
        self._names = names = functions.keys()
        firsts = [*(f'"name":"{name}"' for name in names), '"arguments"', '"parameters"', '"type"', '"id"']
        self._starts = (*_MARKERS, *(begin + first for begin in ("{", "[{") for first in firsts))
        known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        # As newer models of Mistral write it. The marks are special tokens, so the text may lack them, but not the id.
        named = rf"({known})(?:\[CALL_ID\])?(?:{_ID})?(?:\[ARGS\])?"
        self._named = re.compile(rf"\s*(?:\[TOOL_CALLS\]\s*)?{named}\s*(?={{)")
        self._before_arguments = re.compile(rf"(?:{known})[a-zA-Z0-9]{{0,{_ID_LENGTH}}}")
        self._begin = re.compile(CALL_BEGIN + _BEGINS.get(tool_format, "").format(known=known, named=named))
        self._open = re.compile(rf"(?:{_ENDS.get(tool_format, '')}{_begun(CALL_BEGIN)})\Z")
        self._openings = openings
        self._several = several
        self._plain: bool | None = None if openings else False  # whether it is content; None: too early to tell
        self._whole: bool | None = None  # whether the whole answer may be calls; None: too early to tell
        self._pending = ""  # text that is neither told as content nor part of a complete call
        self._place = 0  # where the search for the end of an open call goes on in it
        self._in_string = False  # whether that is in a string of the call's JSON
        self._behind_call = False  # whether the content so far ends with a call
        self.calls = 0
        self.reasoning = ""  # which stays content

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text; return the next text of the content, and the calls that are complete."""
        self._pending += text
        if self._plain is None:
            self._plain = self._is_plain()
        if self._plain is not False:
            told = self._pending if self._plain else ""
            self._pending = self._pending[len(told) :]
            return told, []
        if self._whole is None:
            self._whole = self._may_be_calls()
        return self._kept(*self._parts(final=False)) if self._whole is False else ("", [])

    def end(self) -> tuple[str, list[Call]]:
        """Return the rest of the content and of the calls."""
        if self._plain is not False:
            return self._pending, []
        if self._whole is not False and (calls := self._bare_calls(self._pending.strip())):
            return self._kept("", calls)
        return self._kept(*self._parts(final=True))

    def _kept(self, content: str, calls: list[Call]) -> tuple[str, list[Call]]:
        """Return the content, and the calls that the answer may have."""
        kept = calls if self._several else calls[: 1 - self.calls]
        self.calls += len(kept)
        return content, kept

    def _is_plain(self) -> bool | None:
        """Whether the answer is content, by its first characters; None if they are too few to tell."""
        if any(map(self._pending.startswith, self._openings)):
            return False
        return None if any(opening.startswith(self._pending) for opening in self._openings) else True

    def _may_be_calls(self) -> bool | None:
        """Whether the whole answer may be calls, by its first characters; None if they are too few to tell."""
        begun = "".join(self._pending.split())
        if begun.startswith(self._starts) or self._named.match(begun):
            return True
        unsure = any(start.startswith(begun) for start in (*self._starts, *self._names))
        return None if unsure or self._before_arguments.fullmatch(begun) else False

    def _parts(self, *, final: bool) -> tuple[str, list[Call]]:
        content: list[str] = []
        calls: list[Call] = []
        text, done = self._pending, 0
        while match := self._begin.search(text, done):
            begin, inside = match.span()
            last = match.lastgroup == "last"
            end = (len(text) if final else None) if last else self._end(text, inside, final)
            if end is None:
                break
            if last:
                found = self._bare_calls(text[begin:].strip())
            else:
                found = self._calls_in(self._objects_in(text[inside:end].strip()))
            ended = text.startswith(CALL_END, end)
            behind = end + len(CALL_END) if ended else inside + len(text[inside:end].rstrip())
            content.append(self._beside_calls(text[done:begin].rstrip() if found else text[done:behind]))
            calls += found
            self._behind_call |= bool(found)
            done = behind
        if final:
            told = len(text)
        else:  # white space is dropped if a call follows
            match = match or self._open.search(text, done)
            told = done + len(text[done : match.start() if match else None].rstrip())
        content.append(self._beside_calls(text[done:told]))
        self._pending, self._place = text[told:], max(self._place - told, 0)
        return "".join(content), calls

    def _end(self, text: str, inside: int, final: bool) -> int | None:
        """Return where the JSON at `inside` ends: at a tag that is not in a string; None if more text must tell."""
        first = _NOT_SPACE.search(text, inside)
        if first is not None and first[0] not in "{[":
            return self._end_of_xml(text, inside, first.start(), final)
        place = max(self._place, inside)
        while match := (_IN_STRING if self._in_string else _OUTSIDE).search(text, place):
            if match[0] in (CALL_BEGIN, CALL_END):
                self._place = 0
                return match.start()
            self._in_string ^= match[0][0] != "\\"
            place = match.end()
        unsure = text.endswith("\\") if self._in_string else len(CALL_END) - 1
        self._place = max(place, len(text) - unsure)
        return len(text) if final else None

    def _end_of_xml(self, text: str, inside: int, begin: int, final: bool) -> int | None:
        """Do `_end` for a call in XML; other text ends where it begins, at `inside`."""
        if not XML_BEGIN.startswith(text[begin : begin + len(XML_BEGIN)]):
            return inside
        if match := _XML_END.search(text, max(self._place, inside)):
            self._place = 0
            return match.end()
        self._place = max(inside, len(text) - _LONGEST_END)
        return len(text) if final else None

    def _objects_in(self, text: str) -> Iterator[Any]:
        """Yield the values between two tags: the calls in XML, or JSON."""
        return objects(text, self._functions) if text.startswith(XML_BEGIN) else _objects(text)

    def _beside_calls(self, text: str) -> str:
        """Return the next text of the content, without white space after a call."""
        if self._behind_call:
            text = text.lstrip()
            self._behind_call = not text
        return text

    def _bare_calls(self, text: str) -> list[Call]:
        """Return the calls that a text without tags is; none if it is anything else."""
        objects = (each if _is_bare_call(each) else None for each in _objects(_without_marker(text)))
        return self._calls_in(objects) or self._calls_in(self._named_objects(text))

    def _named_objects(self, text: str) -> Iterator[Any]:
        """Yield an object for each name with arguments after it; None for anything else."""
        place = 0
        while place < len(text):
            found = self._named.match(text, place)
            if found is None:
                yield None
                return
            arguments, place = _decoded(text, found.end())
            yield {"name": found[1], "arguments": arguments}

    def _calls_in(self, objects: Iterable[Any]) -> list[Call]:
        """Return the calls that these objects are; none if one is anything else."""
        calls = []
        for found in objects:
            name = found.get("name") if isinstance(found, dict) else None
            if not isinstance(name, str) or name not in self._names:
                return []
            call = called(name, found.get("arguments", found.get("parameters", {})))
            if call is None:
                return []
            calls.append(call)
        return calls


def called(name: str, arguments: Any) -> Call | None:
    """Return a call with a new id; None if the arguments are no object that can be written."""
    id_ = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
    try:
        return Call(id_, name, _written(arguments)) if isinstance(arguments, dict) else None
    except RecursionError:
        return None


def _is_bare_call(value: Any) -> bool:
    """Whether JSON without tags is written as a call: with arguments, and without keys of other objects with names."""
    return isinstance(value, dict) and value.keys() <= _CALL_KEYS and ("arguments" in value or "parameters" in value)


def _without_marker(text: str) -> str:
    for marker in _MARKERS:
        text = text.removeprefix(marker)
    return text


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, and the elements of lists among them; None for anything else."""
    text, place = text.strip(), 0
    while place < len(text):
        value, place = _decoded(text, place)
        yield from value if isinstance(value, list) else [value]
        if between := re.compile(r"[\s;,]*").match(text, place):
            place = between.end()


def only_value(text: str) -> Any:
    """Return the JSON value that a text is; None if it is anything else."""
    value, end = _decoded(text.strip(), 0)
    return value if end == len(text.strip()) else None


def _decoded(text: str, place: int) -> tuple[Any, int]:
    """Return the JSON value at a place of a text, and where it ends; None, and the text's end, if there is none."""
    try:
        return json.JSONDecoder(parse_float=finite, parse_constant=finite).raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, len(text)


def _written(arguments: dict[str, Any]) -> str:
    """Return arguments as JSON; other characters than ASCII stay as they are unless UTF-8 has no form for one."""
    text = json.dumps(arguments, ensure_ascii=False)
    return json.dumps(arguments) if _SURROGATE.search(text) else text
