"""Functions in chats: how a chat template writes them, and a form for templates that do not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.valid_unicode import check_unicode

# What may stand in a template between two texts that it writes one after the other.
_JOINT = r"""(?:\\n|[\s'"{}+~-])*"""
# The beginning of a call as a template spells it that writes calls in a known form; the first that fits counts. Other
# forms share a tag or a key with these, so neither tells a form. Newer templates of Mistral write the function's name
# after the mark, the older ones an array.
_SIGNS = {
    "harmony": re.compile(r"<\|channel\|>commentary"),
    "mistral_named": re.compile(r"""\[ARGS\]|\[TOOL_CALLS\]['"][\s+~}{-]*\w[\w.]*(\.name\b|\[['"]name['"]\])"""),
    "mistral": re.compile(rf"\[TOOL_CALLS\]{_JOINT}\["),
    "qwen3_coder": re.compile(f"<tool_call>{_JOINT}<function="),
    "hermes": re.compile(rf"""<tool_call>{_JOINT}\\?"(?:name|arguments)\\?":"""),
    "llama3": re.compile(rf"""(?<![>[])\{{\\?"name\\?": [^,]{{1,80}},{_JOINT}\\?"parameters\\?":"""),
}
_THOUGHT = re.compile(r"<think>\n(.*?)\n</think>\s*", re.DOTALL)  # as clients write it before the content
_TOOLS = re.compile(r"\btools\b")
_INSTRUCTIONS = """You may call functions. Each of these lines describes one, with a JSON schema of its parameters:
{tools}
To call a function, answer with its name and its arguments, and with nothing else, in this form:
<tool_call>
{{"name": NAME, "arguments": {{PARAMETER: VALUE}}}}
</tool_call>"""

Fields = dict[str, Any]  # a message as templates read it


def written_format(template: object) -> str | None:
    """How a chat template writes calls of functions; None if it does not, or in an unknown form."""
    texts = template.values() if isinstance(template, dict) else [template]
    for text in map(str, texts):
        if _TOOLS.search(text):
            return next((name for name, sign in _SIGNS.items() if sign.search(text)), None)
    return None


def parsed(name: str, text: str) -> list[Any]:
    """Return the objects of a JSON array; none if the text is empty.

    Raises:
        InvalidArgumentError: The text is not a JSON array of objects, or not valid Unicode.
    """
    values = _loaded(name, text) if text else []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InvalidArgumentError(f"{name} is not a JSON array of objects")
    return values


def parsed_object(name: str, text: str) -> Fields:
    """Return a JSON object; an empty one if the text is empty.

    Raises:
        InvalidArgumentError: The text is not a JSON object, or not valid Unicode.
    """
    value = _loaded(name, text) if text else {}
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{name} is not a JSON object")
    return value


def _loaded(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
        spelt = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{name} is not valid JSON: {error}") from error
    check_unicode(name, spelt)
    return value


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with each of its strings, keys included, replaced."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [replaced(each, change) for each in value]
    if isinstance(value, dict):
        return {change(name): replaced(each, change) for name, each in value.items()}
    return value


def odd_arguments(messages: Sequence[Fields]) -> str | None:
    """Return the name of the first field with a call's arguments that are no object; None if all are objects."""
    for place, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            function = call.get("function")
            if isinstance(function, dict) and not isinstance(function.get("arguments", {}), dict):
                return f"messages.{place}.tool_calls.{number}.function.arguments"
    return None


def without_tools(messages: Sequence[Fields], tools: Sequence[Any]) -> list[Fields]:
    """Return a chat for a template that knows no functions: a message describes them, calls and results are text.

    The system's message describes them, or else the first of the user, since some templates refuse messages of the
    system. Others refuse two messages of the user in a row, so results are one message with what the user says next.
    """
    turns: list[list[Fields]] = []
    before = None
    for message in messages:
        role = message.get("role")
        if before == "tool" and role in ("tool", "user"):
            turns[-1].append(_as_text(message))
        else:
            turns.append([_as_text(message)])
        before = role
    chat = [{**turn[0], "content": "\n".join(each["content"] for each in turn)} for turn in turns]
    return _described(chat, tools) if tools else chat


def _described(chat: list[Fields], tools: Sequence[Any]) -> list[Fields]:
    """Return a chat in which a message describes the functions."""
    told = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if chat[0].get("role") == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{told}"}, *chat[1:]]
    place = next((place for place, message in enumerate(chat) if message.get("role") == "user"), None)
    if place is None:
        return [{"role": "user", "content": told}, *chat]
    asked = {**chat[place], "content": f"{told}\n\n{chat[place]['content']}"}
    return [*chat[:place], asked, *chat[place + 1 :]]


def in_harmony(message: Fields) -> Fields:
    """Return a message for gpt-oss's template, which writes content as reasoning before calls, and else as the answer.

    The reasoning of an answer without calls is left out, as the model has learnt it.
    """
    thought = _THOUGHT.match(message["content"]) if message.get("role") == "assistant" else None
    if thought is None:
        return message
    content = message["content"][thought.end() :]
    return {**message, "content": f"{thought[1]}\n{content}".rstrip() if message.get("tool_calls") else content}


def _as_text(message: Fields) -> Fields:
    calls = [
        f"<tool_call>\n{json.dumps(call.get('function', call), ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if message.get("role") == "tool":
        return {**kept, "role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    return {**kept, "content": "\n".join(filter(None, [message["content"], *calls]))}
