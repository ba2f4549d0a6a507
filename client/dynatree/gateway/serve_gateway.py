"""Running the gateway: a socket, the application, and a server until a signal."""

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
from dynatree.common.certificates import check_certificates
from dynatree.common.errors import StartupError
from dynatree.common.files import LOOK_SECONDS, Reloaded
from dynatree.common.listening import cannot_listen
from dynatree.common.metrics import new_registry
from dynatree.common.security import SecuritySettings, is_local
from dynatree.common.stopping import on_stop
from dynatree.common.unix_socket import prepare_socket
from dynatree.gateway.app import build_app
from dynatree.gateway.connections import Connection, Listener
from dynatree.gateway.hosts import Hosts
from dynatree.gateway.limits import Limits
from dynatree.pages.live import live_page

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GatewaySettings:
    """What the command line says.

    Attributes:
        server: The draft service, or several, as `dynatree.client` takes them.
        address: Where to listen: `host:port` or `unix:PATH`.
        security: Of the connections with HTTP clients; `insecure` goes for the draft service as well.
        client: Settings of the client of the draft service.
        origins: Whose pages may call.
        grace: Seconds that open requests get at a stop.
        names: Of the model; none for the target's own.
        api_key: What requests must show; None leaves it to the draft service what they must.
        allowed_hosts: Further names by which requests may call a gateway on loopback; "*" is any.
        limits: Of connections and requests.
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

    `started` is told the address once requests are taken. While the services behind it are `loading`, they are answered
    so.

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
    """Tells when it takes requests, and takes a signal for the end of its work, not of the process."""

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
        """End open requests at the first signal, and at the second do not wait for them."""

        def stop(number: int) -> None:
            self.stopped_by = self.stopped_by or number
            self.handle_exit(number, None)

        with on_stop(stop):
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End open requests; the log tells of it."""
        log.info("stopping, %d open requests", len(self.server_state.tasks))
        await super().shutdown(sockets)
        if self.force_exit:  # the application ends all the same; uvicorn would leave it to be cancelled
            await self.lifespan.shutdown()
        log.info("stopped")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell."""
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
        StartupError: An address is no loopback address.
    """
    for address in server.split(","):
        if not is_local(address.strip().removeprefix("dns:///")):
            raise StartupError(
                f"API keys would cross the network to {address.strip()} in plain text; expected --ca for TLS, or "
                "--insecure where the network is private"
            )


def _listen(address: str) -> tuple[socket.socket, str]:
    """A socket that listens, and its address, with the port that was bound where port 0 was asked for.

    Raises:
        StartupError: The address cannot be used.
    """
    try:
        if address.startswith("unix:"):
            path = Path(address.removeprefix("unix:"))
            prepare_socket(path)
            if path.exists() and not path.is_socket():
                raise StartupError(f"cannot listen on {address}: a file is there that is no socket")
            path.unlink(missing_ok=True)  # left behind by a gateway that is gone
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(str(path))
            return listening, address
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # The protocol by its number: asyncio looks for it before it turns off Nagle's algorithm, which costs 40 ms.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), int(port)))
        return listening, f"{host}:{listening.getsockname()[1]}"
    except OSError as error:
        raise cannot_listen(address, error) from error


def _reloaded_context(security: SecuritySettings) -> Reloaded[ssl.SSLContext] | None:
    """The TLS context, which takes in a certificate that replaces the last; None for plain connections.

    Raises:
        StartupError: A file cannot be read, or makes no sense.
    """
    certificate, key = security.certificate, security.key
    if certificate is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def read() -> ssl.SSLContext:
        check_certificates((certificate, key), None)  # a pair that makes no sense would leave the context with neither
        context.load_cert_chain(certificate, key)  # counts from the next connection on
        return context

    try:
        return Reloaded([certificate, key], read)
    except (OSError, ValueError) as error:
        raise StartupError(f"TLS cannot be used: {certificate.name}, {key.name}: {error}") from error


async def _rotate(tls: Reloaded[ssl.SSLContext] | None) -> None:
    """Look after the certificate."""
    with suppress(asyncio.CancelledError):
        while tls is not None:
            await asyncio.sleep(LOOK_SECONDS)
            tls.value  # noqa: B018 - looking is what reads it anew
