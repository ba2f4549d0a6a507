"""A gRPC server with TLS, authentication, health checks, reflection, message limits, and a graceful stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dynatree.common.errors import DeviceFailedError, StartupError
from dynatree.common.limits import IDLE_SECONDS
from dynatree.common.shutdown import on_shutdown
from dynatree.serving.address import check_address
from dynatree.serving.aio_server import aio_server
from dynatree.serving.call_tracker import CallTracker
from dynatree.serving.grpc_options import server_options
from dynatree.serving.security import LOCAL, Authentication, SecuritySettings
from dynatree.serving.unix_socket import prepare_socket

log = logging.getLogger(__name__)

LIVENESS = "liveness"  # name of the health service that is SERVING as long as the process answers
FREE_CALLS = 64  # additional calls that need no session, such as model information
OTHERS_CALLS = FREE_CALLS // 2  # of these, the calls that one principal leaves to the others
LAST_WORDS_SECONDS = 1.0  # for sending the last statuses
# gRPC must not cancel calls itself: its `stop` returns before the cancelled handlers have ended (grpc/grpc issue
# 37239), and these may still use the model.
HELD_SECONDS = 24 * 3600.0


class Server:
    """One gRPC server; `start`, then `wait`.

    Attributes:
        address: Listening address; if port 0 was requested, with the port that was bound.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        idle_seconds: float = IDLE_SECONDS,
        security: SecuritySettings = LOCAL,
        most_calls: int | None = None,
    ) -> None:
        """Create the server without starting it.

        Args:
            service_names: Services whose health is reported, besides the server's own.
            idle_seconds: Seconds that a call may wait for a peer that sends or reads nothing.
            security: Security settings.
            most_calls: Maximum number of concurrent calls, besides `FREE_CALLS`; None means no limit.

        Raises:
            StartupError: A file of the security settings cannot be read.
        """
        most = None if most_calls is None else most_calls + FREE_CALLS
        most_of_one = None if most is None else most - OTHERS_CALLS
        self._calls = CallTracker(idle_seconds, Authentication(security), most, most_of_one)
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
            StartupError: The address is in use, is invalid, or is open to other machines without encryption.
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
            raise StartupError(
                f"cannot listen on {address}: the address is in use or does not belong to this machine"
            ) from error
        self.address = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        await self._server.start()
        self._started = True
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(self._serving)

    async def set_serving(self, serving: bool) -> None:
        """Report in health checks whether the service accepts calls; `LIVENESS` is not affected."""
        self._serving = serving
        if self._started:
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", *self._names):
                await self._health.set(name, status)

    async def wait(
        self,
        grace: float,
        ready: Callable[[], object] = lambda: None,
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Serve until SIGTERM or SIGINT, then report NOT_SERVING and give open calls `grace` seconds.

        `ready` is called once the signal handlers are installed. `then` runs at the end, unless the device has failed;
        further signals do not interrupt it.

        Raises:
            DeviceFailedError: The device has failed for good; all calls have been ended.
        """
        stop = asyncio.Event()
        with on_shutdown(lambda _: stop.set()):
            ready()
            poisoned = self._calls.poisoned
            waits = [asyncio.ensure_future(event.wait()) for event in (stop, poisoned)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()
            log.info("shutting down, %d open calls", self._calls.open)
            await self.stop(0.0 if poisoned.is_set() else grace)
            if then is not None and not poisoned.is_set():
                await then()
            log.info("shut down")
        if poisoned.is_set():
            raise DeviceFailedError("the device has failed permanently; see the service's log")

    async def stop(self, grace: float) -> None:
        """Report NOT_SERVING, refuse new calls, and end open calls after `grace` seconds.

        All handlers have ended when this returns, so the resources they use may be closed. A call that is ended early
        gets UNAVAILABLE.
        """
        await self._health.enter_graceful_shutdown()
        refusing = asyncio.ensure_future(self._server.stop(grace + HELD_SECONDS))
        await self._calls.end(grace)
        # bound the time for sending statuses: a peer that reads nothing, or watches the health, would never end
        await self._server.stop(LAST_WORDS_SECONDS)
        await refusing
