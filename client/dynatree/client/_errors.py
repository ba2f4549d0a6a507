"""The errors of calls, as one hierarchy.

::

    DynaTreeError                the base class
    ├── InvalidRequestError      INVALID_ARGUMENT, OUT_OF_RANGE: change the request
    │   └── ContextLengthError   the target's context is too short: shorten the prompt, or request fewer tokens
    ├── AuthenticationError      UNAUTHENTICATED, PERMISSION_DENIED: show another token or certificate
    ├── ModelMismatchError       FAILED_PRECONDITION: the draft and the target cannot work together
    ├── ServerBusyError          RESOURCE_EXHAUSTED: try again later
    ├── ServerUnavailableError   UNAVAILABLE: no server answers at the address
    ├── DeadlineExceededError    DEADLINE_EXCEEDED: `timeout` has passed
    ├── RequestCancelledError    CANCELLED: the server cancelled the request, or the client was closed
    └── ServerError              ABORTED (the client stopped reading), INTERNAL, UNKNOWN and every other code
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import grpc


class DynaTreeError(Exception):
    """A call that failed.

    An error in the middle of a stream has the text and the tokens received so far.

    Attributes:
        code: the gRPC status code; INVALID_ARGUMENT also if the client refused the request before sending it.
        details: the message of the server or of gRPC; may be empty.
        request_id: the request's id in the server's log; empty if the server sent none.
        text: the text received before the failure; if n > 1, the texts of the completions one after the other.
        token_ids: the tokens received before the failure. The last characters of their text may be missing in `text`.
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


class GrammarError(InvalidRequestError):
    """The JSON schema, regular expression or grammar is wrong, too complex or not supported."""

    summary = "invalid grammar"


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt with its new tokens, does not fit the target's context.

    Attributes:
        context_length: the target's context, in tokens.
        prompt_tokens: a lower bound on the tokens of the prompt.
    """

    context_length: int = 0
    prompt_tokens: int = 0


class AuthenticationError(DynaTreeError):
    """The server does not accept the token or the certificate, or does not allow this call to its owner."""

    summary = "not authenticated"


class ModelMismatchError(DynaTreeError):
    """The draft model and the target model cannot work together, for example with different tokenizers."""

    summary = "the models do not match"


class ServerBusyError(DynaTreeError):
    """The server has no room for the request at this time.

    Attributes:
        retry_after: the server's estimate of the seconds after which to try again; None if it sent none.
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
    """The server failed, or sent an answer that this client does not understand."""

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
    """Translate the failure of an RPC to the server at `address`."""
    code = code_of(error)
    details = error.details() or ""
    if code is not error.code():
        details = "the server dropped the request; it may have too many"
    if code is grpc.StatusCode.UNAVAILABLE:
        details = f"{address}: {details}"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        details = f"the server at {address} is not a draft service: {details}"
    context_length, prompt_tokens = _trailing(error, "context-length"), _trailing(error, "prompt-tokens")
    kind = ContextLengthError if context_length and prompt_tokens else _ERROR_OF_CODE.get(code, ServerError)
    if kind is InvalidRequestError and _trailing(error, "dynatree-refused") == "grammar":
        kind = GrammarError
    failure = kind(code, details, text=text, token_ids=token_ids)
    failure.request_id = _trailing(error, "x-request-id")
    if isinstance(failure, ServerBusyError):
        failure.retry_after = retry_after(error)
    if isinstance(failure, ContextLengthError):
        failure.context_length, failure.prompt_tokens = int(context_length), int(prompt_tokens)
    return failure


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    """Return the status of a failed call; UNAVAILABLE for a call that gRPC's core at the server dropped silently.

    The core drops calls at random once a thousand of them wait for the server to accept them.
    """
    code: grpc.StatusCode = error.code()
    dropped = code is grpc.StatusCode.CANCELLED and error.details() == "CANCELLED"
    return grpc.StatusCode.UNAVAILABLE if dropped else code


def retry_after(error: grpc.RpcError) -> float | None:
    """Return the trailing metadata `retry-after-ms` in seconds; None without it."""
    value = _trailing(error, "retry-after-ms")
    return int(value) / 1e3 if value.isdecimal() else None


def is_quota(error: grpc.RpcError) -> bool:
    """Whether the principal's quota refused the call, not a full server."""
    return _trailing(error, "dynatree-refused") == "quota"


def _trailing(error: grpc.RpcError, name: str) -> str:
    metadata: Any = error.trailing_metadata() or ()
    value = dict(metadata).get(name, "")
    return value if isinstance(value, str) else ""
