"""Builds protobuf requests from keyword options.

It refuses only values that protobuf cannot carry. The server checks all other limits, in one place for all clients.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from operator import index
from typing import Any, Literal, NoReturn, NotRequired, TypedDict, TypeGuard, TypeVar

import grpc

from dynatree.client._errors import InvalidRequestError
from dynatree.v1 import draft_pb2, tree_pb2

_UINT32_MAX = 2**32 - 1
_MAX_REQUEST_BYTES = 4 * 2**20  # the servers' limit, and gRPC's own
_UINT64_MAX = 2**64 - 1
_OPTIONAL = ("name", "tool_calls", "tool_call_id")  # fields of a message
_Request = TypeVar("_Request", draft_pb2.GenerateRequest, draft_pb2.TokenizeRequest, draft_pb2.DetokenizeRequest)


class Message(TypedDict):
    """One message of a chat.

    Attributes:
        role: the speaker's role, as the target's chat template names it: "system", "user", "assistant".
        content: the message's text.
        name: the speaker's name, for templates that distinguish speakers of the same role; optional.
        tool_calls: the calls of an assistant's message in OpenAI's form, with arguments as mappings; optional.
        tool_call_id: the id of the call that a message of the role "tool" answers; optional.
    """

    role: str
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_call_id: NotRequired[str]


Prompt = str | Sequence[int] | Sequence[Message]
PolicySettings = Mapping[str, float | str | Sequence[float]]
SamplingScheme = Literal["gumbel", "independent", "residual"]

_SCHEMES: dict[str, tree_pb2.SamplingScheme] = {
    "gumbel": tree_pb2.SAMPLING_SCHEME_GUMBEL,
    "independent": tree_pb2.SAMPLING_SCHEME_INDEPENDENT,
    "residual": tree_pb2.SAMPLING_SCHEME_RESIDUAL,
}


class GenerateOptions(TypedDict, total=False):
    """The keyword options of `generate` and `stream`; all are optional.

    Attributes:
        max_new_tokens: the largest number of new tokens, at least 1. None (the default) continues until an
            end-of-sequence token or the context limit.
        temperature: divides the logits before sampling; 0 (the default) is greedy decoding.
        top_k: the number of likeliest tokens to keep; 0 (the default) keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1]; None (the default) keeps all.
        min_p: keep tokens whose probability is at least min_p times the likeliest's; in [0, 1], 0 (the default) keeps
            all.
        repetition_penalty: a value above 1 makes tokens of the prompt and of the text so far less likely; in (0, 100],
            1 has no effect. None (the default) takes the value of the target's generation_config, or else 1.
        frequency_penalty: a number that is subtracted from a token's logit once for each occurrence of the token in the
            completion so far; in [-2, 2], 0 (the default) has no effect.
        presence_penalty: a number that is subtracted once from the logit of each token that the completion so far
            contains; in [-2, 2], 0 (the default) has no effect.
        logit_bias: numbers to add to the logits of tokens, by token id; in [-1000, 1000].
        seed: the seed of sampling, in [0, 2**64). The same seed gives the same tokens, except with the scheme
            "residual". None (the default) draws a random seed.
        scheme: how draft and target sample. The completion follows exactly the target's distribution in each scheme.
            "gumbel" gives the tokens of plain decoding; draft and target share the noise. "independent" gives the same
            tokens; the draft has its own noise. "residual" gives other tokens, which depend on the trees. None (the
            default) is the service's default, "gumbel".
        n: the number of completions to make, one after the other; 1 by default. The first uses the seed. Each of the
            rest uses a hash of the seed and its index, which is in its `stats.seed`.
        stop: one or several strings; the text ends before the first that appears.
        stop_token_ids: token ids that end the completion as an end-of-sequence token does, even with `ignore_eos`.
        ignore_eos: whether to continue past end-of-sequence tokens; False by default.
        special_tokens: whether the text of the prompt or of its messages may name special tokens, such as
            "<|endoftext|>". False by default: their names are then plain text.
        skip_special_tokens: whether the completion's text leaves out the names of special tokens; True by default. That
            of the token that ends the completion is always left out.
        continue_final_message: whether the completion continues the last message of a chat, instead of beginning the
            assistant's next turn; False by default.
        tools: the functions that the assistant may call in a chat, each a mapping in OpenAI's form. Its calls are part
            of the text, in the form that `ServiceInfo.tool_format` names.
        chat_template_kwargs: further variables of a chat's template, such as `{"enable_thinking": False}`. A variable
            that the template does not read has no effect.
        log_probs: whether to return the tokens' log-probabilities.
        top_log_probs: the number of likeliest tokens to return at the position of each token, with their
            log-probabilities: 0 (the default) to 20. A number above 0 implies `log_probs`.
        prompt_log_probs: whether to return the log-probabilities of the prompt's tokens, with `top_log_probs` likeliest
            tokens at each position. The whole prompt is then prefilled, even if a part of it is cached.
        prompt_text: whether to return the prompt's text, and the offset of each of its tokens in it.
        json_schema: a JSON schema, as a mapping or as text, which the completion follows; None (the default) allows any
            text. At most one of `json_schema`, `regex` and `grammar` may be set.
        regex: a regular expression that the whole completion matches, in the syntax of Rust's regex crate.
        grammar: a Lark grammar in llguidance's dialect; the completion is a text of its rule "start".
        trace: whether to return a `RoundTrace` for each round.
        queue_position: whether `stream` returns chunks with the number of requests ahead while this one waits.
        policy: the policy that grows the trees, one of `ServiceInfo.policies`; None (the default) is the service's
            default.
        policy_settings: the policy's settings by name, each a number, a word or a sequence of numbers, for example
            {"depth": 8, "root": "single"} or {"widths": [1, 1, 3]}. Settings left out keep their defaults.
        store: whether the service may keep the completion: to draft later ones of this principal from it, to compare
            draft models, and to record it for the training of one if its operator has turned that on. True by default.
    """

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float | None
    min_p: float
    repetition_penalty: float | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    scheme: SamplingScheme | None
    n: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    special_tokens: bool
    skip_special_tokens: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any] | None
    log_probs: bool
    top_log_probs: int
    prompt_log_probs: bool
    prompt_text: bool
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None
    trace: bool
    queue_position: bool
    policy: str | None
    policy_settings: PolicySettings | None
    store: bool


def build_request(
    prompt: Prompt,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float | None = None,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    scheme: SamplingScheme | None = None,
    n: int = 1,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    special_tokens: bool = False,
    skip_special_tokens: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    log_probs: bool = False,
    top_log_probs: int = 0,
    prompt_log_probs: bool = False,
    prompt_text: bool = False,
    json_schema: Mapping[str, Any] | str | None = None,
    regex: str | None = None,
    grammar: str | None = None,
    trace: bool = False,
    queue_position: bool = False,
    policy: str | None = None,
    policy_settings: PolicySettings | None = None,
    store: bool = True,
    **unknown: object,
) -> draft_pb2.GenerateRequest:
    """Build the request of one call; `GenerateOptions` explains the options.

    Raises:
        TypeError: an option has the wrong Python type, or does not exist.
        InvalidRequestError: the message cannot carry a value, for example a negative count.
    """
    for option in unknown:
        names = ", ".join([*GenerateOptions.__annotations__, "timeout"])
        raise TypeError(f"there is no option {option!r}; the options are {names}")
    sampling = tree_pb2.SamplingOptions(
        temperature=_number("temperature", temperature),
        top_k=_integer("top_k", top_k, _UINT32_MAX),
        top_p=None if top_p is None else _number("top_p", top_p),
        seed=None if seed is None else _integer("seed", seed, _UINT64_MAX),
        min_p=_number("min_p", min_p),
        repetition_penalty=None if repetition_penalty is None else _number("repetition_penalty", repetition_penalty),
        frequency_penalty=_number("frequency_penalty", frequency_penalty),
        presence_penalty=_number("presence_penalty", presence_penalty),
        logit_bias=_logit_bias(logit_bias),
        scheme=None if scheme is None else _scheme(scheme),
    )
    # These fields are float32. A number that rounds to 0 would silently mean 0: a tiny temperature would turn sampling
    # into greedy decoding.
    for name, value, sent in (
        ("temperature", temperature, sampling.temperature),
        ("min_p", min_p, sampling.min_p),
        ("repetition_penalty", repetition_penalty, sampling.repetition_penalty),
        ("frequency_penalty", frequency_penalty, sampling.frequency_penalty),
        ("presence_penalty", presence_penalty, sampling.presence_penalty),
    ):
        if value and not sent:
            _refuse(f"{name} {value!r} is too small; it rounds to 0")
    request = draft_pb2.GenerateRequest(
        max_new_tokens=None if max_new_tokens is None else _integer("max_new_tokens", max_new_tokens, _UINT32_MAX),
        sampling=sampling,
        n=_integer("n", n, _UINT32_MAX),
        stop=_stop(stop),
        stop_token_ids=_token_ids("stop_token_ids", "a sequence of token ids", stop_token_ids),
        ignore_eos=_flag("ignore_eos", ignore_eos),
        special_tokens=_flag("special_tokens", special_tokens),
        special_tokens_in_text=not _flag("skip_special_tokens", skip_special_tokens),
        log_probs=_flag("log_probs", log_probs),
        top_log_probs=_integer("top_log_probs", top_log_probs, _UINT32_MAX),
        prompt_log_probs=_flag("prompt_log_probs", prompt_log_probs),
        prompt_text=_flag("prompt_text", prompt_text),
        trace=_flag("trace", trace),
        queue_position=_flag("queue_position", queue_position),
        policy=_policy(policy, policy_settings),
        grammar=_grammar(json_schema, regex, grammar),
    )
    if not _flag("store", store):
        request.store = False
    continues = _flag("continue_final_message", continue_final_message)
    if _is_chat(prompt):
        request.chat.CopyFrom(_chat(prompt, continues, tools, chat_template_kwargs))
    elif continues:
        _refuse("continue_final_message is for chats")
    elif tools or chat_template_kwargs:
        _refuse(f"{'tools' if tools else 'chat_template_kwargs'} are for chats")
    elif isinstance(prompt, str):
        request.text = _string("prompt", prompt)
    else:
        what = "a str, a sequence of token ids or a sequence of messages"
        request.token_ids.CopyFrom(draft_pb2.TokenIds(ids=_token_ids("prompt", what, prompt)))
    return _sized(request)


def build_tokenize_request(
    prompt: str | Sequence[Message],
    *,
    add_special_tokens: bool = True,
    special_tokens: bool = False,
    continue_final_message: bool = False,
    token_strings: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> draft_pb2.TokenizeRequest:
    """Build the request of one call of `tokenize`.

    Raises:
        TypeError: an argument has the wrong Python type.
        InvalidRequestError: the message cannot carry a value.
    """
    request = draft_pb2.TokenizeRequest(
        special_tokens=_flag("special_tokens", special_tokens),
        add_special_tokens=_flag("add_special_tokens", add_special_tokens),
        token_strings=_flag("token_strings", token_strings),
    )
    if _is_chat(prompt):
        continues = _flag("continue_final_message", continue_final_message)
        request.chat.CopyFrom(_chat(prompt, continues, tools, chat_template_kwargs))
    elif tools or chat_template_kwargs:
        _refuse(f"{'tools' if tools else 'chat_template_kwargs'} are for chats")
    else:
        request.text = _string("prompt", prompt)
    return _sized(request)


def build_detokenize_request(token_ids: Sequence[int]) -> draft_pb2.DetokenizeRequest:
    """Build the request of one call of `detokenize`. Errors as in `build_tokenize_request`."""
    ids = _token_ids("token_ids", "a sequence of token ids", token_ids)
    return _sized(draft_pb2.DetokenizeRequest(token_ids=ids))


def _sized(request: _Request) -> _Request:
    if request.ByteSize() > _MAX_REQUEST_BYTES:
        _refuse(f"the request has {request.ByteSize()} bytes; a server takes at most {_MAX_REQUEST_BYTES}")
    return request


def _logit_bias(biases: Mapping[int, float] | None) -> dict[int, float]:
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise TypeError(f"logit_bias must be a mapping, not {type(biases).__name__}")
    return {
        _integer("logit_bias: a token id", key, _UINT32_MAX): _number(f"logit_bias[{key}]", value)
        for key, value in biases.items()
    }


def _scheme(name: str) -> tree_pb2.SamplingScheme:
    scheme = _SCHEMES.get(_string("scheme", name))
    if scheme is None:
        _refuse(f"scheme must be one of {', '.join(_SCHEMES)}, not {name!r}")
    return scheme


def _stop(stop: str | Sequence[str]) -> list[str]:
    if isinstance(stop, (bytes, bytearray)) or not isinstance(stop, Iterable):
        raise TypeError(f"stop must be a str or a sequence of them, not {type(stop).__name__}")
    return [_string("stop", text) for text in ([stop] if isinstance(stop, str) else stop)]


def _policy(name: str | None, settings: PolicySettings | None) -> draft_pb2.Policy | None:
    if settings is not None and not isinstance(settings, Mapping):
        raise TypeError(f"policy_settings must be a mapping, not {type(settings).__name__}")
    if name is None and not settings:
        return None
    message = draft_pb2.Policy(name="" if name is None else _string("policy", name))
    for key, value in (settings or {}).items():
        setting = f"policy_settings: {_string('policy_settings: a name', key)}"
        if isinstance(value, str):
            message.word_settings[key] = _string(setting, value)
        elif isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
            numbers = [_number(f"{setting}[{index}]", number) for index, number in enumerate(value)]
            message.list_settings[key].values.extend(numbers)
        elif isinstance(value, Real):
            message.settings[key] = _number(setting, value)
        else:
            raise TypeError(f"{setting} must be a number, a str or a sequence of numbers, not {type(value).__name__}")
    return message


def _grammar(schema: Mapping[str, Any] | str | None, regex: str | None, lark: str | None) -> tree_pb2.Grammar | None:
    given = {"json_schema": schema, "regex": regex, "grammar": lark}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        _refuse(f"{' and '.join(named)} are set; expected at most one of them")
    if schema is not None:
        text = schema if isinstance(schema, str) else _json("json_schema", schema, " or a str")
        return tree_pb2.Grammar(kind=tree_pb2.GRAMMAR_KIND_JSON_SCHEMA, text=_string("json_schema", text))
    if regex is not None:
        return tree_pb2.Grammar(kind=tree_pb2.GRAMMAR_KIND_REGEX, text=_string("regex", regex))
    if lark is not None:
        return tree_pb2.Grammar(kind=tree_pb2.GRAMMAR_KIND_LARK, text=_string("grammar", lark))
    return None


def _json(name: str, value: object, or_text: str = "") -> str:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping{or_text}, not {type(value).__name__}")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name} cannot be written as JSON: {error}") from None


def _json_array(name: str, values: object) -> str:
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a sequence of mappings, not {type(values).__name__}")
    texts = [_json(f"{name}[{place}]", value) for place, value in enumerate(values)]
    return _string(name, f"[{', '.join(texts)}]") if texts else ""


def _is_chat(prompt: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _chat(
    messages: Sequence[object],
    continue_final_message: bool,
    tools: Sequence[object],
    variables: Mapping[str, Any] | None,
) -> draft_pb2.Chat:
    chat = draft_pb2.Chat(continue_final_message=continue_final_message, tools=_json_array("tools", tools))
    if variables is not None:
        chat.template_variables = _string("chat_template_kwargs", _json("chat_template_kwargs", variables))
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.keys() - {*_OPTIONAL} != {"role", "content"}:
            raise TypeError(
                f"prompt[{place}] must be a mapping with role and content, and optionally {', '.join(_OPTIONAL)}"
            )
        fields = {
            name: _json_array(f"prompt[{place}]: {name}", value)
            if name == "tool_calls"
            else _string(f"prompt[{place}]: {name}", value)
            for name, value in message.items()
        }
        chat.messages.add(**fields)
    return chat


def _token_ids(name: str, what: str, token_ids: Iterable[object]) -> list[int]:
    if isinstance(token_ids, (bytes, bytearray)) or not isinstance(token_ids, Iterable):
        raise TypeError(f"{name} must be {what}, not {type(token_ids).__name__}")
    return [_integer(f"{name}: a token id", token_id, _UINT32_MAX) for token_id in token_ids]


def _flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    return value


def _integer(name: str, value: object, maximum: int) -> int:
    """Return `value` as an int; any type with `__index__` is accepted, except bool, which would be a mistake."""
    if isinstance(value, bool):
        _refuse(f"{name} must be an integer, not {value}")
    try:
        number = index(value)  # type: ignore[arg-type]  # raises TypeError for other types
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None
    if not 0 <= number <= maximum:
        _refuse(f"{name} must be between 0 and {maximum}, not {number}")
    return number


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        _refuse(f"{name} is too large")


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        # A lone surrogate, for example from a command line that is not UTF-8.
        _refuse(f"{name} is not valid Unicode")
    return value


def _refuse(reason: str) -> NoReturn:
    raise InvalidRequestError(grpc.StatusCode.INVALID_ARGUMENT, reason) from None
