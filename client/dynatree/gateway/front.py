"""What stands in front of every route: names requests, counts and logs."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynatree.gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
_REQUEST_ID = re.compile(rb"[\w.:-]{1,64}")
CLIENT_WENT = 499  # what logs and metrics say of a client that did not wait for the status


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
        try:
            await self._app(scope, receive, send_named)
        finally:
            self._metrics.open.dec()
            seconds = time.perf_counter() - began
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._metrics.answered(route, status, first_byte, seconds)
            if route not in ("/health", "/metrics"):
                fields = {"request_id": name.decode(), "route": route, "status": status, "seconds": seconds}
                log.info("request", extra={"fields": fields})
