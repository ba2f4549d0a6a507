"""Errors in the form of OpenAI's API: an HTTP status, and an object with a message, a type, a field and a code."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any

import grpc
from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from dynatree.client import ContextLengthError, DynaTreeError, GrammarError, ServerBusyError

log = logging.getLogger(__name__)

# gRPC status -> HTTP status, type, code. Any other status becomes a 500.
_STATUSES: dict[grpc.StatusCode, tuple[int, str, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error", "invalid_value"),
    grpc.StatusCode.OUT_OF_RANGE: (400, "invalid_request_error", "context_length_exceeded"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error", "permission_denied"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    grpc.StatusCode.FAILED_PRECONDITION: (503, "server_error", "models_do_not_match"),
    grpc.StatusCode.UNIMPLEMENTED: (503, "server_error", "service_unavailable"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error", "service_unavailable"),
    grpc.StatusCode.CANCELLED: (503, "server_error", "service_unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "server_error", "timeout"),
}


CLIENT_DISCONNECTED = 499  # nginx's "client closed request"
LONGEST_MESSAGE = 1000  # characters
LONGEST_PARAM = 100
_UNREACHABLE = "the draft service, or every verify service behind it, is out of reach; try again later"
_NAMED = re.compile(r"(messages\.[a-z0-9_.]+|chat_template_kwargs): ")  # begins the service's words about a field
# Fields of other servers -> this server's of the same meaning.
_INSTEAD = {"n_predict": "max_tokens", "max_new_tokens": "max_tokens", "repeat_penalty": "repetition_penalty"}
# Fields by which clients ask for reasoning, or for none. Only a chat template knows how its model does that.
_REASONING = {"enable_thinking", "think", "thinking", "thinking_budget", "thinking_budget_tokens"}
_REASONING |= {"thinking_token_budget", "reasoning", "reasoning_budget", "reasoning_effort"}
_VARIABLE = 'the chat template\'s own variable in chat_template_kwargs, such as {"enable_thinking": false}'
_ASK_FOR_KEY = {"WWW-Authenticate": "Bearer"}
_NO_KEY = "the request has no known API key; expected the header `Authorization: Bearer KEY`"
# Messages that replace the service's own, which name an address or gRPC's metadata.
_WORDS = {
    grpc.StatusCode.UNAVAILABLE: _UNREACHABLE,
    grpc.StatusCode.UNIMPLEMENTED: _UNREACHABLE,
    grpc.StatusCode.UNAUTHENTICATED: _NO_KEY,
}


@dataclass(frozen=True)
class RequestFields:
    """The names of a request's fields that errors of the service may be about; None for fields that it does not have.

    Attributes:
        prompt: The field with the prompt.
        new_tokens: The field with the number of new tokens.
        grammar: The field that limits the answer.
    """

    prompt: str
    new_tokens: str | None
    grammar: str | None


@dataclass
class ApiError(Exception):
    """A failure that ends a request with an error response."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: DynaTreeError, fields: RequestFields | None = None) -> ApiError:
        """Translate a failure of the draft service; `fields` names the request's fields, if it is a completion."""
        status, type_, code = _STATUSES.get(error.code, (500, "server_error", "server_error"))
        headers = dict(_ASK_FOR_KEY) if status == 401 else {}
        if isinstance(error, ServerBusyError) and error.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
        log.info("a request failed", extra={"fields": {"request_id": error.request_id, "error": str(error)}})
        if isinstance(error, ContextLengthError) and fields is not None:
            too_long = error.prompt_tokens >= error.context_length or fields.new_tokens is None
            param = fields.prompt if too_long else fields.new_tokens
            return cls(status, error.details, type_, param=param, code=code)
        message, named = _WORDS.get(error.code, str(error)), _NAMED.match(error.details)
        param = named[1] if named else None
        if isinstance(error, GrammarError) and fields is not None and fields.grammar is not None:
            param = fields.grammar
            message = f"{param}: {message.removeprefix(f'{error.summary}: ')}"
        return cls(status, message, type_, param=param, code=code, headers=headers)

    @classmethod
    def of_body(cls, error: ValidationError, body: Any) -> ApiError:
        """Describe the first invalid field of a body, by its full name."""
        found = [(_path(each, body), each) for each in error.errors(include_url=False, include_input=False)]
        top = found[0][0][:1]
        # A value of a union type has errors for every alternative; report the alternative that matched furthest.
        found = [(path, each) for path, each in found if path[:1] == top]
        long = [item for item in found if item[1]["type"] == "too_long"]  # so its elements were right
        path, first = max(
            long or found, key=lambda item: (len(item[0]), [part for part in item[0] if isinstance(part, int)])
        )
        name = ".".join(map(str, path))
        if first["type"] == "extra_forbidden":
            instead = _VARIABLE if name in _REASONING and "messages" in body else _INSTEAD.get(name)
            expected = f"; expected {instead}" if instead else ""
            return cls(400, f"{name} is not supported{expected}", param=name, code="unsupported_parameter")
        if first["type"] == "literal_error":
            value = reduce(getitem, path, body)
            quoted = f"{name} {value[:LONGEST_PARAM]}" if isinstance(value, str) else name
            message = f"{quoted} is not supported; expected {first['ctx']['expected']}"
            return cls(400, message, param=name, code="unsupported_value")
        if first["type"] == "union_tag_invalid":
            name = f"{name}.{first['ctx']['discriminator'].strip(chr(39))}"
            message = f"{name} {first['ctx']['tag'][:LONGEST_PARAM]} is not supported; expected one of "
            return cls(400, message + first["ctx"]["expected_tags"], param=name, code="unsupported_value")
        if not path and "field" in (context := first.get("ctx", {})):
            return cls(400, first["msg"], param=context["field"], code="invalid_value")
        reasons = [_reason(each) for where, each in found if where == path]
        reason = ", or ".join(dict.fromkeys(reasons))
        return cls(400, f"{name}: {reason}" if path else reason, param=name or None, code="invalid_value")

    def body(self) -> dict[str, Any]:
        """Return the error object, with long quotations of the request truncated."""
        param = None if self.param is None else self.param[:LONGEST_PARAM]
        return {
            "error": {"message": self.message[:LONGEST_MESSAGE], "type": self.type, "param": param, "code": self.code}
        }


def at_odds(field: str, message: str) -> PydanticCustomError:
    """Return the error of a validator of a whole body about a field that is at odds with other fields."""
    return PydanticCustomError("at_odds", "{message}", {"field": field, "message": message})


def _reason(error: ErrorDetails) -> str:
    return "Input should be an object" if error["type"] == "model_type" else error["msg"].removeprefix("Value error, ")


def _path(error: ErrorDetails, body: Any) -> tuple[int | str, ...]:
    """Return the error's path in the body, without the union alternatives that pydantic adds to it."""
    path: list[int | str] = []
    for place, part in enumerate(error["loc"], 1):
        item = isinstance(body, list) and isinstance(part, int) and part < len(body)
        field = isinstance(body, dict) and part in body
        if item or field:
            body = body[part]
        if item or field or (error["type"] == "missing" and place == len(error["loc"])):
            path.append(part)
    return tuple(path)


def unauthorized() -> ApiError:
    """Return the error for a request that does not show the gateway's own API key."""
    return ApiError(401, _NO_KEY, "authentication_error", code="invalid_api_key", headers=_ASK_FOR_KEY)


def client_disconnected() -> ApiError:
    """Return the error for a client that has disconnected; only logs and metrics see its status."""
    return ApiError(CLIENT_DISCONNECTED, "the client has closed the connection", code="client_closed_request")


def shutting_down() -> ApiError:
    """Return the error for a request that the gateway's shutdown cancels."""
    return ApiError(503, "the gateway is stopping; try again later", "server_error", code="service_unavailable")
