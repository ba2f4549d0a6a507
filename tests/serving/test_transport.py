"""Tests limits of the server before a handler has a message: connections, calls without messages, calls of anybody."""

from __future__ import annotations

import asyncio
import gzip
import logging
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatree.common.errors import IdleSessionError, InvalidArgumentError, ServiceBusyError
from dynatree.common.logs import configure_logging
from dynatree.draft.service import _principal
from dynatree.serving import call_tracker, server
from dynatree.serving.aio_server import aio_server
from dynatree.serving.grpc_options import MAX_MESSAGE_BYTES, PRINCIPAL, server_options
from dynatree.serving.openings import Openings
from dynatree.serving.principals import joint
from dynatree.serving.security import LOCAL, SecuritySettings
from dynatree.serving.server import FREE_CALLS, OTHERS_CALLS, Server
from dynatree.serving.standard_calls import StandardCalls
from tests.campaigns import hostile_frames
from tests.support.certificates import Authority

METHOD = "/dynatree.v1.Example/{}"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
TOKEN = "0123456789abcdef"


# Each kind of handler; they answer with the caller's name.


async def unary(request: bytes, context: Any) -> bytes:
    return str(context.principal).encode()


async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield str(context.principal).encode()


async def both(requests: Any, context: Any) -> None:
    while await context.read() is not grpc.aio.EOF:
        await context.write(str(context.principal).encode())


HANDLERS: dict[str, Any] = {
    "Unary": grpc.unary_unary_rpc_method_handler(unary),
    "Stream": grpc.unary_stream_rpc_method_handler(stream),
    "Both": grpc.stream_stream_rpc_method_handler(both),
}
KINDS = tuple(HANDLERS)


@asynccontextmanager
async def serving(
    security: SecuritySettings = LOCAL,
    address: str = "localhost:0",
    most_calls: int | None = None,
    handlers: dict[str, Any] = HANDLERS,
) -> AsyncIterator[str]:
    """Run a server with such handlers; return its address."""
    running = Server(["dynatree.v1.Example"], security=security, most_calls=most_calls)
    running.grpc_server.add_registered_method_handlers("dynatree.v1.Example", handlers)
    await running.start(address)
    try:
        yield running.address
    finally:
        await running.stop(0.0)


async def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    return await asyncio.wait_for(call.code(), 30), await call.details()


def with_options(monkeypatch: pytest.MonkeyPatch, **changed: int) -> None:
    """Replace these server options, which must exist."""
    ours = dict(server_options())
    names = {f"grpc.{name}" for name in changed}
    assert names <= set(ours)
    options = tuple((ours | {f"grpc.{name}": value for name, value in changed.items()}).items())
    monkeypatch.setattr(server, "server_options", lambda: options)


async def closed(connection: socket.socket) -> bool:
    """Wait until the peer closes the connection; return whether it does."""
    connection.settimeout(30)

    def read() -> bool:
        try:
            while connection.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True

    return await asyncio.to_thread(read)


async def heard(connection: socket.socket, kind: int) -> bytes:
    """Wait for the first frame of this kind; return its payload."""
    connection.settimeout(30)

    def read() -> bytes:
        data = b""
        while piece := connection.recv(65536):
            data += piece
            for found, _, _, payload in hostile_frames.frames_of(data):
                if found == kind:
                    return payload
        raise ConnectionError("the peer closed the connection before")

    return await asyncio.to_thread(read)


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


# Calls without a message


@pytest.mark.parametrize(
    "method", [*map(METHOD.format, KINDS), "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", REFLECTION]
)
def test_a_call_whose_first_message_does_not_come_is_ended(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(call_tracker, "FIRST_MESSAGE_SECONDS", 0.05)

    async def run() -> tuple[grpc.StatusCode, str]:
        async with serving() as address, grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(method)()
            await call.wait_for_connection()
            return await ended(call)

    code, details = asyncio.run(run())
    assert code is grpc.StatusCode.ABORTED
    assert "no request arrived within 0.05 s" in details


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", METHOD.format("Unary"), METHOD.format("Stream")])
def test_a_call_that_ends_without_a_message(method: str) -> None:
    async def run() -> tuple[grpc.StatusCode, str]:
        async with serving() as address, grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(method)()
            await call.done_writing()
            return await ended(call)

    assert asyncio.run(run())[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_who_calls_is_asked_before_the_message_comes(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"alice:{TOKEN}\n")

    async def run() -> list[tuple[grpc.StatusCode, str]]:
        security = SecuritySettings(tokens=tmp_path / "tokens")
        async with serving(security) as address, grpc.aio.insecure_channel(address) as channel:
            return [await ended(channel.stream_stream(METHOD.format(kind))()) for kind in KINDS]

    assert [code for code, _ in asyncio.run(run())] == [grpc.StatusCode.UNAUTHENTICATED] * len(KINDS)


class Silent:
    """The context of a call whose message arrives on demand."""

    def __init__(self) -> None:
        self.said = asyncio.Event()

    async def read(self) -> bytes:
        await self.said.wait()
        return b"message"


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 6))
def test_one_call_too_many_ends_the_one_that_has_waited_longest(speaks: list[bool], most: int) -> None:
    """A caller that sends its message at once is served, however many are silent."""

    async def run() -> None:
        openings, waiting = Openings(60.0, most), []
        for speaking in speaks:
            context: Any = Silent()
            call = asyncio.ensure_future(openings.first(context))
            await asyncio.sleep(0)
            if speaking:
                context.said.set()
                assert await call == b"message"
            else:
                waiting.append((call, context))
                for _ in range(5):
                    await asyncio.sleep(0)
            done = [call for call, _ in waiting if call.done()]
            assert all(isinstance(call.exception(), ServiceBusyError) for call in done)
            assert done == [call for call, _ in waiting][: len(done)]
            assert len(waiting) - len(done) <= most
        for call, context in waiting:
            context.said.set()
            assert call.done() or await call == b"message"
        assert not openings._waiting

    asyncio.run(run())


def test_at_most_1024_calls_wait_for_their_first_message() -> None:
    async def run() -> list[bool]:
        openings, context = Openings(), Silent()
        calls = [asyncio.ensure_future(openings.first(context)) for _ in range(1030)]
        for _ in range(5):
            await asyncio.sleep(0)
        refused = [each.done() and isinstance(each.exception(), ServiceBusyError) for each in calls]
        context.said.set()
        await asyncio.wait(calls)
        return refused

    assert asyncio.run(run()) == [True] * 6 + [False] * 1024


def test_a_message_that_comes_too_late() -> None:
    async def run() -> None:
        context: Any = Silent()
        await Openings(0.01).first(context)

    with pytest.raises(IdleSessionError, match=r"within 0\.01 s"):
        asyncio.run(run())


# Calls of health and reflection


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(1, 6))
def test_a_connection_with_its_share_of_the_standard_calls_keeps_them(callers: list[str], most: int) -> None:
    """At one call too many, the newest of the connection with the most calls is ended; it may be the new one."""

    async def run() -> None:
        standard = StandardCalls(most)
        calls: list[tuple[str, asyncio.Task[None]]] = []

        async def call(connection: str) -> None:
            async with standard.counted(connection):
                await asyncio.Event().wait()

        for caller in callers:
            before = Counter(each for each, task in calls if not task.done())
            calls.append((caller, asyncio.ensure_future(call(caller))))
            for _ in range(6):
                await asyncio.sleep(0)
            after = Counter(each for each, task in calls if not task.done())
            assert after.total() == min(most, before.total() + 1)
            before[caller] += 1
            [*losers] = before - after
            assert len(losers) == (before.total() > most)
            assert all(before[each] == max(before.values()) for each in losers)
            assert all(each == caller for each in losers if before[caller] == before[each]), "no call is ended in vain"
        for connection in "abc":
            own = [task.done() for each, task in calls if each == connection]
            assert own == sorted(own), "an older call is ended before a newer one"
        for _, task in calls:
            if task.done():
                with pytest.raises(ServiceBusyError, match=f"{most} calls of health and reflection are open"):
                    task.result()
            task.cancel()
        await asyncio.wait([task for _, task in calls])
        assert len(standard._open) == 0

    asyncio.run(run())


def test_one_connection_has_at_most_all_standard_calls() -> None:
    async def run() -> list[bool]:
        standard = StandardCalls()

        async def call() -> None:
            async with standard.counted("a"):
                await asyncio.Event().wait()

        calls = [asyncio.ensure_future(call()) for _ in range(1030)]
        await asyncio.sleep(0)
        return [each.done() and isinstance(each.exception(), ServiceBusyError) for each in calls]

    assert asyncio.run(run()) == [False] * 1024 + [True] * 6


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Watch", REFLECTION])
def test_the_calls_of_one_connection_leave_room_for_others(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(call_tracker, "StandardCalls", partial(StandardCalls, 4))
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    if method != REFLECTION:
        request = b""  # the health of the server

    async def run() -> list[grpc.StatusCode]:
        async with (
            serving() as address,
            grpc.aio.insecure_channel(address, own_connection) as greedy,
            grpc.aio.insecure_channel(address, own_connection) as modest,
        ):
            held = []
            for _ in range(4):
                held.append(greedy.stream_stream(method)())
                await held[-1].write(request)
                assert await held[-1].read()
            watching = modest.stream_stream(method)()
            await watching.write(request)
            assert await watching.read()
            codes = [await held[-1].code()]  # makes room
            more = greedy.stream_stream(method)()
            await more.write(request)
            codes.append(await more.code())
            assert await greedy.unary_unary(METHOD.format("Unary"))(b"x") == b"None"
            assert not any(call.done() for call in [watching, *held[:3]])
            return codes

    assert asyncio.run(run()) == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2


def test_64_calls_have_room_beside_those_that_need_a_session() -> None:
    async def run() -> tuple[grpc.StatusCode, str]:
        async with serving(most_calls=2) as address, grpc.aio.insecure_channel(address) as channel:
            held = [channel.stream_stream(METHOD.format("Both"))() for _ in range(66)]
            for call in held:
                await call.write(b"x")
                assert await call.read() == b"None"
            return await ended(channel.unary_unary(METHOD.format("Unary"))(b"x"))

    code, details = asyncio.run(run())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "66 calls are open" in details


def test_one_principal_leaves_calls_to_the_others(tmp_path: Path) -> None:
    """Also if its calls never end, because it reads nothing."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"greedy:{'g' * 40}\nmodest:{'m' * 40}\n")
    tokens.chmod(0o600)
    security = SecuritySettings(tokens=tokens)

    def metadata(letter: str) -> tuple[tuple[str, str]]:
        return (("authorization", f"Bearer {letter * 40}"),)

    async def run() -> tuple[grpc.StatusCode, str]:
        async with serving(security, most_calls=2) as address, grpc.aio.insecure_channel(address) as channel:
            for _ in range(2 + FREE_CALLS - OTHERS_CALLS):
                call = channel.stream_stream(METHOD.format("Both"))(metadata=metadata("g"))
                await call.write(b"x")
                assert await call.read() == b"greedy"
            refused = await ended(channel.unary_unary(METHOD.format("Unary"))(b"x", metadata=metadata("g")))
            assert await channel.unary_unary(METHOD.format("Unary"))(b"x", metadata=metadata("m")) == b"modest"
            return refused

    code, details = asyncio.run(run())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "34 calls of one principal are open" in details


def test_of_a_long_error_the_caller_gets_1000_characters() -> None:
    async def refuse(request: bytes, context: Any) -> bytes:
        raise InvalidArgumentError("x" * 5000)

    async def run() -> tuple[grpc.StatusCode, str]:
        handlers = {"Unary": grpc.unary_unary_rpc_method_handler(refuse)}
        async with serving(handlers=handlers) as address, grpc.aio.insecure_channel(address) as channel:
            return await ended(channel.unary_unary(METHOD.format("Unary"))(b"x"))

    code, details = asyncio.run(run())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.partition(" (request ")[0] == "x" * 1000 + " ..."


# Connections


def raw_header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_that_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool) -> None:
    with_options(monkeypatch, server_handshake_timeout_ms=200)
    pair = Authority(tmp_path).pair("server") if tls else None
    security = SecuritySettings(pair.certificate, pair.key) if pair else LOCAL

    async def run() -> bool:
        async with serving(security) as address:
            with connected(address) as silent, connected(address) as dripping:
                dripping.sendall(hostile_frames.PREFACE[:5])
                return await closed(silent) and await closed(dripping)

    assert asyncio.run(run())


@pytest.mark.parametrize(
    "said",
    [b"", hostile_frames.frame(hostile_frames.HEADERS, 0, 1, raw_header(b":method", b"POST"))],
    ids=["no call", "half a head"],
)
def test_a_connection_without_a_call_is_closed(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    with_options(monkeypatch, max_connection_idle_ms=200)

    async def run() -> bool:
        async with serving() as address:
            with connected(address) as idle:
                idle.sendall(hostile_frames.PREFACE + hostile_frames.frame(hostile_frames.SETTINGS, 0, 0) + said)
                return await closed(idle)

    assert asyncio.run(run())


def test_grpc_is_told_to_close_a_connection_after_300_s_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: dict[str, int] = {}

    def made(interceptors: Any, options: tuple[tuple[str, int], ...]) -> grpc.aio.Server:
        handed.update(options)
        return aio_server(interceptors, options)

    monkeypatch.setattr(server, "aio_server", made)

    async def run() -> None:
        async with serving():
            assert handed["grpc.max_connection_idle_ms"] == 300_000

    asyncio.run(run())


def test_a_connection_may_have_1024_calls() -> None:
    async def run() -> bytes:
        async with serving() as address:
            with connected(address) as stranger:
                stranger.sendall(hostile_frames.PREFACE + hostile_frames.frame(hostile_frames.SETTINGS, 0, 0))
                return await heard(stranger, hostile_frames.SETTINGS)

    max_concurrent_streams = 3  # RFC 9113, section 6.5.2
    assert dict(struct.iter_unpack(">HI", asyncio.run(run())))[max_concurrent_streams] == 1024


def test_the_third_early_ping_closes_the_connection() -> None:
    pings = hostile_frames.frame(hostile_frames.PING, 0, 0, bytes(8)) * 4  # the first is not early

    async def run() -> bytes:
        async with serving() as address:
            with connected(address) as stranger:
                settings = hostile_frames.frame(hostile_frames.SETTINGS, 0, 0)
                stranger.sendall(hostile_frames.PREFACE + settings + pings)
                reason = await heard(stranger, hostile_frames.GOAWAY)
                assert await closed(stranger)
                return reason

    enhance_your_calm = 11  # RFC 9113, section 7
    assert asyncio.run(run())[4:] == struct.pack(">I", enhance_your_calm) + b"too_many_pings"


def test_one_connection_too_many_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with_options(monkeypatch, max_allowed_incoming_connections=2)

    async def run() -> bytes:
        # one address, since `localhost` may be two, each with this many connections
        async with serving(address="127.0.0.1:0") as address, grpc.aio.insecure_channel(address) as channel:
            unary = channel.unary_unary(METHOD.format("Unary"))
            await unary(b"x")
            with connected(address):
                with connected(address) as refused:
                    assert await closed(refused)
                return await unary(b"x")  # open connections continue

    assert asyncio.run(run()) == b"None"


@pytest.mark.parametrize(("files", "most"), [(1024, 448), (4096, 1024), (64, 16), (-1, 1024)])
def test_connections_leave_files_to_the_service(monkeypatch: pytest.MonkeyPatch, files: int, most: int) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    assert dict(server_options())["grpc.max_allowed_incoming_connections"] == most


# Requests refused before a handler sees them, without a traceback in the log


def message(data: bytes, compressed: bool = False) -> bytes:
    return hostile_frames.frame(hostile_frames.DATA, 1, 1, struct.pack(">BI", compressed, len(data)) + data)


def head(path: bytes, *more: bytes) -> bytes:
    usual = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"x"),
        (b"te", b"trailers"),
    )
    headers = b"".join(raw_header(*each) for each in (*usual, (b"content-type", b"application/grpc")))
    return hostile_frames.frame(hostile_frames.HEADERS, hostile_frames.END_HEADERS, 1, headers + b"".join(more))


UNARY = METHOD.format("Unary").encode()
GZIP = raw_header(b"grpc-encoding", b"gzip")
STRANGE = {
    "compressed": head(UNARY, GZIP) + message(gzip.compress(bytes(1000)), compressed=True),
    "bomb": head(UNARY, GZIP) + message(gzip.compress(bytes(2 * MAX_MESSAGE_BYTES)), compressed=True),
    "compressed with no name": head(UNARY) + message(b"abc", compressed=True),
    "too large": head(UNARY) + hostile_frames.frame(0, 0, 1, struct.pack(">BI", 0, 2**31)),
    "metadata that are no text": head(UNARY, raw_header(b"x-a", b"\xff\xfe\n")) + message(b""),
    "a path that is no text": head(b"/dynatree.v1.Example/\xff\xfe") + message(b""),
    "a path with a line": head(b"/dynatree.v1.Example/\nUnary") + message(b""),
    "no such method": head(b"/dynatree.v1.Example/None") + message(b""),
    "a reset": head(UNARY) + hostile_frames.frame(hostile_frames.RST_STREAM, 0, 1, struct.pack(">I", 8)),
    "no message": head(UNARY) + hostile_frames.frame(hostile_frames.DATA, 1, 1),
    "half a message": head(UNARY) + hostile_frames.frame(hostile_frames.DATA, 1, 1, b"\0\0\0\0\x09a"),
    "data without a call": hostile_frames.frame(hostile_frames.DATA, 1, 1, b"abc"),
    "garbage": random.Random(1).randbytes(3000),
}


@pytest.mark.parametrize("said", STRANGE.values(), ids=STRANGE)
def test_what_strangers_send_leaves_no_traceback_and_the_server_goes_on(
    capfd: pytest.CaptureFixture[str], said: bytes
) -> None:
    root, grpcs = logging.getLogger(), logging.getLogger("grpc._cython.cygrpc")
    before, filters = root.handlers[:], grpcs.filters[:]
    root.handlers[:] = []
    try:
        configure_logging("text")

        async def run() -> None:
            async with serving() as address:
                with connected(address) as stranger:
                    stranger.sendall(
                        hostile_frames.PREFACE + hostile_frames.frame(hostile_frames.SETTINGS, 0, 0) + said
                    )
                    await asyncio.sleep(0.05)
                async with grpc.aio.insecure_channel(address) as channel:
                    assert await channel.unary_unary(METHOD.format("Unary"))(b"x", timeout=10) == b"None"

        asyncio.run(run())
    finally:
        root.handlers[:], grpcs.filters[:] = before, filters
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert len(told.splitlines()) <= 3, told  # including lines of the server's stop


def test_calls_to_unknown_methods_are_unimplemented_however_many() -> None:
    async def run() -> set[grpc.StatusCode]:
        async with serving() as address, grpc.aio.insecure_channel(address) as channel:
            paths = [METHOD.format("None"), "/", "/no.such.Service/Unary"] * 100
            return {
                code for code, _ in await asyncio.gather(*(ended(channel.unary_unary(path)(b"")) for path in paths))
            }

    assert asyncio.run(run()) == {grpc.StatusCode.UNIMPLEMENTED}


def test_a_compressed_message_is_refused_by_its_name() -> None:
    async def run() -> tuple[grpc.StatusCode, str]:
        async with serving() as address, grpc.aio.insecure_channel(address) as channel:
            unary = channel.unary_unary(METHOD.format("Unary"))
            return await ended(unary(bytes(1000), compression=grpc.Compression.Gzip))

    code, details = asyncio.run(run())
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "gzip" in details


# Who calls


SPIFFE = "spiffe://example.org/ns/x"
CERTIFICATES: list[tuple[dict[str, Any], str | None]] = [
    ({}, "team-a"),
    ({"common_name": ""}, "localhost"),  # the first of its names
    ({"common_name": "", "others": [x509.UniformResourceIdentifier(SPIFFE), x509.DNSName("a")]}, SPIFFE),
    ({"common_name": "", "others": [x509.DNSName("a"), x509.UniformResourceIdentifier(SPIFFE)]}, SPIFFE),
    ({"common_name": "", "others": [x509.RFC822Name("a@example.org")]}, None),
    ({"common_name": "", "others": []}, None),
]


@pytest.mark.parametrize(("made", "name"), CERTIFICATES)
def test_a_certificate_names_its_principal_or_is_refused(
    tmp_path: Path, made: dict[str, Any], name: str | None
) -> None:
    assert asyncio.run(principal_of(tmp_path, "team-a", made)) == name


@pytest.mark.parametrize("name", ["line\nbreak", "\x1b[2J", "a\u2028b"])
def test_a_certificate_whose_name_no_line_of_a_log_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    assert asyncio.run(principal_of(tmp_path, "strange", {"common_name": name})) is None


async def principal_of(folder: Path, name: str, made: dict[str, Any]) -> str | None:
    """Return the principal that a server with client certificates assigns to its caller; None if it refuses."""
    authority = Authority(folder)
    served, shown = authority.pair("server"), authority.pair(name, **made)
    security = SecuritySettings(served.certificate, served.key, authority.file)
    credentials = grpc.ssl_channel_credentials(
        authority.file.read_bytes(), shown.key.read_bytes(), shown.certificate.read_bytes()
    )
    async with serving(security) as address, grpc.aio.secure_channel(address, credentials) as channel:
        call = channel.unary_unary(METHOD.format("Unary"))(b"x", timeout=30)
        code, details = await ended(call)
        if code is grpc.StatusCode.OK:
            return str((await call).decode())
        assert code is grpc.StatusCode.UNAUTHENTICATED, details
        assert "has no usable name" in details
        return None


def test_two_pairs_of_caller_and_principal_have_two_names() -> None:
    names = ["%2F", "%252F", *("".join(word) for size in range(4) for word in product("a/%", repeat=size))]
    assert len({joint(caller, principal) for caller in names for principal in names}) == len(names) ** 2
    assert joint("draft", "team-a") == "draft/team-a"


class Claiming:
    """The context of a call that claims a principal."""

    principal = None

    def __init__(self, name: str) -> None:
        self._name = name

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((PRINCIPAL, self._name),)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=()), max_size=300))
def test_a_principal_that_a_client_claims_is_printable_ascii_or_refused(name: str) -> None:
    context: Any = Claiming(name)
    if len(name) <= 256 and all(" " <= each <= "~" for each in name):
        assert _principal(context) == name
    else:
        with pytest.raises(InvalidArgumentError, match="printable ASCII"):
            _principal(context)
