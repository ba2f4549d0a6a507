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

_DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies hand each event on as it comes
]


def error_response(error: ApiError) -> JSONResponse:
    """The answer to a request that is refused or has failed."""
    return JSONResponse(error.body(), error.status, dict(error.headers))


class _WhileWanted(Response):
    """Work that is cancelled when the client goes away; nobody gets its answer then. One that is cut short is told."""

    def __init__(self) -> None:
        self.background = None
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        work = asyncio.ensure_future(self._answer(scope, receive, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the gateway stops, and has waited long enough
            await _end(work)
            await self._fail(stopping(), scope, receive, send)
            return
        finally:
            gone.cancel()
            await _end(work)
        if not work.cancelled():
            work.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, as a status of its own or, behind what was sent, as the last event."""
        if self._begun:
            await send({"type": "http.response.body", "body": _event(error.body()), "more_body": False})
        else:
            await error_response(error)(scope, receive, send)


class Whole(_WhileWanted):
    """One JSON object, when it is there."""

    def __init__(self, work: Callable[[], Awaitable[Json]]) -> None:
        super().__init__()
        self._work = work

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            whole = await self._work()
        except DynaTreeError as error:
            await self._fail(ApiError.of(error), scope, receive, send)
        else:
            await JSONResponse(whole)(scope, receive, send)


class Events(_WhileWanted):
    """Events as they come. A failure before the first is a status of its own; one in their midst is the last event."""

    def __init__(self, events: AsyncGenerator[Json]) -> None:
        super().__init__()
        self._events = events

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    if not self._begun:
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                        self._begun = True
                    await send({"type": "http.response.body", "body": _event(event), "more_body": True})
        except DynaTreeError as error:
            await self._fail(ApiError.of(error), scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": _DONE, "more_body": False})


async def _end(work: asyncio.Future[None]) -> None:
    if not work.done():
        work.cancel()
        await asyncio.wait([work])


def _event(event: Json) -> bytes:
    return f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
