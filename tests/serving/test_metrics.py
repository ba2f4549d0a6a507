"""Tests the metrics for Prometheus, and the contents of log lines."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from dynatree.client import Client, DynaTreeError
from dynatree.common.errors import StartupError
from dynatree.common.logs import JsonLines, TextLines
from dynatree.serving import files, metrics
from dynatree.serving.metrics import new_registry, serve_metrics
from dynatree.serving.security import SecuritySettings
from tests.support.certificates import Authority
from tests.support.model_zoo import save_random_model
from tests.support.processes import wait_until
from tests.support.services import Services, running_services


@pytest.fixture(scope="module", name="services")
def services_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("r")
    target = save_random_model(folder / "target", "llama", seed=1)
    with running_services(folder, target, save_random_model(folder / "draft", "gpt_neox", seed=2)) as services:
        yield services


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """Return a value of a registry; 0 if it does not exist."""
    return registry.get_sample_value(f"dynatree_{name}", labels) or 0.0


def test_what_is_counted(services: Services) -> None:
    registry = services.draft_registry
    names = ("generation_tokens_total", "prompt_tokens_total", "spec_decode_num_drafts_total")
    before = {name: value(registry, name) for name in names}
    with Client(services.draft_address) as client:
        completions = [client.generate(list(range(9, 20)), max_new_tokens=20, ignore_eos=True) for _ in range(3)]
        with pytest.raises(DynaTreeError):
            client.generate("Once", max_new_tokens=10**6)
    grown = {name: value(registry, name) - before[name] for name in names}
    assert grown == {
        "generation_tokens_total": 60,
        "prompt_tokens_total": 33,
        "spec_decode_num_drafts_total": sum(each.stats.rounds for each in completions),
    }
    assert value(registry, "request_success_total", finished_reason="length") == 3
    assert value(registry, "request_failure_total", code="OUT_OF_RANGE") == 1
    accepted = sum(each.stats.draft_n_accepted for each in completions)
    assert value(registry, "spec_decode_num_accepted_tokens_total") == accepted
    by_position = [value(registry, "spec_decode_num_accepted_tokens_per_pos_total", position=str(p)) for p in range(64)]
    assert sum(by_position) == accepted
    assert value(registry, "time_to_first_token_seconds_count") == 3
    assert value(registry, "verify_replicas_ready") == 1
    assert value(registry, "num_requests_running") == 0
    verify = services.verify_registry
    wait_until(lambda: services.sessions == 0)  # it ends a moment after the last answer
    assert value(verify, "committed_tokens_total") == 60
    assert value(verify, "pass_rows_count") >= 3
    assert value(verify, "num_requests_running") == 0
    assert value(verify, "kv_cache_usage_perc") == 0


def test_the_endpoint() -> None:
    registry = new_registry()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    end = serve_metrics(f"127.0.0.1:{port}", registry, SecuritySettings())
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60.0) as response:
            families = {family.name for family in text_string_to_metric_families(response.read().decode())}
        assert "process_resident_memory_bytes" in families
        with pytest.raises(StartupError, match="cannot serve metrics"):
            serve_metrics(f"127.0.0.1:{port}", registry, SecuritySettings())
    finally:
        end()
    with pytest.raises(StartupError, match="--insecure"):
        serve_metrics("0.0.0.0:0", registry, SecuritySettings())


def test_silent_connections_hold_up_no_scrape_and_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint uses TLS with a certificate that is replaced."""
    monkeypatch.setattr(files, "LOOK_SECONDS", 0.0)
    authority = Authority(tmp_path)
    pair = authority.pair("server")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    end = serve_metrics(f"localhost:{port}", new_registry(), SecuritySettings(pair.certificate, pair.key))
    trusted = ssl.create_default_context(cafile=str(authority.file))
    with socket.create_connection(("localhost", port)), socket.create_connection(("localhost", port)) as nonsense:
        nonsense.sendall(b"GET / HTTP/1.1\r\n\r\n")
        first = ssl.get_server_certificate(("localhost", port))
        authority.pair("server")
        assert ssl.get_server_certificate(("localhost", port)) != first
        with urllib.request.urlopen(f"https://localhost:{port}/metrics", timeout=60.0, context=trusted) as response:
            assert b"process_resident_memory_bytes" in response.read()
        started = time.monotonic()
        end()
        assert time.monotonic() - started < 3.0


def test_a_key_that_is_replaced_by_an_encrypted_one_holds_up_no_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a password, OpenSSL would ask for one at the terminal of the service; the earlier key stays in force."""
    monkeypatch.setattr(files, "LOOK_SECONDS", 0.0)
    authority = Authority(tmp_path)
    pair = authority.pair("server")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    end = serve_metrics(f"localhost:{port}", new_registry(), SecuritySettings(pair.certificate, pair.key))
    try:
        key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
        encrypted = serialization.BestAvailableEncryption(b"secret")
        pair.key.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encrypted)
        )
        trusted = ssl.create_default_context(cafile=str(authority.file))
        with urllib.request.urlopen(f"https://localhost:{port}/metrics", timeout=60.0, context=trusted) as response:
            assert b"process_resident_memory_bytes" in response.read()
    finally:
        end()
    assert "server.pem and server.key are not a certificate and its unencrypted key" in caplog.text
    assert "pass phrase" not in capfd.readouterr().err


@pytest.fixture(name="scraped")
def scraped_fixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[str, int, ssl.SSLContext | None]]:
    """The scheme and port of an endpoint with three connections, and the authority of its certificate."""
    monkeypatch.setattr(metrics, "MAX_SCRAPES", 3)
    monkeypatch.setattr(metrics, "SCRAPE_SECONDS", request.param[1])
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    if request.param[0] == "http":
        end, trusted = serve_metrics(f"localhost:{port}", new_registry(), SecuritySettings()), None
    else:
        authority = Authority(tmp_path)
        pair = authority.pair("server")
        end = serve_metrics(f"localhost:{port}", new_registry(), SecuritySettings(pair.certificate, pair.key))
        trusted = ssl.create_default_context(cafile=str(authority.file))
    try:
        yield request.param[0], port, trusted
    finally:
        end()


@pytest.mark.parametrize("scraped", [("http", 0.3), ("https", 0.3)], indirect=True, ids=["http", "https"])
def test_a_scrape_that_takes_too_long_is_closed_whatever_it_says(scraped: tuple[str, int, ssl.SSLContext]) -> None:
    _, port, trusted = scraped
    with ExitStack() as stack:
        if trusted is None:
            dripping = stack.enter_context(socket.create_connection(("localhost", port)))
        else:
            dripping = stack.enter_context(_encrypted(port, trusted))
        dripping.settimeout(0.05)
        ended = False
        while not ended:  # a line that never ends, byte by byte
            try:
                dripping.sendall(b"x")
                ended = not dripping.recv(1)
            except TimeoutError:
                continue
            except OSError:
                ended = True


def _encrypted(port: int, trusted: ssl.SSLContext) -> ssl.SSLSocket:
    """Return a connection after its handshake, which on a busy machine may take longer than a scrape may."""
    for _ in range(100):
        plain = socket.create_connection(("localhost", port))
        try:
            return trusted.wrap_socket(plain, server_hostname="localhost")
        except OSError:
            plain.close()
    raise AssertionError("no handshake was in time")


@pytest.mark.parametrize("scraped", [("http", 60.0), ("https", 60.0)], indirect=True, ids=["http", "https"])
def test_silent_scrapes_take_no_more_threads_than_there_are_places(scraped: tuple[str, int, ssl.SSLContext]) -> None:
    """The connections that have waited longest are closed, and a scrape is answered."""
    scheme, port, trusted = scraped
    before = threading.active_count()
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("localhost", port))) for _ in range(20)]
        for connection in silent[:17]:
            connection.settimeout(30)
            assert connection.recv(100) == b""
        url = f"{scheme}://localhost:{port}/metrics"
        with urllib.request.urlopen(url, timeout=30, context=trusted) as response:
            assert b"process_resident_memory_bytes" in response.read()
        assert threading.active_count() - before <= 3


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xfe\r\n\r\n",
        b"GET //[ HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\nAccept: application/openmetrics-text;version=x\r\n\r\n",
    ],
)
@pytest.mark.parametrize("scraped", [("http", 60.0)], indirect=True)
def test_a_scrape_that_makes_no_sense_leaves_no_traceback(
    scraped: tuple[str, int, None], said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("localhost", scraped[1]), timeout=30) as connection:
        connection.sendall(said)
        while connection.recv(65536):
            pass
    assert "Traceback" not in capfd.readouterr().err


def test_a_completion_is_one_line(services: Services, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "dynatree.draft.service")
    with Client(services.draft_address, principal="team") as client:
        client.generate("a secret prompt", max_new_tokens=4)
        with pytest.raises(DynaTreeError) as caught:
            client.generate("a secret prompt", max_new_tokens=10**6)
    done, failed = (record for record in caplog.records if record.name == "dynatree.draft.service")
    line = json.loads(JsonLines().format(done))
    assert line["message"] == "completion"
    assert (line["generated_tokens"], line["principal"], line["resumes"]) == (4, "team", 0)
    assert "secret" not in json.dumps(line)
    assert json.loads(JsonLines().format(failed))["request_id"] == caught.value.request_id
    text = TextLines().format(done)
    assert "generated_tokens=4" in text
    assert "principal=team" in text
    done.fields.update(principal="", finish_reason=None)  # type: ignore[attr-defined]
    assert not {"principal", "finish_reason"} & {field.partition("=")[0] for field in TextLines().format(done).split()}
    assert "\n" not in text


def test_a_traceback_is_in_the_line() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        import sys

        record = logging.LogRecord("a", logging.ERROR, "b", 1, "failed: %s", ("x",), sys.exc_info())
    line = json.loads(JsonLines().format(record))
    assert line["message"] == "failed: x"
    assert "ValueError: no" in line["exception"]
