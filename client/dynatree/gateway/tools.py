"""Tools: the fields of requests that offer them, the grammar that asks for a call, and the calls in an answer."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from dynatree.gateway.no_effect import Body

MAX_TOOLS = 128
MAX_CALLS = 128  # of a message
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"  # Hermes, Qwen and SmolLM write a call between them
_MARKERS = ("[TOOL_CALLS]", "<|python_tag|>")  # Mistral and Llama 3 may write one before the calls
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates accept no other length

_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Body):
    """A function that the model may call; `strict` changes nothing, since a forced call always follows the schema."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


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
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    @property
    def described(self) -> dict[str, Any]:
        """The call as chat templates read it: with its arguments as an object, if they are JSON."""
        arguments: Any = self.function.arguments
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def call_grammar(tools: Sequence[Tool], tool_format: str, *, several: bool) -> str:
    """Return the Lark grammar of one call, or of `several`, of some functions in the format of a chat template."""
    key = "parameters" if tool_format == "llama3" else "arguments"
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, key: tool.function.parameters or {"type": "object"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    rules = [f"call_{place}: %json {json.dumps({**call, 'x-guidance': layout})}" for place, call in enumerate(calls)]
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(calls))))
    begin, end, between = {
        "llama3": ("", "", "; "),
        "mistral": ("[", "]", ", "),
    }.get(tool_format, (f"{CALL_BEGIN}\n", f"\n{CALL_END}", f"\n{CALL_END}\n{CALL_BEGIN}\n"))
    more = f" ({json.dumps(between)} call)*" if several else ""
    start = " ".join([json.dumps(begin)] * bool(begin) + ["call" + more] + [json.dumps(end)] * bool(end))
    return "\n".join([f"start: {start}", *rules])


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

    Calls are JSON objects with `name` and `arguments` or `parameters`: between `<tool_call>` and `</tool_call>`, or,
    one or more of them or a list, as the whole answer.

    Args:
        names: The names of the functions.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._pending = ""
        self._begun = False  # whether the answer has shown something that is not white space
        self._whole = False  # whether the whole answer may be calls
        self.calls = 0

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text; return the next text of the content, and the calls that are complete."""
        self._pending += text
        if not self._begun and not self._begins():
            return "", []
        if self._whole:
            return "", []
        return self._parts(final=False)

    def end(self) -> tuple[str, list[Call]]:
        """Return the rest of the content and of the calls."""
        if self._whole or not self._begun:
            calls = self._calls_in(_without_marker(self._pending))
            if calls:
                self._pending = ""
                return "", calls
        return self._parts(final=True)

    def _begins(self) -> bool:
        """Whether enough text has come to tell whether the whole answer may be calls."""
        text = self._pending.lstrip()
        if not text or any(marker.startswith(text) for marker in _MARKERS):
            return False
        self._begun = True
        self._whole = text.startswith(("{", "[{", *_MARKERS)) or text.rstrip() == "["
        return True

    def _parts(self, *, final: bool) -> tuple[str, list[Call]]:
        content: list[str] = []
        calls: list[Call] = []
        while True:
            before, begin, inside = self._pending.partition(CALL_BEGIN)
            if not begin:
                break
            inside, end, behind = inside.partition(CALL_END)
            if not end and not final:
                break
            found = self._calls_in(inside)
            raw = before if found else before + begin + inside + end
            content.append(raw)
            calls += found
            self._pending = behind.lstrip("\n") if found else behind
        if final or not begin:
            kept = 0 if final else _open_end(self._pending)
            content.append(self._pending[: len(self._pending) - kept])
            self._pending = self._pending[len(self._pending) - kept :]
        else:
            content.append(before)
            self._pending = self._pending[len(before) :]
        text = "".join(content)
        return (text.rstrip() if calls or self.calls else text), calls

    def _calls_in(self, text: str) -> list[Call]:
        """Return the calls of a text; none if it is anything else."""
        calls = []
        for found in _objects(text):
            arguments = found.get("arguments", found.get("parameters", {})) if isinstance(found, dict) else None
            if not isinstance(arguments, dict) or found.get("name") not in self._names:
                return []
            id_ = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
            calls.append(Call(id_, found["name"], json.dumps(arguments, ensure_ascii=False)))
        self.calls += len(calls)
        return calls


def _without_marker(text: str) -> str:
    text = text.strip()
    for marker in _MARKERS:
        text = text.removeprefix(marker)
    return text


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, and the elements of lists among them; None for anything else."""
    decoder, place = json.JSONDecoder(), 0
    text = text.strip()
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            yield None
            return
        yield from value if isinstance(value, list) else [value]
        if between := re.compile(r"[\s;,]*").match(text, place):
            place = between.end()


def _open_end(text: str) -> int:
    """Return the length of the text's end that may begin `CALL_BEGIN`."""
    return next((size for size in range(len(CALL_BEGIN) - 1, 0, -1) if text.endswith(CALL_BEGIN[:size])), 0)
