"""Reads the bodies of requests, up to a length and a deadline, and validates them."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from codecs import BOM_UTF8
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from dynatree.gateway.counts import VALUE_BYTES, Counts
from dynatree.gateway.encoding import aside
from dynatree.gateway.errors import LONGEST_PARAM, ApiError, client_disconnected
from dynatree.gateway.limits import Limits
from dynatree.gateway.open_requests import OpenRequest

LONG_BYTES = 2**16  # a longer body is parsed on a worker thread
COUNTED_BYTES = 2**14  # counted between two yields to the event loop
_TOO_DEEP = re.compile(r"recursion limit exceeded at line (\d+) column (\d+)")

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body], limits: Limits) -> Body:
    """Read the body of a request, and validate it against a pydantic model.

    Raises:
        ApiError: The body is not JSON, too long, too slow or invalid.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another origin cannot send this type without a CORS preflight
        raise ApiError(
            415, f"the content type is {kind or 'missing'}, expected application/json", code="invalid_content_type"
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.body_bytes:
        raise _too_large(limits)
    open_request: OpenRequest = request.state.open_request
    try:
        with open_request.reading():
            body = await _read(request, open_request, limits)
    except ClientDisconnect:
        raise client_disconnected() from None
    except TimeoutError:
        message = f"the body arrived too slowly; expected {limits.body_rate} bytes/s after {limits.body_seconds:g} s"
        raise ApiError(408, message, code="request_timeout") from None
    if len(body) > LONG_BYTES:
        return await aside(lambda: _parsed(body, model))
    return _parsed(body, model)


async def _read(request: Request, open_request: OpenRequest, limits: Limits) -> bytes:
    """Read a whole body and count its values as they arrive; hold the memory of its bytes and its parsed values."""
    counts = Counts()
    pieces: list[bytes] = []
    length = values = 0
    began = asyncio.get_running_loop().time()
    async with asyncio.timeout(limits.body_seconds) as deadline:
        async for piece in request.stream():
            length += len(piece)
            if length > limits.body_bytes:
                raise _too_large(limits)
            for start in range(0, len(piece), COUNTED_BYTES):
                if start:
                    await asyncio.sleep(0)
                counts.add(piece[start : start + COUNTED_BYTES])
            pieces.append(piece)
            found = counts.values + counts.strings + counts.containers
            open_request.hold(len(piece) + (found - values) * VALUE_BYTES)
            values = found
            deadline.reschedule(began + limits.body_seconds + length / limits.body_rate)
    return b"".join(pieces)


def _parsed(body: bytes, model: type[Body]) -> Body:
    body = body.removeprefix(BOM_UTF8)  # some Windows programs write one
    try:
        fields = from_json(body)
    except ValueError as error:
        found = _TOO_DEEP.match(str(error))
        if found and body.lstrip().startswith(b"{"):
            name = _last_path(body, *map(int, found.groups()))
            raise ApiError(400, f"{name} is nested too deeply: {error}", param=name, code="invalid_value") from None
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ApiError.of_body(error, fields) from None


def _last_path(body: bytes, line: int, column: int) -> str:
    """Return the path, as long as an error's may be, of the last value before a place in a body; both count from 1."""
    begin = bisect_left(range(len(body)), line - 1, key=lambda end: body.count(b"\n", 0, end))
    value = from_json(body[: begin + column - 1], allow_partial=True)
    path = ""
    while isinstance(value, dict | list) and value:
        key = [*value][-1] if isinstance(value, dict) else len(value) - 1
        path, value = f"{path}.{key}", value[key]
    return path[1 : LONGEST_PARAM + 1].rstrip(".")


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is longer than {limits.body_bytes} bytes", code="request_too_large")
