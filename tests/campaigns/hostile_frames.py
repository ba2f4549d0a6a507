"""Hostile HTTP/2 traffic for the gRPC ports, frame by frame (RFC 9113)."""

from __future__ import annotations

import random
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache

from tests.campaigns.hostile_targets import (
    HANDSHAKE_SECONDS,
    MESSAGE_SECONDS,
    Answer,
    Attack,
    Kind,
    Target,
    exchange,
    hold,
    opened,
    send,
    silent,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
METHODS = {
    "draft": "/dynatree.v1.DraftService/Generate",
    "verify": "/dynatree.v1.VerifyService/Verify",
}
FLOOD = 500  # frames of one attack
SILENT = 150  # silent connections at a time
STREAMS = 200  # calls without a message on one connection
BOMB_BYTES = 256 * 2**20  # zeros in the compressed message
WINDOW = 65_535  # initial flow-control window in bytes (section 6.9.2)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame: length, type, flags, stream, payload (section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """A header field without indexing, with lengths of one or several bytes (RFC 7541, section 6.2.2)."""
    return b"\0" + b"".join(_length(len(text)) + text.encode() for text in (name, value))


def _length(number: int) -> bytes:
    if number < 127:
        return bytes([number])
    encoded, number = bytearray([127]), number - 127
    while number >= 128:
        encoded.append(number % 128 + 128)
        number //= 128
    return bytes([*encoded, number])


def call_headers(target: Target, *more: tuple[str, str]) -> bytes:
    """The headers of a call by a known principal."""
    usual = ((":method", "POST"), (":scheme", "http"), (":path", METHODS[target.name]), (":authority", "x"))
    named = (*usual, ("te", "trailers"), ("content-type", "application/grpc"), *target.metadata(), *more)
    return b"".join(header(*each) for each in named)


def frames_of(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Type, flags, stream and payload of each complete frame in the bytes that a server sent."""
    place = 0
    while place + 9 <= len(data):
        length = int.from_bytes(data[place : place + 3])
        kind, flags, stream = struct.unpack(">BBI", data[place + 3 : place + 9])
        payload = data[place + 9 : place + 9 + length]
        if len(payload) < length:
            return
        yield kind, flags, stream, payload
        place += 9 + length


def ended_streams(data: bytes) -> set[int]:
    """The streams that a server has ended."""
    return {
        stream
        for kind, flags, stream, _ in frames_of(data)
        if stream and (kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM))
    }


def _frames(attack: Callable[[Target, random.Random], list[bytes]]) -> Attack:
    """Make an attack that sends pieces over one connection and does not wait for answers."""

    def made(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
        with target.connect() as opened:
            opened.settimeout(1.0)
            pieces = attack(target, generator)
            for piece in pieces:
                send(opened, piece)
            with suppress(OSError):
                opened.recv(2**16)
        yield Answer("sent", must=False)

    return made


def garbage(target: Target, generator: random.Random) -> list[bytes]:
    """Random bytes, with or without the preface."""
    start = generator.choice((b"", PREFACE, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"))
    return [start, generator.randbytes(generator.choice((1, 100, 20_000)))]


def random_frames(target: Target, generator: random.Random) -> list[bytes]:
    """Frames of every type with random flags, streams and payloads, some of them truncated."""
    pieces = [PREFACE + frame(SETTINGS, 0, 0)]
    for _ in range(generator.randrange(1, 40)):
        payload = generator.randbytes(generator.choice((0, 1, 4, 5, 8, 9, 64, 5000)))
        made = frame(generator.randrange(12), generator.randrange(256), generator.choice((0, 1, 2, 3, 5)), payload)
        pieces.append(made[: generator.choice((len(made), len(made), len(made), 9, 4))])
    return pieces


def pings(target: Target, generator: random.Random) -> list[bytes]:
    """Many pings (CVE-2019-9512)."""
    return _flood(*[frame(PING, 0, 0, b"12345678")] * FLOOD)


def settings(target: Target, generator: random.Random) -> list[bytes]:
    """Many settings, each of which the server must acknowledge (CVE-2019-9515)."""
    return _flood(*[frame(SETTINGS, 0, 0, struct.pack(">HI", 4, generator.randrange(2**31)))] * FLOOD)


def empty_frames(target: Target, generator: random.Random) -> list[bytes]:
    """Empty frames of data (CVE-2019-9518)."""
    return _flood(frame(HEADERS, END_HEADERS, 1, call_headers(target)), *[frame(DATA, 0, 1)] * FLOOD)


def rapid_resets(target: Target, generator: random.Random) -> list[bytes]:
    """Calls that are opened and immediately reset (CVE-2023-44487)."""
    headers = call_headers(target)
    pairs = (
        (frame(HEADERS, END_HEADERS, stream, headers), frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
        for stream in range(1, 2 * FLOOD, 2)
    )
    return _flood(*(each for pair in pairs for each in pair))


def many_streams(target: Target, generator: random.Random) -> list[bytes]:
    """More calls than a connection may have, all left open."""
    headers = call_headers(target)
    return _flood(*(frame(HEADERS, END_HEADERS, stream, headers) for stream in range(1, 6 * FLOOD, 2)))


def continuations(target: Target, generator: random.Random) -> list[bytes]:
    """Headers that never end (CVE-2024-27316)."""
    more = frame(CONTINUATION, 0, 1, header("x-a", "b" * 100) * 20)
    return _flood(frame(HEADERS, 0, 1, call_headers(target)), *[more] * FLOOD)


def large_headers(target: Target, generator: random.Random) -> list[bytes]:
    """More metadata than the server accepts."""
    long = call_headers(target, ("x-long", "a" * 100_000))
    pieces = [long[place : place + 16_000] for place in range(0, len(long), 16_000)]
    last = len(pieces) - 1
    more = [frame(CONTINUATION, END_HEADERS * (place == last), 1, piece) for place, piece in enumerate(pieces) if place]
    return _flood(frame(HEADERS, 0, 1, pieces[0]), *more)


def windows(target: Target, generator: random.Random) -> list[bytes]:
    """Window updates that overflow the window or have increment 0."""
    return _flood(*[frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", generator.choice((0, 1, 2**31 - 1))))] * FLOOD)


def slow_reader(target: Target, generator: random.Random) -> list[bytes]:
    """A completion whose caller keeps its flow-control window at 0 and so takes no byte."""
    no_window = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    request = b"\x0a\x04Once\x18\x10"  # text, and 16 new tokens
    message = struct.pack(">BI", 0, len(request)) + request
    call = frame(HEADERS, END_HEADERS, 1, call_headers(target)) + frame(DATA, END_STREAM, 1, message)
    return [PREFACE + no_window + call]


def _flood(*frames: bytes) -> list[bytes]:
    return [PREFACE + frame(SETTINGS, 0, 0), b"".join(frames)]


def dripping_preface(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Connections that send the first bytes of TLS or HTTP/2 one by one."""
    start = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) if target.ca else PREFACE + bytes(500)
    return hold(list(opened(target, 10, tls=False)), HANDSHAKE_SECONDS, lambda place: start[place : place + 1])


def _pongs(heard: bytes) -> list[bytes]:
    """Acknowledgements of a server's pings; without them it would close the connection."""
    return [frame(PING, ACK, 0, payload) for kind, flags, _, payload in frames_of(heard) if (kind, flags) == (PING, 0)]


def without_message(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Calls that send only their headers; the server must end each."""
    headers = call_headers(target)
    streams = {2 * number + 1 for number in range(STREAMS)}
    start = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0)
    start += b"".join(frame(HEADERS, END_HEADERS, stream, headers) for stream in sorted(streams))

    def ended(heard: bytes) -> str:
        return "ended" if streams <= ended_streams(heard) else ""

    return hold(list(opened(target, 1, start)), MESSAGE_SECONDS, ended=ended, replies=_pongs)


def dripping_message(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """A message that arrives byte by byte; the server must end its call."""
    start = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0)
    start += frame(HEADERS, END_HEADERS, 1, call_headers(target))
    start += frame(DATA, 0, 1, struct.pack(">BI", 0, 1000) + b"\x0a")

    def ended(heard: bytes) -> str:
        return "ended" if 1 in ended_streams(heard) else ""

    drop = frame(DATA, 0, 1, b"a")
    return hold(list(opened(target, 5, start)), MESSAGE_SECONDS, lambda _: drop, ended, _pongs)


@cache
def bomb() -> bytes:
    """A compressed message of zeros."""
    packing = zlib.compressobj(1, wbits=31)
    packed = b"".join(packing.compress(bytes(2**20)) for _ in range(BOMB_BYTES // 2**20)) + packing.flush()
    return struct.pack(">BI", 1, len(packed)) + packed


def compressed(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """A compressed message that expands beyond the limit, sent as fast as the server takes it."""
    left = bomb()
    data = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0)
    data += frame(HEADERS, END_HEADERS, 1, call_headers(target, ("grpc-encoding", "gzip")))
    began = time.monotonic()
    heard, sent, done = b"", 0, False
    with target.connect() as opened:
        while not done:
            room = min(_window(heard, 0), _window(heard, 1)) - sent
            while room > 0 and left:
                piece, left = left[: min(room, 2**14)], left[min(room, 2**14) :]
                data += frame(DATA, 0 if left else END_STREAM, 1, piece)
                room, sent = room - len(piece), sent + len(piece)

            def enough(read: bytes, heard: bytes = heard, sent: int = sent, more: bool = bool(left)) -> bool:
                known = heard + read
                return 1 in ended_streams(known) or (more and min(_window(known, 0), _window(known, 1)) > sent)

            read, answered = exchange(opened, data, enough)
            heard, data = heard + read, b""
            done = not answered or not read or 1 in ended_streams(heard)
    took = time.monotonic() - began
    ended = 1 in ended_streams(heard)
    yield Answer("ended" if ended else "closed", took, "" if answered else f"no answer in {took:.1f} s")


def _window(heard: bytes, stream: int) -> int:
    """Total bytes that the server's flow control has admitted on a stream, or with 0 on the connection."""
    first, more = WINDOW, 0
    for kind, flags, of, payload in frames_of(heard):
        if kind == WINDOW_UPDATE and of == stream:
            more += int.from_bytes(payload)
        elif kind == SETTINGS and not flags & ACK and stream:
            told = dict(struct.iter_unpack(">HI", payload))
            first = told.get(4, first)
    return first + more


def endless_message(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """A message that announces a length of 4 GiB."""
    data = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0)
    data += frame(HEADERS, END_HEADERS, 1, call_headers(target))
    data += frame(DATA, 0, 1, struct.pack(">BI", 0, 2**32 - 1) + b"\x0a" * 1000)
    began = time.monotonic()
    with target.connect() as opened:
        read, answered = exchange(opened, data, lambda heard: 1 in ended_streams(heard))
    took = time.monotonic() - began
    ended = 1 in ended_streams(read)
    yield Answer("ended" if ended else "closed", took, "" if answered else f"no answer in {took:.1f} s")


_SENT: tuple[Callable[[Target, random.Random], list[bytes]], ...] = (
    *(garbage, random_frames, pings, settings, empty_frames, rapid_resets, many_streams, continuations),
    *(large_headers, windows, slow_reader),
)


def any_frames(target: Target, generator: random.Random, over: threading.Event) -> Iterator[Answer]:
    """Send one of the floods, chosen at random, and yield its answer."""
    return _frames(generator.choice(_SENT))(target, generator, over)


PORTS = ("draft", "verify")
KINDS = (
    Kind("silent connections", PORTS, silent(SILENT, HANDSHAKE_SECONDS), 10.0),
    Kind("dripping prefaces", PORTS, dripping_preface, 10.0),
    Kind("malformed frames", PORTS, any_frames, 1.0),
    Kind("calls without a message", PORTS, without_message, 5.0),
    Kind("dripping messages", PORTS, dripping_message, 10.0),
    Kind("compressed messages", PORTS, compressed, 2.0),
    Kind("endless messages", PORTS, endless_message, 2.0),
)
