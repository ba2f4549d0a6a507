"""The bodies of requests: the supported fields of OpenAI's API, and DynaTree's own.

A request with any other field is refused with that field's name, unless the field has no effect (no_effect.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dynatree.client import GenerateOptions, Message
from dynatree.common.limits import MAX_STOP_TOKENS
from dynatree.gateway.calls_or_json import calls_or_json_grammar
from dynatree.gateway.errors import RequestFields, at_odds
from dynatree.gateway.formats import Structured
from dynatree.gateway.harmony import HARMONY, harmony_grammar
from dynatree.gateway.no_effect import Body
from dynatree.gateway.tools import NamedTool, ToolCalls, Tools, call_grammar

MAX_PROMPTS = 128
MAX_STOP_STRINGS = 16
MAX_BIASES = 1024
MAX_FIELDS = 1024  # of an object with free keys: `logit_bias`, `policy_settings`
MAX_MESSAGES = 4096  # of a chat: thousands of tokens at least
MAX_PARTS = 1024  # of a message
LONGEST_PRINCIPAL = 256  # characters; the services refuse longer names
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, OpenAI's default

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
    """Drop the null values of an object with free keys."""
    if not isinstance(body, dict):
        return body
    fields = {name: value for name, value in body.items() if value is not None}
    if len(fields) > MAX_FIELDS:
        raise ValueError(f"the object has {len(fields)} fields; at most {MAX_FIELDS} are accepted")
    return fields


_Variables = Annotated[dict[str, Any], BeforeValidator(_without_nulls)]


class StreamOptions(Body):
    """Further content of a stream.

    Attributes:
        include_usage: Whether the stream ends with a chunk that has the usage.
        continuous_usage_stats: With `include_usage`, whether each chunk has the usage so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionOptions(Structured):
    """The fields that completions and chats share.

    Attributes:
        model: The model's name, as `/v1/models` lists it; null means the served model.
        temperature: Divides the logits; 0 is greedy decoding. The default is 1, as in OpenAI's API.
        top_p: Keep the likeliest tokens up to this probability; 0 keeps one.
        top_k: Keep the k likeliest tokens; 0 and -1 keep all.
        repetition_penalty: The default is the value of the target's generation_config.
        user: The principal of the request if the draft service does not authenticate callers; principals are served in
            turn.
        policy: The policy that grows the trees; the default is the draft service's.
        trace: Whether a stream reports each round.
        return_token_ids: Whether each choice has `token_ids`, and the first choice of a prompt `prompt_token_ids`.
        store: False means that the draft service neither records the completion nor drafts later ones from it.
        skip_special_tokens: False means that the text has the names of special tokens.
    """

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
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
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    policy: str | None = None
    policy_settings: Annotated[dict[str, _Setting], Field(max_length=64), BeforeValidator(_without_nulls)] | None = None
    scheme: Literal["gumbel", "independent", "residual"] | None = None
    trace: bool | None = None
    return_token_ids: bool | None = None
    store: bool | None = None
    skip_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.ignore_eos and self.constraint_field:
            raise at_odds(
                "ignore_eos", f"ignore_eos is set, but an answer that {self.constraint_field} limits ends when it may"
            )
        return self

    @property
    def completions(self) -> int:
        """Number of completions of each prompt."""
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
        """The user's name, hashed where gRPC's metadata cannot carry it; "" means no name."""
        user = self.user or ""
        if user.isascii() and user.isprintable() and len(user) <= LONGEST_PRINCIPAL:
            return user
        return hashlib.sha256(user.encode()).hexdigest()

    def common_options(self) -> GenerateOptions:
        """Return the client library's options that completions and chats share."""
        options = GenerateOptions(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or None,
            top_k=1 if self.top_p == 0 else max(self.top_k or 0, 0),
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
            store=self.store is not False,
            skip_special_tokens=self.skip_special_tokens is not False,
        )
        options.update(self.constraint)
        return options


class CompletionRequest(CompletionOptions):
    """The body of `POST /v1/completions`.

    Attributes:
        prompt: Text or token ids, or a list of either; the choices are in the order of the prompts.
        max_tokens: The default is 16, as in OpenAI's API. 0 is allowed with `echo`, for the prompt's log-probabilities.
        logprobs: Number of likeliest tokens to return at each position.
        echo: Whether the text begins with the prompt, and the log-probabilities with the prompt's.
        special_tokens: Whether the prompt's text may name special tokens.
        best_of: Must equal `n`: the gateway returns every completion.
        add_special_tokens: Whether the tokenizer adds its special tokens to the prompt's text; must be true.
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
            raise at_odds(
                "max_tokens",
                "max_tokens is 0 without echo, which leaves nothing to return; expected at least 1, or echo",
            )
        if self.best_of is not None and self.best_of != self.completions:
            raise at_odds(
                "best_of", "best_of differs from n; expected the same number, since no completion is discarded"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, even if there is only one."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def fields(self) -> RequestFields:
        """The names of the fields that errors of the service may be about."""
        return RequestFields("prompt", None if self.max_tokens is None else "max_tokens", self.constraint_field)

    @property
    def scores_only(self) -> bool:
        """Whether the request wants the prompt's log-probabilities and no new tokens."""
        return self.max_tokens == 0

    @property
    def new_tokens(self) -> int:
        """Upper bound on the new tokens of a completion."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def named(self) -> int | None:
        """Number of likeliest tokens at each position; None if the request wants no log-probabilities."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """Whether a choice begins with its prompt."""
        return bool(self.echo)

    def options(self, tool_format: str = "") -> GenerateOptions:
        """Return the client library's options for this request; `tool_format` is for chats."""
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
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message of a chat; a message of the assistant may lack content, and may have calls of functions.

    Attributes:
        type: Changes nothing; some clients write it.
        role: "developer" is another name of "system", since most chat templates know only that one.
        reasoning_content: What the assistant thought before the content; `reasoning` is another name of it.
        tool_call_id: The id of the call that a message of the role "tool" answers.
    """

    type: Literal["text", "message"] | None = None
    role: _Text
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> ChatMessage:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError(f"a message of the role {self.role[:32]!r} needs content")
        if self.thought and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role[:32]!r} cannot have reasoning")
        if self.reasoning and self.thought != self.reasoning:
            raise ValueError("reasoning_content and reasoning differ; expected one of them")
        return self

    @property
    def thought(self) -> str:
        """What the assistant thought before the content."""
        return self.reasoning_content or self.reasoning or ""

    @property
    def message(self) -> Message:
        """The message for the client library, with the parts of its content joined behind its reasoning."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        if self.thought:
            text = f"<think>\n{self.thought}\n</think>\n\n{text}"
        message = Message(role="system" if self.role == "developer" else self.role, content=text)
        if self.name:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [each.described for each in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


_Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Template(Body):
    """How the chat template is rendered, and how it ends; exactly one of the first two fields may be true.

    Attributes:
        add_generation_prompt: Whether the prompt ends with the beginning of the assistant's next turn. By default, the
            opposite of `continue_final_message`.
        continue_final_message: Whether the last message is left open, so that the completion continues it.
        chat_template_kwargs: Further variables of the template.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: _Variables | None = None

    @model_validator(mode="after")
    def _has_one_end(self) -> Self:
        if self.add_generation_prompt is not None and self.add_generation_prompt == self.continues:
            raise at_odds(
                "add_generation_prompt",
                "exactly one of add_generation_prompt and continue_final_message must be true: either the assistant's "
                "next turn begins, or the last message continues",
            )
        return self

    @property
    def continues(self) -> bool:
        """Whether the completion continues the last message."""
        return bool(self.continue_final_message)


class ChatRequest(CompletionOptions, Template):
    """The body of `POST /v1/chat/completions`.

    Attributes:
        messages: The conversation so far; the target's chat template turns it into a prompt.
        add_special_tokens: Whether the tokenizer adds special tokens to the template's own; must be false.
        max_tokens: The older name of `max_completion_tokens`. By default, and with -1, the answer ends with an
            end-of-sequence token or at the context limit.
        logprobs: Whether choices have log-probabilities.
        top_logprobs: Number of likeliest tokens to return at each position.
        tools: The functions that the answer may call.
        tool_choice: Whether it may ("auto", the default), must ("required") or must not ("none") call one, or the one
            that it must call.
        parallel_tool_calls: Whether an answer may have several calls; true by default.
    """

    no_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {"max_tokens": (-1,), "n_predict": (-1,)}

    messages: _Messages
    add_special_tokens: Literal[False] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.must_call and not self.callable:
            raise at_odds("tool_choice", "tool_choice asks for a call of a function that tools does not have")
        if self.must_call and self.constraint and self.format_schema is None:
            raise at_odds(
                "tool_choice",
                f"tool_choice asks for a call, and {super().constraint_field} limits the answer; expected one of them",
            )
        if self.top_logprobs and not self.logprobs:
            raise at_odds("top_logprobs", "top_logprobs requires logprobs")
        return self

    @property
    def fields(self) -> RequestFields:
        """The names of the fields that errors of the service may be about."""
        named = [name for name in ("max_completion_tokens", "max_tokens") if getattr(self, name) is not None]
        return RequestFields("messages", next(iter(named), None), self.constraint_field)

    @property
    def constraint_field(self) -> str | None:
        """The field that limits the answer."""
        return "tools" if self.must_call else super().constraint_field

    @property
    def must_call(self) -> bool:
        """Whether the answer must call a function."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def calls_or_format(self) -> bool:
        """Whether the answer either calls functions or follows `response_format`."""
        return self.format_schema is not None and not self.must_call and bool(self.callable)

    def several_calls(self, tool_format: str) -> bool:
        """Whether an answer may have several calls in the service's `tool_format`."""
        one = isinstance(self.tool_choice, NamedTool) or self.parallel_tool_calls is False
        return not one and tool_format != "llama3"  # its templates refuse several calls in one message

    def in_harmony(self, tool_format: str) -> bool:
        """Whether the answer is read as Harmony's messages: unless its text is asked for, or limited as a whole."""
        whole = self.constraint.keys() & {"regex", "grammar"} or isinstance(self.constraint.get("json_schema"), str)
        return tool_format == HARMONY and self.skip_special_tokens is not False and (self.must_call or not whole)

    @property
    def callable(self) -> Tools:
        """The functions that the answer may call."""
        if self.tool_choice == "none":
            return []
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        return [each for each in self.tools or () if named in (None, each.function.name)]

    @property
    def chat(self) -> list[Message]:
        """The prompt for the client library."""
        return [each.message for each in self.messages]

    @property
    def new_tokens(self) -> int | None:
        """Upper bound on the new tokens of an answer; None means the rest of the context."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def named(self) -> int | None:
        """Number of likeliest tokens at each position; None if the request wants no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def echoes(self) -> bool:
        """Whether a choice begins with its prompt: never in a chat."""
        return False

    def options(self, tool_format: str = "") -> GenerateOptions:
        """Return the client library's options for this request; `tool_format` is that of the service.

        Raises:
            ApiError: Calls in this format could not be told from JSON of `response_format`.
        """
        options = GenerateOptions(
            **self.common_options(),
            tools=[each.described for each in self.tools or ()] if self.tool_choice != "none" else (),
            max_new_tokens=self.new_tokens,
            continue_final_message=self.continues,
            chat_template_kwargs=self.chat_template_kwargs,
            log_probs=bool(self.logprobs),
            top_log_probs=self.top_logprobs or 0,
        )
        several = self.several_calls(tool_format)
        if self.in_harmony(tool_format):
            options["skip_special_tokens"] = False
            asked = options.pop("json_schema", None)
            schema = None if self.must_call or isinstance(asked, str) else asked
            if self.must_call or schema is not None:
                tools = self.callable if self.must_call or self.calls_or_format else []
                options["grammar"] = harmony_grammar(tools, schema)
        elif self.must_call:
            options.pop("json_schema", None)  # of a format, which limits text alone
            options["grammar"] = call_grammar(self.callable, tool_format, several=several)
        elif self.calls_or_format:
            options.pop("json_schema")
            options["grammar"] = calls_or_json_grammar(
                self.callable, self.format_schema or {}, tool_format, several=several
            )
        return options


class TokenizeRequest(Template):
    """The body of `POST /tokenize`.

    Attributes:
        model: The model's name, as in a completion.
        prompt: A text.
        messages: A chat, instead of `prompt`.
        add_special_tokens: Whether the tokenizer adds its special tokens at the beginning or end of a text; true by
            default. A chat has only the special tokens of its template.
        special_tokens: Whether the text may name special tokens.
        return_token_strs: Whether to return the tokens' spellings in the vocabulary.
        tools: The functions that the chat's template describes, as in a chat that is completed.
    """

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise at_odds("prompt" if self.prompt is None else "messages", "expected either prompt or messages")
        for name in ("tools", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name):
                raise at_odds(name, f"{name} are for messages, and the request has a prompt")
        if self.messages is not None and self.add_special_tokens:
            raise at_odds(
                "add_special_tokens",
                "add_special_tokens is for a prompt; a chat's template writes its own special tokens",
            )
        return self

    @property
    def text_or_chat(self) -> str | list[Message]:
        """The prompt for the client library."""
        return [each.message for each in self.messages] if self.messages is not None else self.prompt or ""


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`.

    Attributes:
        model: The model's name, as in a completion.
        tokens: The token ids.
    """

    model: str | None = None
    tokens: Annotated[list[_TokenId], Field(fail_fast=True)]
