"""OpenAI's Harmony format, in which gpt-oss answers: messages between special tokens, each of a channel.

An answer thinks in the channel `analysis`, calls a function in a message to `functions.NAME`, and answers in `final`:

    <|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>ANSWER
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dynatree.gateway.tools import Call, Tool, called, closed_parameters, only_value, written_format

HARMONY = "harmony"  # the name of the format
_BODY = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
_LONGEST_END = 11  # characters
_OPEN = re.compile(r"<(?:\|[a-z]{0,8}\|?)?\Z")  # the beginning of a special token's name
_HEADERS = ("<|channel|>", "<|start|>", "<|message|>", " to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([a-zA-Z0-9_.-]+)")
_THOUGHT = """
thought: <|channel|> "analysis" <|message|> THOUGHT <|end|> <|start|> "assistant"
THOUGHT: /(.|\\n)+/"""


def harmony_grammar(tools: Sequence[Tool], schema: Mapping[str, Any] | None) -> str:
    """Return the Lark grammar of an answer that may think first, and then calls a function or answers by a schema.

    Args:
        tools: Functions of which one may be called; if there are none, the answer follows the schema.
        schema: JSON schema of the answer; None if it must be a call.
    """
    rules, answers = [], []
    for place, tool in enumerate(tools):
        header = json.dumps(f"commentary to=functions.{tool.function.name} ")
        parameters, notes = closed_parameters(tool)
        arguments = json.dumps({**notes, **parameters, "title": notes["title"]})
        rules.append(f'call_{place}: <|channel|> {header} <|constrain|> "json" <|message|> arguments_{place}')
        rules.append(f"arguments_{place}: %json {arguments}")
        answers.append(f"call_{place}")
    if schema is not None:
        rules += ['final: <|channel|> "final" <|message|> answer', f"answer: %json {written_format(schema)}"]
        answers.append("final")
    return "\n".join([f"start: thought? ({' | '.join(answers)})", *rules]) + _THOUGHT


class HarmonyReader:
    """Parts an answer into its reasoning, its content and its calls as it arrives.

    A message that is no call of a known function with a JSON object stays content, and so does a text without headers.
    How the text is cut changes no part.

    Args:
        functions: Names of the functions that may be called.
        several: Whether the answer may have several calls. If not, the calls behind the first are dropped.

    Attributes:
        calls: Number of calls so far.
        reasoning: Reasoning that the last `push` or `end` has read.
    """

    def __init__(self, functions: Collection[str], *, several: bool = True) -> None:
        self._functions = functions
        self._several = several
        self._pending = ""
        self._place = 0  # where the search for the end of a call's arguments goes on in it
        self._kind: str | None = None  # of the message whose body is read: "analysis", "final" or "call"
        self._function = ""
        self.calls = 0
        self.reasoning = ""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text; return the next text of the content, and the calls that are complete."""
        return self._read(text, final=False)

    def end(self) -> tuple[str, list[Call]]:
        """Return the rest of the content and of the calls."""
        return self._read("", final=True)

    def _read(self, text: str, *, final: bool) -> tuple[str, list[Call]]:
        self._pending += text
        self.reasoning = ""
        content: list[str] = []
        calls: list[Call] = []
        while self._pending and (self._kind or self._begun(final)):
            end = _ENDS.search(self._pending, self._place)
            if end is None and not final:
                if self._kind == "call":
                    self._place = max(len(self._pending) - _LONGEST_END, 0)
                else:
                    open_ = _OPEN.search(self._pending)
                    self._tell(content, open_.start() if open_ else len(self._pending))
                break
            at = end.start() if end else len(self._pending)
            if self._kind == "call" and (call := called(self._function, only_value(self._pending[:at]))):
                calls.append(call)
                self._pending = self._pending[at:]
            else:
                self._tell(content, at)
            self._kind, self._place = None, 0
            if end and end[0] not in _HEADERS:
                self._pending = self._pending.removeprefix(end[0])
        kept = calls if self._several else calls[: 1 - self.calls]
        self.calls += len(kept)
        return "".join(content), kept

    def _begun(self, final: bool) -> bool:
        """Read a header, or find that there is none; return whether a body follows."""
        begun = self._pending.lstrip("\n")
        if not any(header.startswith(begun[: len(header)]) for header in _HEADERS):
            self._kind = "final"
            return True
        header, mark, self._pending = self._pending.partition(_BODY)
        if not mark:
            self._pending = "" if final else header
            return False
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._function = recipient[1] if recipient else ""
        self._kind = "analysis" if channel and channel[1] == "analysis" else "final"
        if self._function in self._functions:
            self._kind = "call"
        return True

    def _tell(self, content: list[str], end: int) -> None:
        """Move the beginning of the body into its part."""
        if self._kind == "analysis":
            self.reasoning += self._pending[:end]
        else:
            content.append(self._pending[:end])
        self._pending = self._pending[end:]
