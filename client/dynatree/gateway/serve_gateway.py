"""Runs the gateway: binds a socket, builds the application, and serves until a signal."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from dynatree.client import AsyncClient
from dynatree.common.errors import StartupError
from dynatree.common.shutdown import on_shutdown
from dynatree.gateway.app import build_app
from dynatree.gateway.connections import Connection, Listener
from dynatree.gateway.hosts import Hosts
from dynatree.gateway.limits import Limits
from dynatree.pages.live import live_page
from dynatree.serving.certificates import check_certificates
from dynatree.serving.files import LOOK_SECONDS, Reloaded
from dynatree.serving.listening import cannot_listen
from dynatree.serving.metrics import new_registry
from dynatree.serving.security import SecuritySettings, is_local
from dynatree.serving.unix_socket import prepare_socket

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of a gateway, as parsed from the command line.

    Attributes:
        server: Address of the draft service, or a comma-separated list, as `dynatree.client` takes it.
        address: Listening address, `host:port` or `unix:PATH`.
        security: TLS of the connections with HTTP clients; `insecure` applies to the draft service too.
        client: Keyword arguments of the client of the draft service.
        origins: Origins whose pages may call the gateway (CORS).
        grace: Seconds that open requests may continue after a stop signal.
        names: Names of the model; empty means the target's own name.
        api_key: API key that requests must show; None leaves authentication to the draft service.
        allowed_hosts: Further host names under which a gateway on loopback may be called; "*" allows any.
        limits: Limits of connections and requests.
    """

    server: str
    address: str
    security: SecuritySettings
    client: dict[str, Any] = field(default_factory=dict)
    origins: Sequence[str] = ()
    grace: float = 10.0
    names: Sequence[str] = ()
    api_key: str | None = None
    allowed_hosts: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)


async def serve(
    settings: GatewaySettings, started: Callable[[str], object], loading: Callable[[], bool] = lambda: False
) -> int | None:
    """Serve until SIGINT or SIGTERM, and return its number.

    Args:
        settings: The gateway's settings.
        started: Called with the URL once the gateway accepts requests.
        loading: Returns whether the services behind the gateway are still starting; until then requests get a 503.

    Raises:
        StartupError: An address or a file cannot be used.
    """
    settings.security.check_plain(settings.address)
    if not (settings.client.get("ca") or settings.security.insecure):
        _check_server(settings.server)
    try:
        client = AsyncClient(settings.server, **settings.client)
    except ValueError as error:
        raise StartupError(str(error)) from error
    except OSError as error:
        raise StartupError(f"TLS cannot be used: {Path(error.filename or '').name}: {error.strerror}") from error
    app = build_app(
        client,
        new_registry(),
        live_page(),
        origins=settings.origins,
        names=settings.names,
        key=settings.api_key,
        hosts=Hosts(settings.address, settings.allowed_hosts),
        limits=settings.limits,
        loading=loading,
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        http="h11",
        timeout_keep_alive=math.ceil(settings.limits.idle_seconds),
        timeout_graceful_shutdown=max(1, round(settings.grace)),
        ws="none",
        lifespan="on",
    )
    tls = _reloaded_context(settings.security)
    listening, address = _listen(settings.address)
    config.load()
    url = address if address.startswith("unix:") else f"{'https' if tls else 'http'}://{address}"
    server = _Server(config, lambda: started(url), settings.limits, None if tls is None else tls.value)
    with listening:
        rotating = asyncio.ensure_future(_rotate(tls))
        try:
            await server.serve([listening])
            return server.stopped_by
        finally:
            rotating.cancel()
            if address.startswith("unix:"):
                Path(address.removeprefix("unix:")).unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """A uvicorn server that reports when it accepts requests, and that returns on a signal instead of re-raising it."""

    def __init__(
        self, config: uvicorn.Config, started: Callable[[], object], limits: Limits, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._tell = started
        self._limits = limits
        self._tls = tls
        self.stopped_by: int | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop gracefully at the first signal, and without waiting for open requests at the second."""

        def stop(number: int) -> None:
            self.stopped_by = self.stopped_by or number
            self.handle_exit(number, None)

        with on_shutdown(stop):
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End open requests, and log the shutdown."""
        log.info("shutting down, %d open requests", len(self.server_state.tasks))
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then skips the application's shutdown
            await self.lifespan.shutdown()
        log.info("shut down")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `started`."""
        await super().startup([])
        if self.started:
            self.servers.extend(self._listener(listening) for listening in sockets or ())
            self._tell()

    def _listener(self, listening: socket.socket) -> Any:
        listening.setblocking(False)
        listening.listen(self.config.backlog)
        state = self.server_state
        connect = partial(
            Connection,
            limits=self._limits,
            config=self.config,
            server_state=state,
            app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )
        return Listener(listening, connect, cast(set[Connection], state.connections), self._limits, self._tls)


def _check_server(server: str) -> None:
    """Refuse to send API keys to another machine in plain text.

    Raises:
        StartupError: An address is not a loopback address.
    """
    for address in server.split(","):
        if not is_local(address.strip().removeprefix("dns:///")):
            raise StartupError(
                f"API keys would cross the network to {address.strip()} in plain text; expected --ca for TLS, or "
                "--insecure where the network is private"
            )


def _listen(address: str) -> tuple[socket.socket, str]:
    """Return a bound socket, and its address with the actual port where port 0 was requested.

    Raises:
        StartupError: The address cannot be used.
    """
    try:
        if address.startswith("unix:"):
            path = Path(address.removeprefix("unix:"))
            prepare_socket(path)
            if path.exists() and not path.is_socket():
                raise StartupError(f"cannot listen on {address}: a file that is not a socket is in its place")
            path.unlink(missing_ok=True)  # left behind by a gateway that is gone
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(str(path))
            return listening, address
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Name the protocol: asyncio disables Nagle's algorithm, which costs 40 ms, only where it sees IPPROTO_TCP.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), int(port)))
        return listening, f"{host}:{listening.getsockname()[1]}"
    except OSError as error:
        raise cannot_listen(address, error) from error


def _reloaded_context(security: SecuritySettings) -> Reloaded[ssl.SSLContext] | None:
    """Return the TLS context, which reloads the certificate when its files change; None for plain connections.

    Raises:
        StartupError: A file cannot be read or is invalid.
    """
    certificate, key = security.certificate, security.key
    if certificate is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def read() -> ssl.SSLContext:
        check_certificates((certificate, key), None)  # loading an invalid pair would leave the context without any
        context.load_cert_chain(certificate, key, password="")  # takes effect at the next connection; never prompts
        return context

    try:
        return Reloaded([certificate, key], read)
    except (OSError, ValueError) as error:
        raise StartupError(f"TLS cannot be used: {certificate.name}, {key.name}: {error}") from error


async def _rotate(tls: Reloaded[ssl.SSLContext] | None) -> None:
    """Reload the certificate whenever its files change."""
    with suppress(asyncio.CancelledError):
        while tls is not None:
            await asyncio.sleep(LOOK_SECONDS)
            tls.value  # noqa: B018 - the property reloads changed files
