"""A gRPC server with health, reflection, message limits, error mapping and a draining stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dynatree.common.address import check_address
from dynatree.common.errors import ServiceError, StartupError

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two servers must not bind one port silently
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 20_000),  # a peer that vanished without a word must not hold its session
    ("grpc.keepalive_timeout_ms", 10_000),
)
LAST_WORDS_SECONDS = 1.0
HELD_SECONDS = 24 * 3600.0  # gRPC itself ends no call of ours: it would not wait for what uses the model
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),  # not below the server's min_ping_interval_without_data_ms
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a service that comes back is found within a second
    ("grpc.enable_http_proxy", 0),  # the two services are neighbours, whatever the environment says of the web
)


class Server:
    """One gRPC server; `start`, then `wait`.

    Attributes:
        address: Where it listens, with the port that was bound where port 0 was asked for.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._calls = Calls()
        self._server = grpc.aio.server(interceptors=[self._calls], options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        self._names = service_names
        self.address = ""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    @property
    def grpc_server(self) -> grpc.aio.Server:
        """The server to which generated code adds its servicers."""
        return self._server

    async def start(self, address: str) -> None:
        """Bind `host:port` or `unix:PATH`, and answer health checks with SERVING.

        Raises:
            StartupError: The address is taken or makes no sense.
        """
        try:
            check_address(address)
        except ValueError as error:
            raise StartupError(str(error)) from None
        if address.startswith("unix:"):
            _prepare_socket(Path(address.removeprefix("unix:")))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {address}: the address is in use or not this machine's") from error
        self.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        await self._server.start()
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def wait(self, grace: float) -> None:
        """Serve until SIGTERM or SIGINT, then report NOT_SERVING and give open calls `grace` seconds."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
        await self.stop(grace)

    async def stop(self, grace: float) -> None:
        """Report NOT_SERVING, refuse new calls, and end open ones after `grace` seconds; returns when they have ended.

        So whatever they use may be closed then. A call that is ended so gets UNAVAILABLE.
        """
        await self._health.enter_graceful_shutdown()
        refusing = asyncio.ensure_future(self._server.stop(grace + HELD_SECONDS))
        await self._calls.end(grace)
        # time for peers to take their statuses; one that reads nothing, or watches the health, would never end
        await self._server.stop(LAST_WORDS_SECONDS)
        await refusing


class Calls(grpc.aio.ServerInterceptor):
    """The open calls of this package's services, each ended with the code that its error has.

    Domain errors have their gRPC codes; anything else becomes INTERNAL with an id, its detail only in the log.
    """

    def __init__(self) -> None:
        # each call's task, which ends when its status is sent, and a future that is done when its handler is
        self._open: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        self._ending = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap the handlers of this package; health and reflection map their own errors.

        Its bidirectional handlers read and write through the context, so they are awaited like unary ones.
        """
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/dynatree."):
            return handler  # type: ignore[no-any-return]
        if handler.unary_unary:
            return handler._replace(unary_unary=self._awaited(handler.unary_unary))  # type: ignore[no-any-return]
        if handler.unary_stream:
            return handler._replace(unary_stream=self._stream(handler.unary_stream))  # type: ignore[no-any-return]
        return handler._replace(stream_stream=self._awaited(handler.stream_stream))  # type: ignore[no-any-return]

    async def end(self, grace: float) -> None:
        """Wait `grace` seconds for the open calls, then end those that are left, and wait for them to clean up."""
        if self._open:
            await asyncio.wait(self._open, timeout=grace)
        self._ending = True
        for task, handled in self._open.items():
            if not handled.done():
                task.cancel()
        if self._open:
            await asyncio.wait(self._open.values())

    def _awaited(self, behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def mapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            handled = self._begin()
            whole = _WholeMessages(context)
            try:
                return await behavior(request, whole)
            except (Exception, asyncio.CancelledError) as error:
                failure = error
            finally:
                handled.set_result(None)
            return await self._abort(failure, whole)

        return mapped

    def _stream(self, behavior: Callable[..., AsyncIterator[Any]]) -> Callable[..., Awaitable[Any]]:
        """Written from here, not by gRPC, so that the generator is closed before the call ends, whatever ends it."""

        async def written(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with aclosing(behavior(request, context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    await context.write(response)

        return self._awaited(written)

    def _begin(self) -> asyncio.Future[None]:
        """The task that runs a call is gRPC's own, and ends when the status is sent."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = asyncio.get_running_loop().create_future()
        task.add_done_callback(self._open.pop)
        if self._ending:
            task.cancel()
        return self._open[task]

    async def _abort(self, error: BaseException, context: _WholeMessages) -> NoReturn:
        if isinstance(error, asyncio.CancelledError):
            if not self._ending or context.cancelled():
                raise error
            try:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the service is shutting down")
            except Exception as told:
                raise (told if isinstance(told, grpc.aio.AbortError) else error) from None  # or the peer has just left
        if isinstance(error, ServiceError):
            await context.abort(error.code, str(error))
        if isinstance(error, grpc.aio.AbortError):
            raise error
        request_id = uuid.uuid4().hex[:12]
        log.error("request %s failed", request_id, exc_info=error)
        await context.abort(
            grpc.StatusCode.INTERNAL, f"internal error; the service's log has it as request {request_id}"
        )


class _WholeMessages:
    """A call's context whose messages are sent whole, even where the task that writes them is cancelled meanwhile.

    gRPC notes that a call's initial metadata are sent when the first write returns. Where that write was cancelled it
    would send them again with the status, which its core refuses: the call's client would not be told why it ended.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._writing: asyncio.Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """As the context's own."""
        self._writing = asyncio.ensure_future(self._context.write(message))
        self._writing.add_done_callback(_retrieve_exception)
        await asyncio.shield(self._writing)

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """As the context's own, after the message that is on its way, if one is."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._context.abort(code, details)


def _retrieve_exception(writing: asyncio.Future[None]) -> None:
    """Where the task that waits is gone nobody else does, and asyncio would log it."""
    if not writing.cancelled():
        writing.exception()


def _prepare_socket(path: Path) -> None:
    """Make a missing folder, private to this user, and refuse a socket on which another server answers."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot listen on unix:{path}: {error.strerror}") from error
    if not os.path.lexists(path):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return  # left behind by a server that is gone; gRPC replaces it
    raise StartupError(f"cannot listen on unix:{path}: another server answers there")
