"""Bodies of requests: read to a limit, and checked."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from dynatree.gateway.errors import ApiError, client_went

MAX_BODY_BYTES = 4 * 2**20  # what a gRPC message of the services may have

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body]) -> Body:
    """The body of a request.

    Raises:
        ApiError: It is no JSON, too long, or not what the model describes.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which a page of another origin cannot send without being asked for its origin
        raise ApiError(
            415, f"the body is {kind or 'of no type'}; expected application/json", code="invalid_content_type"
        )
    length = request.headers.get("content-length", "")
    body = b""
    try:
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            raise _too_large()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
    except ClientDisconnect:
        raise client_went() from None
    try:
        fields = from_json(body.removeprefix(BOM_UTF8))  # which some programs for Windows write
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ApiError.of_body(error, fields) from None


def _too_large() -> ApiError:
    message = f"the body is longer than {MAX_BODY_BYTES} bytes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
