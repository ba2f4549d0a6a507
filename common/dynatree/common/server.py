"""A gRPC server with TLS, authentication, health, reflection, message limits and a draining stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dynatree.common.address import check_address
from dynatree.common.aio_server import aio_server
from dynatree.common.call_tracker import CallTracker
from dynatree.common.errors import DeviceFailedError, StartupError
from dynatree.common.grpc_options import server_options
from dynatree.common.limits import IDLE_SECONDS
from dynatree.common.security import LOCAL, Authentication, SecuritySettings
from dynatree.common.stopping import on_stop
from dynatree.common.unix_socket import prepare_socket

log = logging.getLogger(__name__)

LIVENESS = "liveness"  # the name under which health is SERVING for as long as the process answers
FREE_CALLS = 64  # besides those that hold a session or wait for one: health, models
LAST_WORDS_SECONDS = 1.0  # for statuses on their way
# gRPC ends no call itself: its stop returns before the handlers that it cancels have ended (grpc/grpc issue 37239), and
# those may still use the model.
HELD_SECONDS = 24 * 3600.0


class Server:
    """One gRPC server; `start`, then `wait`.

    Attributes:
        address: Where it listens, with the port that was bound where port 0 was asked for.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        idle_seconds: float = IDLE_SECONDS,
        security: SecuritySettings = LOCAL,
        most_calls: int | None = None,
    ) -> None:
        """Assemble it.

        Args:
            service_names: Whose health it tells, besides its own.
            idle_seconds: How long a call may wait for a peer that reads nothing.
            security: Who may call.
            most_calls: That are served at once; one more is refused. None: any number.

        Raises:
            StartupError: A file of the security settings cannot be read.
        """
        self._calls = CallTracker(
            idle_seconds, Authentication(security), None if most_calls is None else most_calls + FREE_CALLS
        )
        self._security = security
        self._server = aio_server([self._calls], server_options())
        self._health = health.aio.HealthServicer()
        self._names = service_names
        self._serving = True
        self._started = False
        self.address = ""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if security.reflection:
            reflection.enable_server_reflection(
                (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
            )

    @property
    def grpc_server(self) -> grpc.aio.Server:
        """The server to which generated code adds its servicers."""
        return self._server

    async def start(self, address: str) -> None:
        """Bind `host:port` or `unix:PATH`, and answer health checks.

        Raises:
            StartupError: The address is taken, makes no sense, or is open to others without encryption.
        """
        try:
            check_address(address)
        except ValueError as error:
            raise StartupError(str(error)) from None
        self._security.check_plain(address)
        credentials = self._security.server_credentials()
        if address.startswith("unix:"):
            prepare_socket(Path(address.removeprefix("unix:")))
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {address}: the address is in use or not this machine's") from error
        self.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        await self._server.start()
        self._started = True
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(self._serving)

    async def set_serving(self, serving: bool) -> None:
        """Tell those who ask for its health whether calls are welcome; liveness is told apart."""
        self._serving = serving
        if self._started:
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", *self._names):
                await self._health.set(name, status)

    async def wait(self, grace: float, ready: Callable[[], object] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT, then report NOT_SERVING and give open calls `grace` seconds.

        `ready` is called once a signal is heeded so.

        Raises:
            DeviceFailedError: The device has failed for good; every call was ended.
        """
        stop = asyncio.Event()
        with on_stop(lambda _: stop.set()):
            ready()
            poisoned = self._calls.poisoned
            waits = [asyncio.ensure_future(event.wait()) for event in (stop, poisoned)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()
            log.info("stopping, %d open calls", self._calls.open)
            await self.stop(0.0 if poisoned.is_set() else grace)
            log.info("stopped")
        if poisoned.is_set():
            raise DeviceFailedError("the device has failed for good; the log has the error")

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
