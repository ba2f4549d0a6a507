"""Encoding of prompts to token ids: texts, and chats by the tokenizer's chat template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dynatree.common.errors import InvalidArgumentError
from dynatree.draft.text.prompt_text import decoded


@dataclass(frozen=True)
class Message:
    """One message of a chat; `name` tells speakers with the same role apart, "" for none."""

    role: str
    content: str
    name: str = ""

    @property
    def fields(self) -> dict[str, str]:
        """The message in the form that chat templates expect."""
        fields = {"role": self.role, "content": self.content}
        return {**fields, "name": self.name} if self.name else fields


class PromptEncoder:
    """Encodes prompts. The name of a special token counts as plain text, unless `special_tokens` is set.

    The special tokens that a chat template puts between the messages always count as special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if self._ids else None

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer can encode chats."""
        return bool(self._tokenizer.chat_template)

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
        self, messages: Sequence[Message], *, special_tokens: bool, continue_final_message: bool = False
    ) -> tuple[int, ...]:
        """Encode a chat by the template; it ends with the open turn of the assistant, or with the open last message.

        Raises:
            InvalidArgumentError: There is no message, the tokenizer has no template, or the template refuses the
                messages.
        """
        if not messages:
            raise InvalidArgumentError("the chat has no messages; expected at least one")
        if not self.has_chat_template:
            raise InvalidArgumentError("the tokenizer has no chat template: expected a prompt of text or token ids")
        hidden: dict[str, str] = {}  # texts that look like special tokens, by their marks in the rendered chat
        said = [each.fields for each in messages]
        if not special_tokens:
            said = [{name: self._hide(text, hidden) for name, text in each.items()} for each in said]
        try:
            rendered = self._tokenizer.apply_chat_template(
                said,
                tokenize=False,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:  # errors and faults of templates
            raise InvalidArgumentError(f"the chat template refuses the messages: {error}") from error
        assert isinstance(rendered, str)
        return tuple(self._encoded(rendered, hidden))

    def _hide(self, content: str, hidden: dict[str, str]) -> str:
        """Replace each text that looks like a special token by an unguessable mark."""
        if self._special is None:
            return content

        def mark(match: re.Match[str]) -> str:
            mark = f"\ue000{secrets.token_hex(8)}\ue001"
            hidden[mark] = match[0]
            return mark

        return self._special.sub(mark, content)

    def _encoded(self, rendered: str, hidden: dict[str, str]) -> Iterator[int]:
        pieces = re.split(f"({'|'.join(hidden)})", rendered) if hidden else [rendered]
        for piece in filter(None, pieces):
            text = hidden.get(piece)
            yield from self._tokenizer(
                piece if text is None else text,
                verbose=False,
                add_special_tokens=False,
                split_special_tokens=text is not None,
            )["input_ids"]
