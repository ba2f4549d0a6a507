"""Reads the prompts of messages with the draft model's tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.model_info import ModelInfo, token_limit
from dynatree.common.wire import grammar_from_pb
from dynatree.draft.generate_call import CallGrammar
from dynatree.draft.text.prompt_text import PromptText, decoded, written
from dynatree.draft.text.prompts import Message, PromptEncoder
from dynatree.draft.text.tokenizer_thread import TokenizerThread
from dynatree.engine.grammar.compiler import GrammarCompiler
from dynatree.engine.model.vocabulary import token_bytes
from dynatree.v1 import draft_pb2

ID_BYTES = 4  # size of a token id


class PromptReader:
    """Encodes prompts and decodes tokens, on a thread where principals take turns.

    Every coroutine raises ServiceBusyError if too much text waits for the thread.

    Args:
        tokenizer: The draft model's tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        end_token = tokenizer.eos_token_id
        self._grammars = GrammarCompiler(tokenizer, () if end_token is None else (end_token,))
        self._thread = TokenizerThread()
        self._longest_token = max(map(len, tokenizer.get_vocab()))  # characters
        self._vocabulary: list[bytes] = []  # built at the first use

    def read_ahead(self) -> None:
        """Begin to read the tokenizer for grammars."""
        self._grammars.read_ahead()

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be chats."""
        return self._encoder.has_chat_template

    @property
    def tool_format(self) -> str:
        """How the chat template writes calls of functions."""
        return self._encoder.tool_format

    def special_ids(self, texts: Iterable[str]) -> tuple[int, ...]:
        """The ids of the special tokens among these names."""
        return tuple(self._encoder.special_ids(texts))

    def least_tokens(self, message: draft_pb2.GenerateRequest | draft_pb2.TokenizeRequest) -> int:
        """Lower bound on the tokens of a text prompt or a chat, found without encoding it."""
        characters = sum(map(len, _texts(message)))
        return max(math.ceil(characters / self._longest_token), len(message.chat.messages))

    async def prompt_ids(
        self, message: draft_pb2.GenerateRequest, target: ModelInfo, principal: str
    ) -> tuple[int, ...]:
        """Return the prompt's tokens; a prompt that certainly exceeds the target's context is refused uncopied.

        Raises:
            InvalidArgumentError: The message has no prompt, or an empty one.
            OutOfRangeError: The prompt and the new tokens do not fit the target's context.
        """
        kind = message.WhichOneof("prompt")
        if kind is None:
            raise InvalidArgumentError("the request has no prompt; expected the field `text`, `token_ids` or `chat`")
        if kind == "token_ids":
            token_limit(len(message.token_ids.ids), _new_tokens(message), target)
            prompt_ids = tuple(message.token_ids.ids)
        else:
            prompt_ids = await self.encode(message, target, principal)
        if not prompt_ids:
            raise InvalidArgumentError("the prompt is empty; expected at least one token")
        token_limit(len(prompt_ids), _new_tokens(message), target)
        return prompt_ids

    async def encode(
        self,
        message: draft_pb2.GenerateRequest | draft_pb2.TokenizeRequest,
        target: ModelInfo,
        principal: str,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[int, ...]:
        """Encode a text prompt or a chat.

        Raises:
            InvalidArgumentError: The tokenizer has no chat template, or the template refuses the chat.
            OutOfRangeError: The text certainly exceeds the target's context.
        """
        token_limit(self.least_tokens(message), None, target, at_least=True)
        if message.HasField("chat"):
            messages = [
                Message(each.role, each.content, each.name, each.tool_calls, each.tool_call_id)
                for each in message.chat.messages
            ]
            encode = partial(
                self._encoder.chat,
                messages,
                continue_final_message=message.chat.continue_final_message,
                tools=message.chat.tools,
                variables=message.chat.template_variables,
            )
        else:
            encode = partial(self._encoder.text, message.text, add_special_tokens=add_special_tokens)
        size = sum(len(text.encode()) for text in _all_texts(message))
        return await self._thread.run(principal, size, partial(encode, special_tokens=message.special_tokens))

    async def grammar(
        self, message: draft_pb2.GenerateRequest, received_ids: Sequence[int], principal: str
    ) -> CallGrammar | None:
        """Compile the message's grammar, and follow it through a completion's received tokens; None if it has none.

        Raises:
            InvalidArgumentError: The grammar is wrong, too long, too complex or not supported.
        """
        if not message.HasField("grammar"):
            return None
        grammar = grammar_from_pb(message.grammar)
        size = len(grammar.text.encode()) + ID_BYTES * len(received_ids)
        return await self._thread.run(
            principal, size, lambda: CallGrammar.following(self._grammars.state(grammar), received_ids)
        )

    async def prompt_text(
        self, message: draft_pb2.GenerateRequest, prompt_ids: tuple[int, ...], principal: str
    ) -> PromptText:
        """Return the prompt's text and the offset of each token: the text as sent, or decoded from its tokens."""
        read = partial(decoded, self._tokenizer, prompt_ids)
        if message.WhichOneof("prompt") == "text":
            read = partial(written, self._tokenizer, message.text, prompt_ids, special_tokens=message.special_tokens)
        return await self._thread.run(principal, ID_BYTES * len(prompt_ids), read)

    async def strings(self, token_ids: Sequence[int], principal: str) -> list[str]:
        """Return the tokens' spellings in the tokenizer's table."""
        return await self._thread.run(principal, ID_BYTES * len(token_ids), partial(self._encoder.strings, token_ids))

    async def decode(self, token_ids: Sequence[int], principal: str) -> str:
        """Return the tokens' text, the names of special tokens included."""
        return await self._thread.run(principal, ID_BYTES * len(token_ids), partial(self._encoder.decoded, token_ids))

    async def vocabulary(self, principal: str) -> list[bytes]:
        """Return the bytes of every token."""
        if not self._vocabulary:
            self._vocabulary = await self._thread.run(
                principal, 0, lambda: self._vocabulary or token_bytes(self._tokenizer)
            )
        return self._vocabulary


def _texts(message: draft_pb2.GenerateRequest | draft_pb2.TokenizeRequest) -> Iterator[str]:
    """Yield the texts of a text prompt or a chat."""
    yield message.text
    for each in message.chat.messages:
        yield from (each.role, each.content, each.name)


def _all_texts(message: draft_pb2.GenerateRequest | draft_pb2.TokenizeRequest) -> Iterator[str]:
    """Yield the texts of a prompt, those of tools, their calls and the template's variables included."""
    yield from (*_texts(message), message.chat.tools, message.chat.template_variables)
    for each in message.chat.messages:
        yield from (each.tool_calls, each.tool_call_id)


def _new_tokens(message: draft_pb2.GenerateRequest) -> int | None:
    return message.max_new_tokens if message.HasField("max_new_tokens") else None
