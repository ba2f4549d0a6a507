"""Connections with HTTP clients: what each waits for, and until when.

uvicorn limits one phase of a connection, the time between two requests. Here each phase has a deadline, and when there
are too many connections, those give way that have been waiting longest for their client.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dynatree.gateway.limits import Limits

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at the deadlines
ROOM_SECONDS = 0.05  # between two looks for room, when every connection has a request in work
NO_FILES_SECONDS = 1.0  # until the next try, when the process or the machine has no files left
FREE_CHUNKS = 256  # of a body, and one more for every `BYTES_A_CHUNK`: a short one costs as much as a long one
BYTES_A_CHUNK = 64
GIVE_WAY = 32  # the part of all connections that gives way at once, so that a look at them all is rare
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Phase(Enum):
    """What a connection is at."""

    HEAD = auto()  # of its first request, or the rest of a later one's
    IDLE = auto()  # between two requests
    WORK = auto()  # a request is read and answered
    REST = auto()  # of a body that is not wanted any more
    TAKING = auto()  # the client has yet to read what was written
    CLOSING = auto()


class _Parser(h11.Connection):
    """Refuses a body that comes in more chunks than its length is reason for."""

    _chunks = _bytes = 0

    def next_event(self) -> Any:
        """What the client sent next."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // BYTES_A_CHUNK:
                raise h11.RemoteProtocolError("the body has too many small chunks")
        return event


class Connection(H11Protocol):
    """One connection.

    Args:
        limits: Of all of them.
        **options: As uvicorn makes it.
    """

    def __init__(self, *, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Parser(h11.SERVER)
        self._limits = limits
        self._phase = Phase.HEAD
        self._cycle: object = None  # the request that the phase is of
        self._since = self.loop.time()
        self._full_since: float | None = None  # that the client takes less than is written
        self._full_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take what the client sent, but not without end what it sends ahead of an answer."""
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > self._limits.ahead_bytes:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless an answer has begun; a request that it cuts short has no client any more."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        """The client takes less than is written."""
        super().pause_writing()
        self._full_since = self.loop.time()
        self._full_bytes = self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        """It has taken nearly everything."""
        super().resume_writing()
        self._full_since = None

    @property
    def spoke(self) -> bool:
        """Whether a request has come from this client."""
        return self.cycle is not None

    def waiting_since(self) -> float | None:
        """Since when it waits for its client, on the loop's clock; None while a request is in work."""
        self._look()
        return None if self._in_work else self._since

    def check_deadline(self) -> None:
        """End it if it has waited too long for its client."""
        self._look()
        seconds = self._seconds()
        if seconds is not None and self.loop.time() - self._since > seconds:
            self.drop()

    def drop(self) -> None:
        """Close it, at once where there may be something that its client does not take."""
        if self._phase in (Phase.HEAD, Phase.IDLE):
            self.transport.close()
        else:
            self.transport.abort()

    @property
    def _in_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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
        if self._full_since is not None:
            return Phase.TAKING
        if self._in_work:
            return Phase.WORK
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.REST
        return Phase.HEAD if self.cycle is None or self.conn.trailing_data[0] else Phase.IDLE

    def _seconds(self) -> float | None:
        """How long it may wait in its phase; None for as long as the request in work takes."""
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
    """Takes connections from a socket, and makes room for them. uvicorn knows it as one of its servers.

    Args:
        listening: The socket.
        connect: Makes the protocol of a connection.
        connections: Those that are open.
        limits: Of all of them.
        tls: Encrypts them; None for plain ones.
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
        self._opening: dict[asyncio.Task[None], float] = {}  # handshakes, since when
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._accept()), self._loop.create_task(self._watch())]

    def close(self) -> None:
        """Take no more connections."""
        self._tasks[0].cancel()
        for opening in self._opening:
            opening.cancel()

    async def wait_closed(self) -> None:
        """Return when nothing is left of it."""
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
            except OSError as error:
                if error.errno in _NO_FILES:
                    log.error("no more connections for now: %s", error.strerror)
                    await asyncio.sleep(NO_FILES_SECONDS)
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
            await asyncio.sleep(0)  # a socket at which many wait would leave no time for anything else

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening.pop(opening, None)

    async def _open(self, accepted: socket.socket) -> None:
        seconds = None if self._tls is None else self._limits.handshake_seconds
        try:
            await self._loop.connect_accepted_socket(
                self._connect, accepted, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError:  # no handshake, or a client that has gone
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise

    def _make_room(self) -> bool:
        """Close connections that have waited longest for their client, first those that never said anything."""
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
