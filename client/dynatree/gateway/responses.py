"""Answers that end when their client goes away: one object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dynatree.client import DynaTreeError
from dynatree.gateway.answers import Json
from dynatree.gateway.errors import ApiError, stopping

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies hand each event on as it comes
]


def error_response(error: ApiError) -> JSONResponse:
    """The answer to a request that is refused or has failed."""
    return JSONResponse(error.body(), error.status, dict(error.headers))


def whole(work: Callable[[], Awaitable[Json]]) -> Response:
    """One JSON object, when it is there."""

    async def tell(telling: Telling) -> None:
        await telling.respond(JSONResponse(await work()))

    return _WhileWanted(tell)


def as_events(events: AsyncGenerator[Json]) -> Response:
    """Events as they come, and `[DONE]` behind them."""

    async def tell(telling: Telling) -> None:
        async with aclosing(events):
            async for event in events:
                await telling.event(json.dumps(event, ensure_ascii=False, separators=(",", ":")))
        await telling.event("[DONE]", last=True)

    return _WhileWanted(tell)


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
        await self._send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": not last})

    async def fail(self, error: ApiError) -> None:
        """Tell an error: as a status of its own before the first event, and behind it as the last event."""
        if self._begun:
            await self.event(json.dumps(error.body(), ensure_ascii=False), last=True)
        else:
            await self.respond(error_response(error))


class _WhileWanted(Response):
    """Tells until the client goes away; nobody gets the rest then. One that the gateway's stop cuts short is told."""

    def __init__(self, tell: Callable[[Telling], Awaitable[None]]) -> None:
        self.background = None
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        telling = Telling(scope, receive, send)
        work = asyncio.ensure_future(self._told(telling))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the gateway stops, and has waited long enough
            await _end(work)
            await telling.fail(stopping())
            return
        finally:
            gone.cancel()
            await _end(work)
        if not work.cancelled():
            work.result()

    async def _told(self, telling: Telling) -> None:
        try:
            await self._tell(telling)
        except DynaTreeError as error:
            await telling.fail(ApiError.of(error))


async def _end(work: asyncio.Future[None]) -> None:
    if not work.done():
        work.cancel()
        await asyncio.wait([work])


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
