"""What can go wrong in a call, as one small hierarchy.

::

    DynaTreeError                what every other error here is
    ├── InvalidRequestError      INVALID_ARGUMENT, OUT_OF_RANGE: change the request
    │   └── ContextLengthError   it does not fit the target's context: shorten the prompt, or ask for fewer tokens
    ├── AuthenticationError      UNAUTHENTICATED, PERMISSION_DENIED: show another token or certificate
    ├── ModelMismatchError       FAILED_PRECONDITION: the draft and the target cannot work together
    ├── ServerBusyError          RESOURCE_EXHAUSTED: try again later
    ├── ServerUnavailableError   UNAVAILABLE: nobody answers at the address
    ├── DeadlineExceededError    DEADLINE_EXCEEDED: `timeout` has passed
    ├── RequestCancelledError    CANCELLED: the server, or closing the client, ended the request
    └── ServerError              ABORTED (the client stopped reading), INTERNAL, UNKNOWN and every other code
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import grpc


class DynaTreeError(Exception):
    """A call that failed.

    Nothing that was received is lost: an error in the middle of a stream carries it.

    Attributes:
        code: the gRPC status code; INVALID_ARGUMENT also where the client refused the request before sending it.
        details: what the server, or gRPC, said about it; may be empty.
        request_id: names the request in the server's log; empty where the server did not name it.
        text: the text that was received before the failure; of several completions, one after the other.
        token_ids: the tokens that were received before the failure. Their last characters may be missing in `text`.
    """

    summary: ClassVar[str] = "the request failed"

    def __init__(self, code: grpc.StatusCode, details: str, *, text: str = "", token_ids: Sequence[int] = ()) -> None:
        super().__init__(code, details)
        self.code = code
        self.details = details
        self.request_id = ""
        self.text = text
        self.token_ids = tuple(token_ids)

    def __str__(self) -> str:
        sentence = f"{self.summary}: {self.details}" if self.details else self.summary
        return f"{sentence} (tokens received: {len(self.token_ids)})" if self.token_ids else sentence


class InvalidRequestError(DynaTreeError):
    """The request itself is wrong: a value out of range, or a prompt that does not fit the target's context."""

    summary = "invalid request"


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt with its new tokens, does not fit the target's context.

    Attributes:
        context_length: the target's context, in tokens.
        prompt_tokens: tokens of the prompt, at least.
    """

    context_length: int = 0
    prompt_tokens: int = 0


class AuthenticationError(DynaTreeError):
    """The server does not know the token or the certificate, or does not let its owner do this."""

    summary = "not authenticated"


class ModelMismatchError(DynaTreeError):
    """The draft model and the target model cannot work together, for example with different tokenizers."""

    summary = "the models do not match"


class ServerBusyError(DynaTreeError):
    """The server has no room for the request; a later one may be served.

    Attributes:
        retry_after: seconds after which to try again, as the server guesses; None where it does not say.
    """

    summary = "the server has no room for the request"
    retry_after: float | None = None


class ServerUnavailableError(DynaTreeError):
    """The server, or the verify service behind it, does not answer."""

    summary = "the server is unavailable"


class DeadlineExceededError(DynaTreeError):
    """The call took longer than its `timeout`."""

    summary = "the timeout has passed"


class RequestCancelledError(DynaTreeError):
    """The request was cancelled by the server, or by closing the client that made it."""

    summary = "the request was cancelled"


class ServerError(DynaTreeError):
    """The server failed, or answered what this client does not understand."""

    summary = "the server failed"

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.code.name}]"


_ERROR_OF_CODE: dict[grpc.StatusCode, type[DynaTreeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.FAILED_PRECONDITION: ModelMismatchError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ServerBusyError,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
}


def error_from_rpc(
    error: grpc.RpcError, address: str, *, text: str = "", token_ids: Sequence[int] = ()
) -> DynaTreeError:
    """The error that a failed RPC to the server at `address` is raised as."""
    code = code_of(error)
    details = error.details() or ""
    if code is not error.code():
        details = "the server dropped the request; it may have too many"
    if code is grpc.StatusCode.UNAVAILABLE:
        details = f"{address}: {details}"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        details = f"what answers at {address} is not a draft service: {details}"
    context_length, prompt_tokens = _trailing(error, "context-length"), _trailing(error, "prompt-tokens")
    kind = ContextLengthError if context_length and prompt_tokens else _ERROR_OF_CODE.get(code, ServerError)
    failure = kind(code, details, text=text, token_ids=token_ids)
    failure.request_id = _trailing(error, "x-request-id")
    if isinstance(failure, ServerBusyError):
        failure.retry_after = retry_after(error)
    if isinstance(failure, ContextLengthError):
        failure.context_length, failure.prompt_tokens = int(context_length), int(prompt_tokens)
    return failure


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    """The status of a failed call; UNAVAILABLE for one that gRPC's core at the server dropped without a word.

    It does so at random with calls that nobody has taken up yet, once there are a thousand of them.
    """
    code: grpc.StatusCode = error.code()
    dropped = code is grpc.StatusCode.CANCELLED and error.details() == "CANCELLED"
    return grpc.StatusCode.UNAVAILABLE if dropped else code


def retry_after(error: grpc.RpcError) -> float | None:
    """Seconds from the trailing metadata `retry-after-ms`; None where there are none."""
    value = _trailing(error, "retry-after-ms")
    return int(value) / 1e3 if value.isdecimal() else None


def is_quota(error: grpc.RpcError) -> bool:
    """Whether a quota of the principal refused the call, and not a server that is full."""
    return _trailing(error, "dynatree-refused") == "quota"


def _trailing(error: grpc.RpcError, name: str) -> str:
    metadata: Any = error.trailing_metadata() or ()
    value = dict(metadata).get(name, "")
    return value if isinstance(value, str) else ""
