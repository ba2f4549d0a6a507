"""Encoding of prompts to token ids: texts, and chats by the tokenizer's chat template."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.valid_unicode import check_unicode
from dynatree.draft.text.hidden_names import HiddenNames, renamed
from dynatree.draft.text.prompt_text import decoded
from dynatree.draft.text.tools import (
    Fields,
    in_harmony,
    odd_arguments,
    parsed,
    parsed_object,
    replaced,
    without_tools,
    written_format,
)


@dataclass(frozen=True)
class Message:
    """One message of a chat.

    Attributes:
        role: The role of the speaker.
        content: The text.
        name: Tells speakers with the same role apart; "" for none.
        tool_calls: The calls of functions as a JSON array; "" for none.
        tool_call_id: The id of the call that the message answers; "" for none.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: str = ""
    tool_call_id: str = ""

    @property
    def fields(self) -> Fields:
        """The message in the form that chat templates expect.

        Raises:
            InvalidArgumentError: The calls are not a JSON array of objects, or not valid Unicode.
        """
        fields: Fields = {"role": self.role, "content": self.content}
        optional = {"name": self.name, "tool_calls": parsed("tool_calls", self.tool_calls)}
        optional["tool_call_id"] = self.tool_call_id
        return fields | {name: value for name, value in optional.items() if value}


class PromptEncoder:
    """Encodes prompts. The name of a special token counts as plain text, unless `special_tokens` is set.

    The special tokens that a chat template puts between the messages always count as special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._writes_tools = written_format(tokenizer.chat_template)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._own_variables = {*parameters, "self", "messages", *tokenizer.special_tokens_map}
        self._special = re.compile("|".join(map(re.escape, longest_first))) if self._ids else None

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer can encode chats."""
        return bool(self._tokenizer.chat_template)

    @property
    def tool_format(self) -> str:
        """How chats write calls of functions."""
        return self._writes_tools or "hermes"

    def special_ids(self, texts: Iterable[str]) -> list[int]:
        """The ids of the special tokens among these names."""
        return [self._ids[text] for text in texts if text in self._ids]

    def text(self, text: str, *, special_tokens: bool, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encode a text; with `add_special_tokens`, include the tokens that the tokenizer adds at its ends."""
        encoded = self._tokenizer(
            text, verbose=False, add_special_tokens=add_special_tokens, split_special_tokens=not special_tokens
        )
        return tuple(encoded["input_ids"])

    def strings(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens' spellings in the tokenizer's table."""
        return [token or "" for token in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    def decoded(self, token_ids: Sequence[int]) -> str:
        """The tokens' text, the names of special tokens included."""
        return decoded(self._tokenizer, token_ids).text

    def chat(
        self,
        messages: Sequence[Message],
        *,
        special_tokens: bool,
        continue_final_message: bool = False,
        tools: str = "",
        variables: str = "",
    ) -> tuple[int, ...]:
        """Encode a chat by the template; it ends with the open turn of the assistant, or with the open last message.

        `tools` describes the functions that the assistant may call, as a JSON array. `variables` are further variables
        of the template, as a JSON object.

        Raises:
            InvalidArgumentError: There is no message, the tokenizer has no template, the template refuses the messages,
                the functions or calls are not JSON arrays of objects, a variable has a name of the service's own, or
                a text is not valid Unicode.
        """
        if not messages:
            raise InvalidArgumentError("the chat has no messages; expected at least one")
        if not self.has_chat_template:
            raise InvalidArgumentError("the tokenizer has no chat template: expected a prompt of text or token ids")
        hidden = HiddenNames(self._special) if self._special and not special_tokens else None
        said, described = [each.fields for each in messages], parsed("tools", tools)
        given = parsed_object("chat_template_kwargs", variables)
        taken = given.keys() & self._own_variables
        if taken:
            raise InvalidArgumentError(f"chat_template_kwargs: the service sets {' and '.join(sorted(taken))} itself")
        try:
            if hidden is not None:
                said, described, given = (replaced(each, hidden.hide) for each in (said, described, given))
            if self._writes_tools is None:
                said, described = without_tools(said, described), []
            elif self._writes_tools == "harmony":
                said = [*map(in_harmony, said)]
            rendered = self._tokenizer.apply_chat_template(
                said,
                tools=described or None,
                tokenize=False,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
                **given,
            )
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:  # also faults of templates
            field = odd_arguments(said)
            if field is not None and type(error) is not TemplateError:  # which are a template's own words
                words = f"{field}: expected a JSON object, without which the chat template fails: {error}"
                raise InvalidArgumentError(words) from error
            raise InvalidArgumentError(f"the chat template refuses the messages: {error}") from error
        assert isinstance(rendered, str)
        check_unicode("what the chat template writes", rendered)
        return tuple(self._encoded(rendered, hidden))

    def _encoded(self, rendered: str, hidden: HiddenNames | None) -> Sequence[int]:
        """Encode a rendered chat, whole if possible."""
        if hidden and self._encode_whole is not None:
            return self._encode_whole(rendered, hidden)
        ids: list[int] = []
        for piece, is_name in hidden.pieces(rendered) if hidden else [(rendered, False)]:
            ids += self._tokenizer(piece, verbose=False, add_special_tokens=False, split_special_tokens=is_name)[
                "input_ids"
            ]
        return ids

    @cached_property
    def _encode_whole(self) -> Callable[[str, HiddenNames], Sequence[int]] | None:
        return renamed(self._tokenizer, self._special, self._ids) if self._special else None
