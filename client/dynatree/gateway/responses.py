"""Responses that are cancelled when their client disconnects: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynatree.client import DynaTreeError
from dynatree.gateway.encoding import PIECE_BYTES, encode
from dynatree.gateway.errors import ApiError, RequestFields, shutting_down
from dynatree.gateway.open_requests import OpenRequest

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells nginx to forward each event at once
]
_EVENT_END = b"\n\n"
# JSON may have them as they are, and they end no line of an event, but some clients split lines at them.
_LINE_ENDS = ("\x85", "\u2028", "\u2029")


def error_response(error: ApiError) -> JSONResponse:
    """Return the response to a request that was refused or has failed."""
    return JSONResponse(error.body(), error.status, dict(error.headers))


class InPieces(Response):
    """A JSON response that is sent piece by piece, as the client reads it."""

    media_type = "application/json"

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._pieces.reverse()
        while self._pieces:
            piece = self._pieces.pop()
            await send({"type": "http.response.body", "body": piece, "more_body": bool(self._pieces)})


def whole(work: Callable[[], Awaitable[list[bytes]]], fields: RequestFields) -> Response:
    """Return a response of one JSON object, made by `work`; errors name the request's `fields`."""

    async def tell(telling: Telling) -> None:
        await telling.respond(InPieces(await work()))

    return _WhileWanted(tell, fields)


def as_events(events: AsyncGenerator[str], fields: RequestFields) -> Response:
    """Return a stream of `events` that ends with `[DONE]`; errors name the request's `fields`."""

    async def tell(telling: Telling) -> None:
        async with aclosing(events):
            async for event in events:
                await telling.event(event)
        await telling.event("[DONE]", last=True)

    return _WhileWanted(tell, fields)


class Telling:
    """Sends a response or events to one client, and a failure in the form that is still possible."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._begun = False

    async def respond(self, response: Response) -> None:
        """Send a whole response."""
        await response(self._scope, self._receive, self._send)

    async def event(self, data: str, *, last: bool = False) -> None:
        """Send one event of a stream."""
        if not self._begun:
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._begun = True
        for message in _event(data, last=last):
            await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Send an error: as a response with its status before the first event, or else as the last event."""
        if self._begun:
            await self.event(encode(error.body()), last=True)
        else:
            await self.respond(error_response(error))


def _event(data: str, *, last: bool) -> Iterator[Message]:
    """Split one event into ASGI messages, so that sending a long event waits for the client to read."""
    for character in _LINE_ENDS:
        data = data.replace(character, f"\\u{ord(character):04x}")
    event = f"data: {data}".encode() + _EVENT_END
    for start in range(0, len(event), PIECE_BYTES):
        end = start + PIECE_BYTES
        yield {
            "type": "http.response.body",
            "body": event[start:end],
            "more_body": not last or end < len(event),
        }


class UntilStopped:
    """Middleware that sends an error to the client of a cancelled request.

    uvicorn cancels the tasks of requests that are still open when the grace period of a shutdown ends.
    open_requests.py cancels requests to make room for others.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; if its task is cancelled, send the error in the form that is still possible.

        After a part of an event there is none: the error would be in its text. The server then closes the connection.
        """
        begun = as_events = ended = cut = False

        async def noted(message: Message) -> None:
            nonlocal begun, as_events, ended, cut
            if message["type"] == "http.response.start":
                begun, as_events = True, message["headers"] is _HEADERS
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)
            await send(message)  # uvicorn writes nothing of a message whose sending is cancelled
            cut = not message.get("body", _EVENT_END).endswith(_EVENT_END)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            request: OpenRequest = scope["state"]["open_request"]
            error = request.ended_by or shutting_down()
            if not begun:
                await error_response(error)(scope, receive, send)
            elif as_events and not ended and not cut:
                for message in _event(encode(error.body()), last=True):
                    await send(message)


class _WhileWanted(Response):
    """A response whose work is cancelled when the client disconnects."""

    def __init__(self, tell: Callable[[Telling], Awaitable[None]], fields: RequestFields) -> None:
        self.background = None
        self._tell = tell
        self._fields = fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response until it ends or the client disconnects."""
        telling = Telling(scope, receive, send)
        work = asyncio.ensure_future(self._told(telling))
        disconnected = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait([work, disconnected], return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnected.cancel()
            await _end(work)
        if not work.cancelled():
            work.result()

    async def _told(self, telling: Telling) -> None:
        try:
            await self._tell(telling)
        except DynaTreeError as error:
            await telling.fail(ApiError.of(error, self._fields))


async def _end(work: asyncio.Future[None]) -> None:
    if not work.done():
        work.cancel()
        await asyncio.wait([work])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
