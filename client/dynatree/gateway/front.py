"""What stands in front of every route: names requests, counts and logs."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynatree.gateway.errors import CLIENT_WENT
from dynatree.gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
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
        status, first_byte = CLIENT_WENT, 0.0

        async def send_named(message: Message) -> None:
            nonlocal status, first_byte
            if message["type"] == "http.response.start":
                status, first_byte = message["status"], time.perf_counter() - began
                message["headers"] = [*message["headers"], (REQUEST_ID, name), (b"x-content-type-options", b"nosniff")]
            await send(message)

        self._metrics.open.inc()
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._app(scope, receive, send_named)
        finally:
            self._open.discard(task)
            self._metrics.open.dec()
            seconds = time.perf_counter() - began
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._metrics.answered(route, status, first_byte, seconds)
            if route not in ("/health", "/metrics"):
                fields = {"request_id": name.decode(), "route": route, "status": status, "seconds": seconds}
                log.info("request", extra={"fields": fields})
