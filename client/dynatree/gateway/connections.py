"""Connections with HTTP clients: the phase and the deadline of each.

uvicorn limits one phase of a connection, the time between two requests. Here each phase has a deadline. When there are
too many connections, those that have waited longest for their client are closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from asyncio import sslproto
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dynatree.gateway.limits import Limits

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two checks of the deadlines
ROOM_SECONDS = 0.05  # between two attempts to make room, while every connection has a request in work
ACCEPT_AGAIN_SECONDS = 1.0  # before the next accept, after one that failed, mostly for want of file descriptors
FREE_CHUNKS = 256  # allowed in any body, plus one for every `BYTES_A_CHUNK`: a short chunk costs as much as a long one
BYTES_A_CHUNK = 64
TLS_RECORD = 16 * 1024  # most bytes of one record (RFC 8446, section 5.1)
GIVE_WAY = 32  # making room closes 1 / GIVE_WAY of all connections, so that scans of all connections are rare


class Phase(Enum):
    """The phase of a connection."""

    HEAD = auto()  # receiving the head of the first request, or the rest of a later head
    IDLE = auto()  # between two requests
    WORK = auto()  # reading and answering a request
    REST = auto()  # receiving the rest of a request after its answer
    TAKING = auto()  # the write buffer is full: the client reads too slowly
    CLOSING = auto()


class _Parser(h11.Connection):
    """An HTTP parser that refuses a body with too many chunks for its length."""

    _chunks = _bytes = 0

    def next_event(self) -> Any:
        """Return the next event in the client's bytes."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // BYTES_A_CHUNK:
                raise h11.RemoteProtocolError("the body has too many small chunks")
        return event


class _Lingering:
    """A transport whose `close` lets the client send the rest of its request first, and so read its answer.

    An operating system answers bytes that nobody reads with a reset, which destroys the answer on its way (RFC 9112,
    section 9.6). The client closes the connection, or its deadline does, or a second `close`.
    """

    def __init__(self, transport: asyncio.Transport, unread: Callable[[], bool]) -> None:
        self._transport = transport
        self._unread = unread
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if self.lingers or self._transport.is_closing() or not self._unread():
            self._transport.close()
            return
        self.lingers = True
        if self._transport.can_write_eof():
            self._transport.write_eof()


class Connection(H11Protocol):
    """One connection with an HTTP client.

    Args:
        limits: Limits of all connections.
        **options: Arguments of uvicorn's protocol.
    """

    def __init__(self, *, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Parser(h11.SERVER)
        self._limits = limits
        self._phase = Phase.HEAD
        self._cycle: object = None  # the request that the phase belongs to
        self._since = self.loop.time()
        self._full_since: float | None = None  # when the write buffer became full
        self._full_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; once a request is refused, `transport` lingers until its client has sent it."""
        self._lingering = _Lingering(transport, lambda: self.conn.their_state in (h11.SEND_BODY, h11.ERROR))
        super().connection_made(cast(asyncio.Transport, self._lingering))

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; abort if the client has pipelined too many bytes before the answer."""
        if self._lingering.lingers:
            return
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > self._limits.ahead_bytes:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with a 400 unless an answer has begun; mark an unfinished request as disconnected."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        """Note when the write buffer became full."""
        super().pause_writing()
        self._full_since = self.loop.time()
        self._full_bytes = self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        """Note that the write buffer has drained."""
        super().resume_writing()
        self._full_since = None

    @property
    def spoke(self) -> bool:
        """Whether a request has come from this client."""
        return self.cycle is not None

    def waiting_since(self) -> float | None:
        """Return the loop time since which it has waited for its client; None while a request is in work."""
        self._look()
        return None if self._in_work else self._since

    def check_deadline(self) -> None:
        """Drop the connection if its phase has exceeded its deadline."""
        self._look()
        seconds = self._seconds()
        if seconds is not None and self.loop.time() - self._since > seconds:
            self.drop()

    def drop(self) -> None:
        """Close the connection; discard unsent data in phases where the client may never read it."""
        if self._phase in (Phase.HEAD, Phase.IDLE):
            self.transport.close()
        else:
            self.transport.abort()

    @property
    def _in_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self._lingering.lingers

    def _look(self) -> None:
        phase = self._now_at()
        if phase is Phase.TAKING and self._full_since is not None:
            self._since = self._full_since
        elif phase is not self._phase or self.cycle is not self._cycle:
            self._since = self.loop.time()
        self._phase, self._cycle = phase, self.cycle

    def _now_at(self) -> Phase:
        if self.transport.is_closing():
            return Phase.CLOSING
        if self._lingering.lingers:
            return Phase.REST
        if self._full_since is not None:
            return Phase.TAKING
        if self._in_work:
            return Phase.WORK
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.REST
        return Phase.HEAD if self.cycle is None or self.conn.trailing_data[0] else Phase.IDLE

    def _seconds(self) -> float | None:
        """Time limit of the phase in seconds; None (no limit) while a request is in work."""
        limits = self._limits
        return {
            Phase.HEAD: limits.head_seconds,
            Phase.IDLE: limits.idle_seconds,
            Phase.WORK: None,
            Phase.REST: limits.rest_seconds,
            Phase.TAKING: limits.taking_seconds + self._full_bytes / limits.taking_rate,
            Phase.CLOSING: limits.closing_seconds,
        }[self._phase]


class Listener:
    """Accepts connections from a socket, and closes old ones to make room. uvicorn treats it as one of its servers.

    Args:
        listening: The listening socket.
        connect: Factory of a connection's protocol.
        connections: The open connections.
        limits: Limits of all connections.
        tls: TLS context of the connections; None for plain ones.
    """

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[], asyncio.Protocol],
        connections: Collection[Connection],
        limits: Limits,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._socket = listening
        self._connect = connect
        self._connections = connections
        self._limits = limits
        self._most = limits.most_connections
        self._tls = tls
        # asyncio's read buffer of a TLS connection has 256 KiB, and is often freed only by a full garbage collection
        sslproto.SSLProtocol.max_size = TLS_RECORD
        self._opening: dict[asyncio.Task[None], float] = {}  # TLS handshakes in progress -> when each began
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._accept()), self._loop.create_task(self._watch())]

    def close(self) -> None:
        """Accept no more connections."""
        self._tasks[0].cancel()
        for opening in self._opening:
            opening.cancel()

    async def wait_closed(self) -> None:
        """Wait until its tasks and handshakes have ended."""
        self._tasks[1].cancel()
        await asyncio.wait([*self._tasks, *self._opening])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for connection in list(self._connections):
                connection.check_deadline()

    async def _accept(self) -> None:
        while True:
            try:
                accepted, _ = await self._loop.sock_accept(self._socket)
            except ConnectionAbortedError:  # the client has disconnected
                await asyncio.sleep(0)
                continue
            except OSError as error:
                log.error("cannot accept connections for now: %s", error.strerror)
                await asyncio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            try:
                while len(self._connections) + len(self._opening) >= self._most and not self._make_room():
                    await asyncio.sleep(ROOM_SECONDS)
            except asyncio.CancelledError:
                accepted.close()
                raise
            opening = self._loop.create_task(self._open(accepted))
            self._opening[opening] = self._loop.time()
            opening.add_done_callback(self._opened)
            await asyncio.sleep(0)  # let other tasks run even while many clients wait in the backlog

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening.pop(opening, None)

    async def _open(self, accepted: socket.socket) -> None:
        seconds = None if self._tls is None else self._limits.handshake_seconds
        try:
            await self._loop.connect_accepted_socket(
                self._connect, accepted, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError:  # the handshake failed, or the client has disconnected
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise

    def _make_room(self) -> bool:
        """Close the connections that have waited longest for their client, those that never sent a request first."""
        waiting: list[tuple[bool, float, Callable[[], object]]] = [
            (False, since, opening.cancel) for opening, since in self._opening.items()
        ]
        for connection in self._connections:
            since = connection.waiting_since()
            if since is not None:
                waiting.append((connection.spoke, since, connection.drop))
        waiting.sort(key=lambda each: each[:2])
        chosen = waiting[: max(1, self._most // GIVE_WAY)]
        for *_, drop in chosen:
            drop()
        return bool(chosen)
