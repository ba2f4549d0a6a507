"""Answers that end when their client goes away: one object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynatree.client import DynaTreeError
from dynatree.gateway.encoding import PIECE_BYTES, encode
from dynatree.gateway.errors import ApiError, LengthFields, stopping
from dynatree.gateway.open_requests import OpenRequest

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies hand each event on as it comes
]


def error_response(error: ApiError) -> JSONResponse:
    """The answer to a request that is refused or has failed."""
    return JSONResponse(error.body(), error.status, dict(error.headers))


class InPieces(Response):
    """JSON that is handed to the connection piece by piece, as the client takes it."""

    media_type = "application/json"

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(headers={"content-length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._pieces.reverse()
        while self._pieces:
            piece = self._pieces.pop()
            await send({"type": "http.response.body", "body": piece, "more_body": bool(self._pieces)})


def whole(work: Callable[[], Awaitable[list[bytes]]], fields: LengthFields) -> Response:
    """One JSON object, when it is there; `fields` of the request, for its errors."""

    async def tell(telling: Telling) -> None:
        await telling.respond(InPieces(await work()))

    return _WhileWanted(tell, fields)


def as_events(events: AsyncGenerator[str], fields: LengthFields) -> Response:
    """Events as they come, and `[DONE]` behind them; `fields` of the request, for its errors."""

    async def tell(telling: Telling) -> None:
        async with aclosing(events):
            async for event in events:
                await telling.event(event)
        await telling.event("[DONE]", last=True)

    return _WhileWanted(tell, fields)


class Telling:
    """What one client is told: a response, or events. A failure is told in the way that is still open."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._begun = False

    async def respond(self, response: Response) -> None:
        """Tell all of it."""
        await response(self._scope, self._receive, self._send)

    async def event(self, data: str, *, last: bool = False) -> None:
        """Tell one event of a stream."""
        if not self._begun:
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._begun = True
        for message in _event(data, last=last):
            await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Tell an error: as a status of its own before the first event, and behind it as the last event."""
        if self._begun:
            await self.event(encode(error.body()), last=True)
        else:
            await self.respond(error_response(error))


def _event(data: str, *, last: bool) -> Iterator[Message]:
    """One event; a long one as several messages, each of which waits until the client has taken the last."""
    event = f"data: {data}\n\n".encode()
    for start in range(0, len(event), PIECE_BYTES):
        end = start + PIECE_BYTES
        yield {
            "type": "http.response.body",
            "body": event[start:end],
            "more_body": not last or end < len(event),
        }


class UntilStopped:
    """Around every phase of a request, from its body to its last byte: one that is cut short is told.

    The server cancels the task of each request that is still open when it has waited long enough at its stop, and
    open_requests.py those that go for the sake of others.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        begun = as_events = ended = False

        async def noted(message: Message) -> None:
            nonlocal begun, as_events, ended
            if message["type"] == "http.response.start":
                begun, as_events = True, message["headers"] is _HEADERS
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            request: OpenRequest = scope["state"]["open_request"]
            error = request.ended_by or stopping()
            if not begun:
                await error_response(error)(scope, receive, send)
            elif as_events and not ended:
                for message in _event(encode(error.body()), last=True):
                    await send(message)


class _WhileWanted(Response):
    """Tells until the client goes away; nobody gets the rest then."""

    def __init__(self, tell: Callable[[Telling], Awaitable[None]], fields: LengthFields) -> None:
        self.background = None
        self._tell = tell
        self._fields = fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        telling = Telling(scope, receive, send)
        work = asyncio.ensure_future(self._told(telling))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
