"""Tests limits of the gateway's connections and requests: each phase has a deadline, and their number is bounded."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import ssl
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from dynatree.gateway import connections
from dynatree.gateway.errors import ApiError
from dynatree.gateway.hosts import Hosts
from dynatree.gateway.limits import Limits
from dynatree.gateway.models import Models
from dynatree.gateway.open_requests import OpenRequests
from dynatree.serving.security import SecuritySettings
from tests.support.certificates import Authority
from tests.support.gateways import LOCAL, Gateway, served_here, wait_for
from tests.support.gateways import gateway_fixture as gateway_fixture
from tests.support.processes import EmbeddedServices

SHORT = Limits(
    connections=64,
    handshake_seconds=0.4,
    head_seconds=0.4,
    idle_seconds=0.4,
    body_seconds=0.4,
    rest_seconds=0.4,
    taking_seconds=0.4,
    taking_rate=2**30,
    closing_seconds=0.4,
)
SECONDS = 30.0  # for an operation that takes at most one second on an idle machine
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ASKED = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.05)


def place_of(url: str) -> tuple[str, int]:
    host, port = url.rpartition("/")[2].rsplit(":", 1)
    return host, int(port)


def connected(url: str) -> socket.socket:
    return socket.create_connection(place_of(url), timeout=SECONDS)


def is_closed(connection: socket.socket) -> bool:
    """Whether the peer has closed the connection by now."""
    connection.setblocking(False)
    try:
        return connection.recv(2**20) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def answered(connection: socket.socket) -> bytes:
    """Return all bytes until the peer closes the connection, which it may do by a reset."""
    came = b""
    with suppress(ConnectionError):
        while piece := connection.recv(2**16):
            came += piece
    return came


# The bytes that a client sends before it continues byte by byte, and the beginning of the whole response.
SLOW: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "a head": (b"GET / HTTP/1.1\r\nx: ", b""),
    "a head behind an answer": (ASKED + b"GET / HTTP/1.1\r\nx: ", b"HTTP/1.1 200"),
    "nothing behind an answer": (ASKED, b"HTTP/1.1 200"),
    "a body": (HEAD + b'Content-Length: 999999\r\n\r\n{"', b"HTTP/1.1 408"),
    "a body in chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nfff\r\n", b"HTTP/1.1 408"),
    "the rest of a body that is refused": (HEAD + b"Content-Length: 99999999\r\n\r\n", b"HTTP/1.1 413"),
    "a body that nobody asked for": (b"GET /version" + HEAD[20:] + b"Content-Length: 999\r\n\r\n", b"HTTP/1.1 200"),
}


REFUSED = {  # what is refused before all of it has come -> the status
    "a path": (b"POST /no HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8388608\r\n", 404),
    "a method": (b"POST /version HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8388608\r\n", 405),
    "a length": (HEAD + b"Content-Length: 8388608\r\n", 413),
    "a type": (HEAD.replace(b"json", b"xml") + b"Content-Length: 8388608\r\n", 415),
    "a host": (HEAD.replace(b"localhost", b"example.com") + b"Content-Length: 8388608\r\n", 421),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1000, 400),
    "a head": (b"POST /v1/completions\r\n\r\n", 400),
}


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_client_that_sends_all_before_it_reads_receives_its_refusal(
    embedded_services: EmbeddedServices, tmp_path: Path, name: str, encrypted: bool
) -> None:
    head, status = REFUSED[name]

    def act(url: str) -> None:
        with connected(url) as plain:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with context.wrap_socket(plain) if encrypted else plain as connection:
                connection.sendall(head + b"Connection: close\r\n\r\n")
                for _ in range(128):
                    connection.sendall(bytes(2**16))
                assert connection.recv(12) == b"HTTP/1.1 %d" % status

    pair = Authority(tmp_path).pair("gateway")
    security = SecuritySettings(pair.certificate, pair.key) if encrypted else LOCAL
    served_here(embedded_services.draft_address, act, Limits(), security)


@pytest.mark.parametrize("drips", [False, True])
def test_every_phase_of_a_connection_has_a_deadline(
    embedded_services: EmbeddedServices, monkeypatch: pytest.MonkeyPatch, drips: bool
) -> None:
    """The gateway looks at the deadlines once all clients have sent: on a busy machine they may send late."""
    all_sent, check = threading.Barrier(len(SLOW) + 1), connections.Connection.check_deadline
    looks = threading.Event()

    def check_deadline(self: connections.Connection) -> None:
        if looks.is_set():
            check(self)

    monkeypatch.setattr(connections.Connection, "check_deadline", check_deadline)

    def closed(url: str, sent: bytes) -> bytes:
        with connected(url) as connection, suppress(ConnectionError):
            connection.sendall(sent)
            all_sent.wait(SECONDS)
            ended = threading.Event()

            def drip() -> None:
                with suppress(OSError):
                    while not ended.wait(0.15):  # so that a body reaches no limit of its pieces within SECONDS
                        connection.sendall(b"x")

            dripping = threading.Thread(target=drip if drips else ended.wait)
            dripping.start()
            try:
                return answered(connection)
            finally:
                ended.set()
                dripping.join()
        return b""

    def act(url: str) -> None:
        with ThreadPoolExecutor(len(SLOW)) as threads:
            ends = {name: threads.submit(closed, url, sent) for name, (sent, _) in SLOW.items()}
            assert requests.get(f"{url}/health", timeout=SECONDS).status_code == 200
            all_sent.wait(SECONDS)
            looks.set()
            for name, (_, begin) in SLOW.items():
                assert ends[name].result(SECONDS).startswith(begin), name

    served_here(embedded_services.draft_address, act, SHORT)


def test_a_socket_that_accepts_nothing_is_asked_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also at an error that is not among those known; the loop serves the open connections meanwhile."""
    errors = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EPERM, "Operation not permitted")]
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def short(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def run() -> None:
        asked_again = asyncio.Event()

        async def accept(self: Any, listening: socket.socket) -> Any:
            if errors:
                raise errors.pop()
            asked_again.set()
            await asyncio.Event().wait()

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(type(loop), "sock_accept", accept)
        monkeypatch.setattr(asyncio, "sleep", short)
        with socket.socket() as listening:
            listener = connections.Listener(listening, asyncio.Protocol, [], Limits(), None)
            await asyncio.wait_for(asked_again.wait(), SECONDS)
            listener.close()
            await listener.wait_closed()

    asyncio.run(run())
    assert pauses.count(connections.ACCEPT_AGAIN_SECONDS) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept connections for now: Operation not permitted",
        "cannot accept connections for now: Too many open files",
    ]


def test_a_handshake_has_a_deadline(embedded_services: EmbeddedServices, tmp_path: Path) -> None:
    pair = Authority(tmp_path).pair("gateway")

    def without(url: str) -> None:
        with connected(url) as silent:
            assert answered(silent) == b""

    def after(url: str) -> None:
        with connected(url) as connection:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with context.wrap_socket(connection) as encrypted:
                assert answered(encrypted) == b""

    security = SecuritySettings(pair.certificate, pair.key)
    served_here(embedded_services.draft_address, without, SHORT, security)
    served_here(embedded_services.draft_address, after, replace(SHORT, handshake_seconds=SECONDS), security)


def test_a_tls_connection_takes_little_memory_until_its_client_speaks(tmp_path: Path) -> None:
    pair, count = Authority(tmp_path).pair("gateway"), 32
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)

    async def run() -> float:
        with ExitStack() as stack:
            listening = stack.enter_context(socket.create_server(("localhost", 0), backlog=count))
            listening.setblocking(False)
            listener = connections.Listener(listening, asyncio.Protocol, [], Limits(), context)
            tracemalloc.start()
            stack.callback(tracemalloc.stop)
            for _ in range(count):
                stack.enter_context(socket.create_connection(listening.getsockname()))
            while len(listener._opening) < count:
                await asyncio.sleep(0)
            for _ in range(5):  # the last handshake begins
                await asyncio.sleep(0)
            held, _ = tracemalloc.get_traced_memory()
            listener.close()
            await listener.wait_closed()
            return held / count

    assert asyncio.run(run()) < 64 * 1024


LARGE = json.dumps({"prompt": [7] * 2000, "max_tokens": 1, "echo": True, "logprobs": 20, "n": 8, "stream": True})
PAGE = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"Content-Length: %d\r\n\r\n" % len(LARGE) + LARGE.encode(),
        (PAGE + b"\r\n") * 200,
        PAGE + b"Connection: close\r\n\r\n",
    ],
    ids=["during an answer", "at its end", "when the gateway closes"],
)
def test_a_client_that_takes_nothing_is_left(
    embedded_services: EmbeddedServices, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    lost = threading.Event()
    made, original = connections.Connection.connection_made, connections.Connection.connection_lost

    def connection_made(self: connections.Connection, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**12)
        made(self, transport)

    def connection_lost(self: connections.Connection, error: Exception | None) -> None:
        original(self, error)
        lost.set()

    monkeypatch.setattr(connections.Connection, "connection_made", connection_made)
    monkeypatch.setattr(connections.Connection, "connection_lost", connection_lost)

    def act(url: str) -> None:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            connection.settimeout(SECONDS)
            connection.connect(place_of(url))
            connection.sendall(sent)
            assert lost.wait(SECONDS)

    served_here(embedded_services.draft_address, act, SHORT)


@pytest.mark.parametrize(
    ("files", "connections", "in_work"), [(-1, 512, 496), (4096, 512, 496), (256, 192, 176), (64, 16, 12)]
)
def test_connections_leave_files_to_the_gateway_and_requests_leave_connections_to_health(
    monkeypatch: pytest.MonkeyPatch, files: int, connections: int, in_work: int
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    limits = Limits()
    assert (limits.most_connections, limits.most_requests) == (connections, in_work)


def test_silent_connections_give_way_and_those_that_spoke_stay(embedded_services: EmbeddedServices) -> None:
    limits = Limits(connections=32)

    def act(url: str) -> None:
        with ExitStack() as stack, requests.Session() as kept:
            assert kept.get(f"{url}/version", timeout=SECONDS).ok
            silent = [stack.enter_context(connected(url)) for _ in range(4 * limits.connections)]
            for _ in range(3):
                assert requests.get(f"{url}/health", timeout=SECONDS).status_code == 200
            assert wait_for(lambda: sum(map(is_closed, silent)) >= 3 * limits.connections, SECONDS)
            kept.mount("http://", requests.adapters.HTTPAdapter(max_retries=0))
            assert kept.get(f"{url}/version", timeout=SECONDS).ok

    served_here(embedded_services.draft_address, act, limits)


def test_bodies_that_drip_give_way_to_requests_and_leave_room_for_health(embedded_services: EmbeddedServices) -> None:
    limits = Limits(connections=32)
    half = HEAD + b'Content-Length: 99\r\n\r\n{"prompt'

    def act(url: str) -> None:
        with ExitStack() as stack:
            dripping = [stack.enter_context(connected(url)) for _ in range(limits.most_requests)]
            for each in dripping:
                each.sendall(half)
            body = {"prompt": "a", "max_tokens": 1}

            def served() -> bool:
                assert requests.get(f"{url}/health", timeout=SECONDS).status_code == 200
                answer = requests.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
                assert answer.status_code in (200, 429)
                return answer.status_code == 200

            assert wait_for(served, SECONDS)
            assert wait_for(lambda: any(_came(each).startswith(b"HTTP/1.1 408") for each in dripping), SECONDS)

    served_here(embedded_services.draft_address, act, limits)


def _came(connection: socket.socket) -> bytes:
    connection.setblocking(False)
    try:
        return connection.recv(2**12, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


def test_requests_one_behind_the_other_are_answered_in_turn(gateway: Gateway) -> None:
    with connected(gateway.url) as connection:
        connection.sendall(ASKED * 3 + ASKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert answered(connection).count(b"HTTP/1.1 200") == 4


def test_what_is_sent_ahead_has_a_bound(gateway: Gateway) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "n": 9}).encode()
    with connected(gateway.url) as connection, suppress(ConnectionError):
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connection.sendall(ASKED * (2**21 // len(ASKED)))
        assert answered(connection) == b""


def test_a_client_that_closes_its_half_is_one_that_has_gone(gateway: Gateway) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "n": 9}).encode()
    for sent in (
        b"",
        b"GET / HT",
        HEAD + b"Content-Length: 9\r\n\r\n{",
        HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body,
    ):
        with connected(gateway.url) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert answered(connection) == b""


def test_a_body_in_tiny_chunks_is_refused_and_rubbish_behind_an_answer_is_no_failure(gateway: Gateway) -> None:
    """Each chunk costs as much as a long one: 256 KiB of them would stop every stream for a second."""
    before = gateway.log.count("Traceback")
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    with connected(gateway.url) as connection:
        connection.sendall(chunked + b"1\r\n \r\n" * 1000)
        assert answered(connection).startswith(b"HTTP/1.1 400")
    assert requests.get(f"{gateway.url}/v1/models", timeout=SECONDS).ok  # the gateway refuses known clients at once
    for _ in range(3):
        with connected(gateway.url) as connection:
            connection.sendall(chunked.replace(b"application/json", b"text/plain") + b"no chunk\r\n")
            answered(connection)
    assert requests.get(f"{gateway.url}/health", timeout=SECONDS).status_code == 200
    assert gateway.log.count("Traceback") == before


def test_the_latest_4096_accepted_keys_are_remembered() -> None:
    asked = []

    class Accepting:
        async def model_info(self, *, metadata: Any) -> object:
            asked.append(metadata)
            return object()

    async def run() -> None:
        client: Any = Accepting()
        models = Models(client)
        keys = [(("authorization", f"Bearer {number}"),) for number in range(4097)]
        for key in (*keys, keys[1], keys[0]):
            await models.lately(key)
        assert asked == [*keys, keys[0]]

    asyncio.run(run())


def test_of_a_caller_without_a_key_no_body_is_read(embedded_services: EmbeddedServices, monkeypatch: Any) -> None:
    from tests.support.gateways import running_gateway

    monkeypatch.setenv("DYNATREE_API_KEY", "sesame")
    with running_gateway(embedded_services.draft_address) as gateway, connected(gateway.url) as connection:
        connection.sendall(HEAD + b"Content-Length: 4000000\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 401"


@pytest.mark.parametrize(
    ("address", "allowed", "host", "answered"),
    [
        ("127.0.0.1:8000", (), b"localhost:8000", True),
        ("127.0.0.1:8000", (), b"LOCALHOST", True),
        ("127.0.0.1:8000", (), b"127.0.0.1:9", True),
        ("127.0.0.1:8000", (), b"[::1]:8000", True),
        ("127.0.0.1:8000", (), b"127.1.2.3", True),
        ("127.0.0.1:8000", (), None, True),
        ("127.0.0.1:8000", (), b"evil.example", False),
        ("127.0.0.1:8000", (), b"evil.example:8000", False),
        ("127.0.0.1:8000", (), b"localhost.evil.example", False),
        ("127.0.0.1:8000", (), b"127.0.0.1.evil.example:8000", False),
        ("127.0.0.1:8000", (), b"10.0.0.1", False),
        ("127.0.0.1:8000", (), b"\xff\xfe", False),
        ("localhost:8000", (), b"evil.example", False),
        ("[::1]:8000", (), b"evil.example", False),
        ("127.0.0.1:8000", ("Model.Example",), b"model.example:80", True),
        ("127.0.0.1:8000", ("*",), b"evil.example", True),
        ("0.0.0.0:8000", (), b"model.example", True),
        ("10.0.0.1:8000", (), b"model.example", True),
        ("unix:/run/gateway.sock", (), b"anything", True),
    ],
)
def test_a_gateway_on_loopback_has_this_machines_names(
    address: str, allowed: tuple[str, ...], host: bytes | None, answered: bool
) -> None:
    if answered:
        Hosts(address, allowed).check(host)
    else:
        with pytest.raises(ApiError) as refused:
            Hosts(address, allowed).check(host)
        assert refused.value.status == 421


def test_a_page_of_a_foreign_name_gets_nothing(gateway: Gateway) -> None:
    """The name may resolve to this machine (DNS rebinding)."""
    for path in ("/v1/models", "/health", "/", "/nothing"):
        answer = requests.get(gateway.url + path, headers={"Host": "evil.example"}, timeout=SECONDS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "unknown_host")
        assert "--allow-host" in answer.json()["error"]["message"]


def test_when_memory_is_full_the_request_that_takes_most_of_it_ends() -> None:
    async def main() -> list[str]:
        requests_ = OpenRequests(Limits(held_bytes=100))
        ends = []

        async def request(name: str, *held: int) -> None:
            with requests_.opened(watches=False) as opened:
                try:
                    for each in held:
                        opened.hold(each)
                        await asyncio.sleep(0)
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    assert opened.ended_by is not None
                    ends.append(f"{name} {opened.ended_by.status}")

        await asyncio.gather(request("small", 10, 10), request("large", 60), request("medium", 20, 20))
        await request("later", 90)
        return ends

    assert asyncio.run(main()) == ["large 429"]
