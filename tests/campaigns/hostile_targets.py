"""The services that hostile traffic is sent to, and their answers; hostile_frames, _http and _calls use both."""

from __future__ import annotations

import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

# Times in which silent or dripping connections must be closed, by the table of limits in docs/guides/security.md.
HANDSHAKE_SECONDS, HEAD_SECONDS, BODY_SECONDS, MESSAGE_SECONDS, SCRAPE_SECONDS = 10.0, 20.0, 30.0, 30.0, 10.0
LATE_SECONDS = 5.0  # tolerance of those times
GIVEN_UP_SECONDS = 8.0  # longest wait for an answer that must come within a second
DRIP_SECONDS = 0.5  # time between two bytes
SCRAPE_PAUSE = 0.1  # time between two connections to a metrics port


@dataclass(frozen=True)
class Target:
    """A port of the product.

    Attributes:
        name: "gateway", "draft", "verify", "draft metrics", "verify metrics" or "quota draft".
        address: Address of the port, `host:port` or `unix:PATH`.
        ca: Authority that signed its certificate; None means plain connections.
        tokens: Tokens of known principals that misbehave; empty if the target requires no tokens.
        model: Serialized ModelInfo of the draft, as sessions of the verify service require it.
    """

    name: str
    address: str
    ca: Path | None = None
    tokens: tuple[str, ...] = ()
    model: bytes = field(default=b"", repr=False)

    def metadata(self, principal: str = "hostile") -> tuple[tuple[str, str], ...]:
        """The metadata by which a known principal identifies itself."""
        if self.tokens:
            number = int("0" + "".join(filter(str.isdigit, principal)))
            return (("authorization", f"Bearer {self.tokens[number % len(self.tokens)]}"),)
        return (("dynatree-principal", principal),)

    def connect(self, *, tls: bool = True, protocol: str = "h2") -> socket.socket:
        """Open a connection, over TLS if the target has it and `tls` is set.

        Raises:
            OSError: The connection is refused.
        """
        if self.address.startswith("unix:"):
            opened = socket.socket(socket.AF_UNIX)
            opened.settimeout(GIVEN_UP_SECONDS)
            opened.connect(self.address.removeprefix("unix:"))
            return opened
        host, _, port = self.address.rpartition(":")
        opened = socket.create_connection((host, int(port)), GIVEN_UP_SECONDS)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.ca is None or not tls:
            return opened
        context = ssl.create_default_context(cafile=self.ca)
        context.set_alpn_protocols([protocol])
        return context.wrap_socket(opened, server_hostname="localhost")

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A channel with its own connection."""
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
        if self.ca is None:
            opened = grpc.insecure_channel(self.address, options)
        else:
            opened = grpc.secure_channel(self.address, grpc.ssl_channel_credentials(self.ca.read_bytes()), options)
        with opened:
            yield opened


@dataclass(frozen=True)
class Answer:
    """The answer to one hostile request or connection.

    Attributes:
        what: A status, or "closed".
        seconds: Time until the answer.
        wrong: Reason why the answer is wrong; empty if it is acceptable.
        must: Whether the request must be refused, and therefore within a second.
    """

    what: str
    seconds: float = 0.0
    wrong: str = ""
    must: bool = True


Attack = Callable[[Target, random.Random, threading.Event], Iterator[Answer]]


@dataclass(frozen=True)
class Kind:
    """A kind of hostile traffic.

    Attributes:
        name: Name in the tables.
        targets: Names of the targets to attack.
        attack: Attacks once and yields an answer for each request; the event is set when the time is over.
        every: Seconds from the start of one attack to the start of the next; 0 means a single attack.
    """

    name: str
    targets: Sequence[str]
    attack: Attack
    every: float = 1.0


def send(opened: socket.socket, data: bytes) -> None:
    """Send as much as the peer takes; the peer may hang up, and need not read."""
    with suppress(OSError):
        opened.sendall(data)


def exchange(
    opened: socket.socket, data: bytes, over: Callable[[bytes], bool], seconds: float = GIVEN_UP_SECONDS
) -> tuple[bytes, bool]:
    """Send data and read at the same time, until `over` holds, the peer closes the connection, or the time is over.

    Returns:
        The bytes read, and whether `over` held or the peer closed the connection.
    """
    left, read = memoryview(data), b""
    until = time.monotonic() + seconds
    opened.setblocking(False)
    poll = select.poll()
    while (remaining := until - time.monotonic()) > 0:
        poll.register(opened, select.POLLIN | (select.POLLOUT if left else 0))
        pending = isinstance(opened, ssl.SSLSocket) and opened.pending()
        if not pending:
            poll.poll(1e3 * remaining)
        try:
            piece = opened.recv(2**16)
            if not piece:
                return read, True
            read += piece
            if over(read):
                return read, True
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:
            return read, True
        if left:
            try:
                left = left[opened.send(left[: 2**16]) :]
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
            except OSError:
                left = left[len(left) :]  # the peer takes no more, but may have answered
    return read, False


def hold(
    connections: Sequence[socket.socket],
    seconds: float,
    drops: Callable[[int], bytes] = lambda _: b"",
    ended: Callable[[bytes], str] = lambda _: "",
    replies: Callable[[bytes], Sequence[bytes]] = lambda _: (),
) -> Iterator[Answer]:
    """Drip bytes into connections until the peer has closed or answered each of them.

    Args:
        connections: Open connections; this function closes them.
        seconds: Time in which the peer must close or answer them.
        drops: Bytes that each connection sends next, by the number of sends so far.
        ended: How the bytes received end a connection; "" if they do not.
        replies: All replies that the bytes received require.
    """
    opened = dict(enumerate(connections))
    started = due = time.monotonic()
    place = 0
    heard = dict.fromkeys(opened, b"")
    replied = dict.fromkeys(opened, 0)
    try:
        while opened and time.monotonic() - started < seconds + LATE_SECONDS:
            due += DRIP_SECONDS
            for number, each in list(opened.items()):
                what = ""
                try:
                    each.setblocking(False)
                    while piece := each.recv(2**16):
                        heard[number] += piece
                    what = "closed"
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    what = ended(heard[number])
                except OSError:
                    what = "closed"
                if what:
                    opened.pop(number).close()
                    yield Answer(what, time.monotonic() - started, must=False)
                    continue
                due_replies = replies(heard[number])[replied[number] :]
                replied[number] += len(due_replies)
                if data := b"".join((*due_replies, drops(place))):
                    with suppress(OSError):
                        each.send(data)
            place += 1
            time.sleep(max(0.0, due - time.monotonic()))
        for _ in opened:
            yield Answer("open", wrong=f"it is open {LATE_SECONDS:g} s after the {seconds:g} s that it has", must=False)
    finally:
        for each in opened.values():
            each.close()


def opened(target: Target, count: int, said: bytes = b"", **how: Any) -> Iterator[socket.socket]:
    """Open `count` connections that have sent `said`; refused connections are left out.

    Connections to a metrics port open one by one: it serves eight at a time and closes the oldest for a new one.
    """
    for _ in range(count):
        if "metrics" in target.name:
            time.sleep(SCRAPE_PAUSE)
        with suppress(OSError):
            each = target.connect(**how)
            send(each, said)
            yield each


def silent(count: int, seconds: float) -> Attack:
    """Make an attack of `count` connections that send nothing."""

    def attack(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
        return hold(list(opened(target, count, tls=False)), seconds)

    return attack
