"""What stands in front of every route: names requests, counts and logs."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import replace

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynatree.gateway.errors import CLIENT_WENT
from dynatree.gateway.metrics import GatewayMetrics, Times

log = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
WATCHING = frozenset(("/health", "/metrics"))  # the routes of those that watch: no requests that run, nor lines of logs
_REQUEST_ID = re.compile(rb"[\w.:-]{1,64}")


class Front:
    """The outermost application. `scope["state"]["request_id"]` names a request: the caller's own name, or a new one.

    Args:
        app: What answers.
        metrics: Counts.
        routes: The paths that are counted each by its name.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, routes: Collection[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._open: set[asyncio.Task[object]] = set()

    async def told(self, seconds: float) -> None:
        """Wait at most so long for requests that the server has cut short, which are still told so."""
        if self._open:
            await asyncio.wait(self._open, timeout=seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = dict(scope["headers"])
        shown = headers.get(REQUEST_ID, b"")
        name = shown if _REQUEST_ID.fullmatch(shown) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = name.decode()
        scope["path"] = scope["path"].rstrip("/") or "/"
        route = scope["path"] if scope["path"] in self._routes else "other"
        watches = route in WATCHING
        status, times = CLIENT_WENT, Times()

        async def send_named(message: Message) -> None:
            nonlocal status, times
            passed = time.perf_counter() - began
            if message["type"] == "http.response.start":
                status, times = message["status"], Times(first_byte=passed)
                message["headers"] = [*message["headers"], (REQUEST_ID, name), (b"x-content-type-options", b"nosniff")]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                times = replace(times, last_byte=passed)
            await send(message)

        if not watches:
            self._metrics.open.inc()
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._app(scope, receive, send_named)
        finally:
            self._open.discard(task)
            seconds = time.perf_counter() - began
            self._metrics.answered(route, status, times)
            if not watches:
                self._metrics.open.dec()
                fields = {"request_id": name.decode(), "route": route, "status": status, "seconds": seconds}
                log.info("request", extra={"fields": fields})
