"""The bodies of requests: fields that clients of OpenAI's API send, and this project's own.

A field that is not here is refused by its name, unless it has no effect (no_effect.py).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dynatree.client import GenerateOptions, Message
from dynatree.gateway.errors import LengthFields
from dynatree.gateway.no_effect import Body

MAX_PROMPTS = 128
MAX_STOP_STRINGS = 16
MAX_BIASES = 1024
MAX_FIELDS = 1024  # of an object whose names are the caller's own
MAX_MESSAGES = 4096  # of a chat: thousands of tokens at least
MAX_PARTS = 1024  # of a message
LONGEST_PRINCIPAL = 256  # characters, of what the services take
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI has it

_TokenId = Annotated[int, Field(ge=0, lt=2**32)]
_TokenIds = Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]
_Text = Annotated[str, Field(min_length=1)]
_StopString = Annotated[str, Field(min_length=1, max_length=1024)]
_Bias = Annotated[float, Field(ge=-1000, le=1000)]
_BiasedId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Word = Annotated[str, Field(max_length=64)]
_Setting = float | _Word | Annotated[list[float], Field(max_length=1024, fail_fast=True)]
_CountPenalty = Annotated[float, Field(ge=-2, le=2)]


def _without_nulls(body: Any) -> Any:
    """An object whose names are the caller's own, without those that are null."""
    if not isinstance(body, dict):
        return body
    fields = {name: value for name, value in body.items() if value is not None}
    if len(fields) > MAX_FIELDS:
        raise ValueError(f"the object has {len(fields)} fields; at most {MAX_FIELDS} are accepted")
    return fields


class StreamOptions(Body):
    """What a stream says besides the text.

    Attributes:
        include_usage: The usage, in a last chunk.
        continuous_usage_stats: With `include_usage`, the usage so far in each chunk.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class TextFormat(Body):
    """The one format that answers have."""

    type: Literal["text"] = "text"


class CompletionOptions(Body):
    """What both kinds of request have in common.

    Attributes:
        model: The target's name, as `/v1/models` has it; null takes what is served.
        temperature: 0 is greedy; 1 unless it is said, as OpenAI has it.
        top_k: Keep the k likeliest tokens; 0 and -1 keep all.
        repetition_penalty: As the target's generation_config says, unless it is said.
        user: On whose behalf: where the draft service asks nobody for a token, users take turns.
        response_format: Text, as there is no other.
        policy: How trees are grown; the draft service's own policy unless it is said.
        trace: Whether a stream tells each round.
        return_token_ids: Whether choices have `token_ids`, and the first `prompt_token_ids`.
    """

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    stop: _StopString | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: _CountPenalty | None = None
    presence_penalty: _CountPenalty | None = None
    logit_bias: (
        Annotated[dict[_BiasedId, _Bias], Field(max_length=MAX_BIASES), BeforeValidator(_without_nulls)] | None
    ) = None
    user: str | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=64)] | None = None
    policy: str | None = None
    policy_settings: Annotated[dict[str, _Setting], Field(max_length=64), BeforeValidator(_without_nulls)] | None = None
    scheme: Literal["gumbel", "independent", "residual"] | None = None
    trace: bool | None = None
    return_token_ids: bool | None = None
    response_format: TextFormat | None = None

    @property
    def completions(self) -> int:
        """How many completions each prompt has."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def running_usage(self) -> bool:
        """Whether each of a stream's chunks has the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def principal(self) -> str:
        """The user as gRPC's metadata can carry the name; "" for nobody."""
        user = self.user or ""
        if user.isascii() and user.isprintable() and len(user) <= LONGEST_PRINCIPAL:
            return user
        return hashlib.sha256(user.encode()).hexdigest()

    def common_options(self) -> GenerateOptions:
        """The options of the client library that both kinds of request share."""
        return GenerateOptions(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            seed=None if self.seed is None else self.seed % 2**64,
            scheme=self.scheme,
            n=self.completions,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            policy=self.policy,
            policy_settings=self.policy_settings,
            trace=bool(self.trace),
        )


class CompletionRequest(CompletionOptions):
    """The body of `POST /v1/completions`.

    Attributes:
        prompt: Text or token ids, or several of either, whose choices follow one another.
        max_tokens: 16 unless it is said, as OpenAI has it; 0 with `echo` only, for the prompt's log-probabilities.
        logprobs: How many of the likeliest tokens each place names.
        echo: Whether the text begins with the prompt, and the log-probabilities with the prompt's.
        special_tokens: Whether the prompt's text may name special tokens.
        best_of: As many as `n`: none is thrown away.
        add_special_tokens: Whether the prompt's text gets the tokens that the tokenizer adds; there is no other way.
    """

    prompt: (
        _Text
        | _TokenIds
        | Annotated[list[_Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    special_tokens: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=64)] | None = None
    add_special_tokens: Literal[True] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which needs echo: nothing would be answered")
        if self.best_of is not None and self.best_of != self.completions:
            raise ValueError("best_of is not n: no completion is thrown away")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def fields(self) -> LengthFields:
        """What its prompt and its length are called."""
        return LengthFields("prompt", None if self.max_tokens is None else "max_tokens")

    @property
    def scores_only(self) -> bool:
        """Whether the prompt is all that is asked about."""
        return self.max_tokens == 0

    @property
    def new_tokens(self) -> int:
        """How many new tokens a completion may have."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def named(self) -> int | None:
        """How many of the likeliest tokens each place names; None where no log-probabilities are wanted."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """Whether a choice begins with its prompt."""
        return bool(self.echo)

    def options(self) -> GenerateOptions:
        """The options of the client library."""
        return GenerateOptions(
            **self.common_options(),
            max_new_tokens=max(self.new_tokens, 1),
            log_probs=self.logprobs is not None,
            top_log_probs=self.logprobs or 0,
            prompt_log_probs=bool(self.echo) and self.logprobs is not None,
            prompt_text=bool(self.echo),
            special_tokens=bool(self.special_tokens),
        )


class TextPart(Body):
    """A piece of a message's content; there is only text."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message of a chat; an assistant's may have no content."""

    role: _Text
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role[:32]!r} needs content")
        return self

    @property
    def message(self) -> Message:
        """The message for the client library, its content in one piece."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        message = Message(role=self.role, content=text)
        if self.name:
            message["name"] = self.name
        return message


_Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Template(Body):
    """How a chat's template ends.

    Attributes:
        add_generation_prompt: Whether the assistant's next turn begins; unless the last message is to be continued.
        continue_final_message: Whether the last message is left open, for the completion to go on with.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _has_one_end(self) -> Self:
        if self.add_generation_prompt is not None and self.add_generation_prompt == self.continues:
            raise ValueError(
                "of add_generation_prompt and continue_final_message one is to be true: either the assistant's next "
                "turn begins, or the last message goes on"
            )
        return self

    @property
    def continues(self) -> bool:
        """Whether the last message goes on."""
        return bool(self.continue_final_message)


class ChatRequest(CompletionOptions, Template):
    """The body of `POST /v1/chat/completions`.

    Attributes:
        messages: What was said so far; the target's chat template makes a prompt of it.
        add_special_tokens: Whether tokens are added to the template's; there is no other way.
        max_tokens: The older name of `max_completion_tokens`; until the end of sequence unless one is said.
        logprobs: Whether choices have log-probabilities.
        top_logprobs: How many of the likeliest tokens each place names.
    """

    messages: _Messages
    add_special_tokens: Literal[False] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    @property
    def fields(self) -> LengthFields:
        """What its prompt and its length are called."""
        named = [name for name in ("max_completion_tokens", "max_tokens") if getattr(self, name) is not None]
        return LengthFields("messages", next(iter(named), None))

    @property
    def chat(self) -> list[Message]:
        """The prompt for the client library."""
        return [each.message for each in self.messages]

    @property
    def new_tokens(self) -> int | None:
        """How many new tokens an answer may have; None to the end of the context."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def named(self) -> int | None:
        """How many of the likeliest tokens each place names; None where no log-probabilities are wanted."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def echoes(self) -> bool:
        """A chat's answer does not begin with the chat."""
        return False

    def options(self) -> GenerateOptions:
        """The options of the client library."""
        return GenerateOptions(
            **self.common_options(),
            max_new_tokens=self.new_tokens,
            continue_final_message=self.continues,
            log_probs=bool(self.logprobs),
            top_log_probs=self.top_logprobs or 0,
        )


class TokenizeRequest(Template):
    """The body of `POST /tokenize`.

    Attributes:
        model: As in a completion.
        prompt: Text.
        messages: A chat, instead.
        add_special_tokens: Whether a text gets the tokens that the tokenizer adds at its beginning or end; true by
            default, and a chat gets none but its template's.
        special_tokens: Whether the text may name special tokens.
        return_token_strs: Whether the tokens' spellings are told.
    """

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens is for a prompt; a chat's template writes its own special tokens")
        return self

    @property
    def text_or_chat(self) -> str | list[Message]:
        """The prompt for the client library."""
        return [each.message for each in self.messages] if self.messages is not None else self.prompt or ""


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`.

    Attributes:
        model: As in a completion.
        tokens: The tokens' ids.
    """

    model: str | None = None
    tokens: Annotated[list[_TokenId], Field(fail_fast=True)]
