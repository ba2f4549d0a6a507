"""The outermost ASGI application, which assigns request ids, counts and logs requests; and the admission behind it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynatree.gateway.errors import CLIENT_DISCONNECTED, ApiError
from dynatree.gateway.hosts import Hosts
from dynatree.gateway.metrics import GatewayMetrics, Times
from dynatree.gateway.open_requests import OpenRequests
from dynatree.gateway.responses import error_response

log = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
WATCHING = frozenset(("/health", "/metrics"))  # routes of monitoring: neither logged nor counted as running requests
_SLASHES = re.compile("/{2,}")
_REQUEST_ID = re.compile(rb"[\w.:-]{1,64}")


class Front:
    """The outermost application.

    It puts into `scope["state"]` a request's `request_id`: the caller's, or else a new one.

    Args:
        app: The application behind it.
        metrics: The gateway's metrics.
        routes: Paths that have their own label in the metrics; the label of all other paths is "other".
        requests: The open requests.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, routes: Collection[str], requests: OpenRequests) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._requests = requests

    async def told(self, seconds: float) -> None:
        """Wait up to `seconds` for cancelled requests to send their error."""
        if tasks := self._requests.tasks:
            await asyncio.wait(tasks, timeout=seconds)

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
        scope["path"] = _path(scope["path"])
        route = scope["path"] if scope["path"] in self._routes else "other"
        watches = route in WATCHING
        status, times = CLIENT_DISCONNECTED, Times()

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
        try:
            await self._app(scope, receive, send_named)
        finally:
            seconds = time.perf_counter() - began
            self._metrics.answered(route, status, times)
            if not watches:
                self._metrics.open.dec()
                fields = {"request_id": name.decode(), "route": route, "status": status, "seconds": seconds}
                log.info("request", extra={"fields": fields})


class Admission:
    """Middleware that refuses requests to unknown hosts and beyond the limits.

    It puts into `scope["state"]` a request's `open_request`.

    Args:
        app: The application behind it.
        requests: The open requests.
        hosts: Host names under which the gateway may be called.
    """

    def __init__(self, app: ASGIApp, requests: OpenRequests, hosts: Hosts) -> None:
        self._app = app
        self._requests = requests
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as stack:
            try:
                self._hosts.check(dict(scope["headers"]).get(b"host"))
                opened = self._requests.opened(watches=scope["path"] in WATCHING)
                scope["state"]["open_request"] = stack.enter_context(opened)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
            else:
                await self._app(scope, receive, send)


def _path(path: str) -> str:
    """Return a path without repeated and final slashes; slashes in a model's name stay."""
    route, models, name = path.partition("/models/")
    return f"{_SLASHES.sub('/', route + models)}{name}".rstrip("/") or "/"
