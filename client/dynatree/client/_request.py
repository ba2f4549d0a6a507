"""From keyword options to a GenerateRequest.

Only what protobuf cannot carry is refused here; what a value may be is the server's to say, in one place for all.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from operator import index
from typing import NoReturn, TypedDict

import grpc

from dynatree.client._errors import InvalidRequestError
from dynatree.v1 import draft_pb2, tree_pb2

_UINT32_MAX = 2**32 - 1
_MAX_REQUEST_BYTES = 4 * 2**20  # the servers' limit, and gRPC's own
_UINT64_MAX = 2**64 - 1

Prompt = str | Sequence[int]


class GenerateOptions(TypedDict, total=False):
    """The keyword options of `generate` and `stream`; every one may be left out.

    Attributes:
        max_new_tokens: at least 1; None (the default) goes on until the end of sequence or the context limit.
        temperature: 0 (the default) is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 (the default) keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1]; None (the default) keeps all.
        seed: in [0, 2**64); the same seed gives the same tokens. None (the default) is a random one.
        stop: one string or several; the text ends before the first that appears.
        ignore_eos: generate on past end-of-sequence tokens.
        policy: how trees are grown, one of `ServiceInfo.policies`; None (the default) is the service's default.
        policy_settings: the policy's settings by name, for example {"depth": 8}; the others keep their defaults.
    """

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    policy: str | None
    policy_settings: Mapping[str, float] | None


def build_request(
    prompt: Prompt,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    policy: str | None = None,
    policy_settings: Mapping[str, float] | None = None,
) -> draft_pb2.GenerateRequest:
    """The message for one completion; see `GenerateOptions` for what the options mean.

    Raises:
        TypeError: an option has the wrong Python type.
        InvalidRequestError: a value that the message cannot carry, such as a negative count.
    """
    if not isinstance(ignore_eos, bool):
        raise TypeError(f"ignore_eos must be a bool, not {type(ignore_eos).__name__}")
    request = draft_pb2.GenerateRequest(
        max_new_tokens=None if max_new_tokens is None else _integer("max_new_tokens", max_new_tokens, _UINT32_MAX),
        sampling=_sampling(temperature, top_k, top_p, seed),
        stop=_stop(stop),
        ignore_eos=ignore_eos,
        policy=_policy(policy, policy_settings),
    )
    if isinstance(prompt, str):
        request.text = _string("prompt", prompt)
    else:
        request.token_ids.CopyFrom(draft_pb2.TokenIds(ids=_token_ids(prompt)))
    if request.ByteSize() > _MAX_REQUEST_BYTES:
        _refuse(f"the request has {request.ByteSize()} bytes; a server takes at most {_MAX_REQUEST_BYTES}")
    return request


def _sampling(temperature: float, top_k: int, top_p: float | None, seed: int | None) -> tree_pb2.SamplingOptions:
    sampling = tree_pb2.SamplingOptions(
        temperature=_number("temperature", temperature),
        top_k=_integer("top_k", top_k, _UINT32_MAX),
        top_p=None if top_p is None else _number("top_p", top_p),
        seed=None if seed is None else _integer("seed", seed, _UINT64_MAX),
    )
    # The field is a float32: a temperature that rounds to 0 there would silently turn sampling into greedy decoding.
    if temperature and not sampling.temperature:
        _refuse(f"temperature {temperature!r} is too small to be told from 0")
    return sampling


def _stop(stop: str | Sequence[str]) -> list[str]:
    return [_string("stop", text) for text in ([stop] if isinstance(stop, str) else stop)]


def _policy(name: str | None, settings: Mapping[str, float] | None) -> draft_pb2.Policy | None:
    if name is None and not settings:
        return None
    return draft_pb2.Policy(
        name="" if name is None else _string("policy", name),
        settings={_string("policy_settings", key): _number(key, value) for key, value in (settings or {}).items()},
    )


def _token_ids(prompt: Iterable[int]) -> list[int]:
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
        raise TypeError(f"prompt must be a str or a sequence of token ids, not {type(prompt).__name__}")
    return [_integer("token id", token_id, _UINT32_MAX) for token_id in prompt]


def _integer(name: str, value: int, maximum: int) -> int:
    """`value` as an int; any type that is one by `__index__` will do, except bool, which is a mistake here."""
    if isinstance(value, bool):
        _refuse(f"{name} must be an integer, not {value}")
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None
    if not 0 <= number <= maximum:
        _refuse(f"{name} must be between 0 and {maximum}, not {number}")
    return number


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        _refuse(f"{name} is too large")


def _string(name: str, value: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        # A lone surrogate, as a command line of bytes that are not UTF-8 leaves behind.
        _refuse(f"{name} is not valid Unicode")
    return value


def _refuse(reason: str) -> NoReturn:
    raise InvalidRequestError(grpc.StatusCode.INVALID_ARGUMENT, reason) from None
