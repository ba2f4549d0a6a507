"""Tests the gateway in operation: keys, certificates, health, vanishing clients, lost services and shutdown."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import requests

from dynatree.cli.main import main
from dynatree.common.version import version
from dynatree.gateway.encoding import PIECE_BYTES
from dynatree.gateway.errors import RequestFields
from dynatree.gateway.responses import UntilStopped, as_events
from dynatree.serving.security import SecuritySettings
from tests.support.certificates import Authority
from tests.support.gateways import Gateway, running_gateway, wait_for
from tests.support.gateways import client_fixture as client_fixture
from tests.support.gateways import gateway_fixture as gateway_fixture
from tests.support.gateways import grpc_client_fixture as grpc_client_fixture
from tests.support.gateways import model_fixture as model_fixture
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.processes import EmbeddedServices
from tests.support.services import running_services


def test_keys_are_the_draft_services_tokens(tmp_path: Path) -> None:
    """Without a key, not even the models are listed."""
    target = save_random_model(tmp_path / "target", "gpt2", seed=1)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=2)
    tokens = tmp_path / "tokens"
    tokens.write_text("anna:sesame-1234567890\n")
    security = SecuritySettings(tokens=tokens)
    with (
        running_services(tmp_path, target, draft, security=security) as services,
        running_gateway(services.draft_address) as gateway,
    ):
        url = f"{gateway.url}/v1"
        with openai.OpenAI(base_url=url, api_key="sesame-1234567890", max_retries=0) as known:
            assert known.models.list().data[0].id == "target"
            assert known.completions.create(model="target", prompt="a", max_tokens=2).choices
        for key in ("wrong", "no key"):
            with (
                openai.OpenAI(base_url=url, api_key=key, max_retries=0) as unknown,
                pytest.raises(openai.AuthenticationError),
            ):
                unknown.completions.create(model="target", prompt="a", max_tokens=2)
        for path, send in (
            ("models", {}),
            ("completions", {"json": {"prompt": "a", "logprobs": 1}}),
            ("completions", {"json": {"prompt": "a", "model": "guessed"}}),
            ("../tokenize", {"json": {"prompt": "a"}}),
            ("../detokenize", {"json": {"tokens": [1]}}),
        ):
            answer = requests.request("POST" if send else "GET", f"{url}/{path}", timeout=60, **send)
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "Authorization: Bearer" in answer.json()["error"]["message"]


def test_a_gateway_has_a_key_and_names_of_its_own(
    embedded_services: EmbeddedServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNATREE_API_KEY", "sesame")
    names = ("--served-model-name", "gpt-4o", "org/own")
    with running_gateway(embedded_services.draft_address, *names) as gateway:
        assert "sesame" not in gateway.log
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sesame", max_retries=0) as client:
            assert [each.id for each in client.models.list()] == list(names[1:])
            assert {(each.model_extra or {})["root"] for each in client.models.list()} == {"embedded-target"}
            for name in names[1:]:
                assert client.models.retrieve(name).id == name
                assert client.completions.create(model=name, prompt="a", max_tokens=1).model == "gpt-4o"
            with pytest.raises(openai.NotFoundError, match="'gpt-4o' and 'org/own' are"):
                client.completions.create(model="embedded-target", prompt="a")
        body = {"prompt": "a", "max_tokens": 1}
        for shown in ("", "Bearer ", "Bearer wrong", "sesame", "Basic sesame"):
            for answer in (
                requests.post(f"{gateway.url}/v1/completions", json=body, headers={"Authorization": shown}, timeout=60),
                requests.get(f"{gateway.url}/v1/models", headers={"Authorization": shown}, timeout=60),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert requests.get(f"{gateway.url}/health", timeout=60).status_code == 200


def test_a_key_of_the_gateways_own_does_not_guard_grpc(capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--target-model", "embedded", "--draft-model", "embedded"]
    assert main(["serve", *models, "--api-key", "sesame", "--grpc", "localhost:0"]) == 1
    assert "--api-key cannot be combined" in capsys.readouterr().err


@pytest.mark.parametrize("shown", ["", "Bearer ", "Basic dTpw"])
def test_what_is_no_key_is_as_good_as_none(gateway: Gateway, shown: str) -> None:
    """lm-eval sends an empty key if it has none."""
    headers = {"Authorization": shown}
    answer = requests.post(f"{gateway.url}/v1/completions", json={"prompt": "a"}, headers=headers, timeout=60)
    assert answer.status_code == 200


@pytest.mark.long
def test_a_gateway_without_services_says_so_and_names_no_address(tmp_path: Path) -> None:
    with running_gateway(f"unix:{tmp_path}/nobody.sock", "--timeout", "0.3") as gateway:
        health = requests.get(f"{gateway.url}/health", timeout=60)
        answer = requests.post(f"{gateway.url}/v1/completions", json={"prompt": "a"}, timeout=60)

        for each in (health, answer):
            assert each.status_code == 503
            assert each.json()["error"]["code"] == "service_unavailable"
            assert "nobody.sock" not in each.text


def test_health_and_metrics(gateway: Gateway) -> None:
    assert requests.get(f"{gateway.url}/health", timeout=60).json() == {"status": "ok"}
    assert requests.get(f"{gateway.url}/version", timeout=60).json() == {"version": version()}
    requests.get(f"{gateway.url}/v1/models", timeout=60)
    requests.get(f"{gateway.url}/v1/models/", timeout=60)
    assert 'dynatree_gateway_requests_total{code="200",route="/v1/models"} 2.0' in figures_of(gateway)


def figures_of(gateway: Gateway) -> str:
    return requests.get(f"{gateway.url}/metrics", timeout=60).text


def counts(gateway: Gateway, route: str) -> dict[str, float]:
    """Return the number of observations of a route's requests in a histogram."""
    found = re.findall(rf'dynatree_gateway_(\w+)_seconds_count{{route="{route}"}} (.*)', figures_of(gateway))
    return {name: float(count) for name, count in found}


def test_only_what_was_measured_is_observed(embedded_services: EmbeddedServices) -> None:
    """A refusal, and an answer whose client has left, have no time to the first or last byte."""
    route = "/v1/completions"
    with running_gateway(embedded_services.draft_address) as gateway:
        url = gateway.url + route
        assert requests.post(url, json={"prompt": "a", "tools": [1]}, timeout=60).status_code == 400
        with pytest.raises(requests.Timeout):
            requests.post(url, json={"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "n": 9}, timeout=0.3)
        assert wait_for(lambda: "status=499" in gateway.log)
        assert counts(gateway, route) == {}
        assert requests.post(url, json={"prompt": "a", "max_tokens": 1}, timeout=60).status_code == 200
        assert counts(gateway, route) == {"time_to_first_byte": 1, "e2e_request_latency": 1}
        body = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "n": 9, "stream": True}
        with requests.post(url, json=body, stream=True, timeout=60) as answer:
            next(answer.iter_lines())
        assert wait_for(lambda: counts(gateway, route) == {"time_to_first_byte": 2, "e2e_request_latency": 1})
        assert "dynatree_gateway_num_requests_running 0.0" in figures_of(gateway)  # the scrape itself is not counted


def test_answers_name_their_requests(gateway: Gateway) -> None:
    """They contain the caller's request id if it is valid; the services' logs have it too."""
    url = f"{gateway.url}/v1/models"
    for shown, told in (("mine-1", "mine-1"), ("no name; at all", None)):
        name = requests.get(url, headers={"X-Request-Id": shown}, timeout=60).headers["X-Request-Id"]
        assert name == told or (told is None and len(name) == 32)
    assert wait_for(lambda: "request_id=mine-1" in gateway.log)


def test_pages_of_other_origins_may_call_only_where_they_are_named(
    gateway: Gateway, embedded_services: EmbeddedServices
) -> None:
    headers = {"Origin": "https://example.org"}
    assert (
        "Access-Control-Allow-Origin" not in requests.get(f"{gateway.url}/health", headers=headers, timeout=60).headers
    )
    with running_gateway(embedded_services.draft_address, "--cors", "https://example.org") as open_gateway:
        answer = requests.get(f"{open_gateway.url}/health", headers=headers, timeout=60)
        assert answer.headers["Access-Control-Allow-Origin"] == "https://example.org"
        asks = {"Origin": "https://example.com", "Access-Control-Request-Method": "POST"}
        refused = requests.options(f"{open_gateway.url}/v1/completions", headers=asks, timeout=60)
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "Disallowed CORS origin")
        unknown = requests.get(f"{open_gateway.url}/health", headers=headers | {"Host": "example.net"}, timeout=60)
        assert unknown.status_code == 421
        assert unknown.headers["Access-Control-Allow-Origin"] == "https://example.org"
        assert unknown.headers["X-Request-Id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_completion(tmp_path: Path, stream: bool) -> None:
    target = save_random_model(tmp_path / "target", "gpt2", seed=1)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=2)
    with (
        running_services(tmp_path, target, draft, prefix_cache=False) as services,
        running_gateway(services.draft_address) as gateway,
    ):
        host, port = gateway.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "a", "max_tokens": 150, "n": 64, "ignore_eos": True, "stream": stream})
        with socket.create_connection((host, int(port))) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert wait_for(lambda: not services.idle)
        assert wait_for(lambda: services.idle)
        assert wait_for(lambda: "dynatree_gateway_num_requests_running 0.0" in figures_of(gateway))


def test_a_client_that_leaves_in_the_midst_of_its_body_is_no_failure(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}X-Request-Id: leaver\r\nContent-Length: 1000\r\n\r\nhalf".encode())
        time.sleep(0.2)
    assert wait_for(lambda: "request_id=leaver route=/v1/completions status=499" in gateway.log)
    assert "Traceback" not in gateway.log


def test_a_length_that_is_too_large_is_refused_before_the_body(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 1000000000\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_stop_tells_the_requests_that_it_cuts(embedded_services: EmbeddedServices) -> None:
    body = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "policy": "autoregressive", "temperature": 1, "n": 9}
    with running_gateway(embedded_services.draft_address, "--grace", "1") as gateway:
        url = f"{gateway.url}/v1/completions"
        with ThreadPoolExecutor(1) as threads:
            whole = threads.submit(requests.post, url, json=body, timeout=60)
            with requests.post(url, json=body | {"stream": True}, stream=True, timeout=60) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert wait_for(lambda: "dynatree_gateway_num_requests_running 2.0" in figures_of(gateway))
                gateway.process.terminate()
                *_, last = [line for line in lines if line]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "service_unavailable"
            assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "service_unavailable")
        gateway.process.wait(20)
    assert "Traceback" not in gateway.log


@pytest.mark.parametrize(("taken", "told"), [(1, True), (2, False), (4, True)])
def test_a_stop_within_an_event_tells_nothing_more(taken: int, told: bool) -> None:
    """An error behind a part of an event would be a part of its text; the server closes the connection instead."""
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[str]:
        yield "a"
        yield "b" * (PIECE_BYTES * 2)
        yield "c"

    async def stopped() -> None:
        full = asyncio.Event()

        async def send(message: Any) -> None:
            if len(sent) == taken and not full.is_set():
                full.set()
                await asyncio.Event().wait()  # as uvicorn does before it writes
            sent.extend([message["body"]] if "body" in message else [])

        scope: Any = {"state": {"open_request": SimpleNamespace(ended_by=None)}}
        app = UntilStopped(as_events(events(), RequestFields("prompt", None, None)))
        request = asyncio.create_task(app(scope, asyncio.Event().wait, send))  # type: ignore[arg-type]
        await full.wait()
        request.cancel()
        await request

    asyncio.run(stopped())
    *events_, last = b"".join(sent).split(b"\n\n")
    assert ("service_unavailable" in events_[-1].decode()) == told == (last == b"")


def test_a_stop_tells_requests_that_are_not_yet_at_the_model(tmp_path: Path) -> None:
    """Affected are a request whose body is still being read, and requests that wait for a draft service."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99"
    with running_gateway(f"unix:{tmp_path}/nobody.sock", "--grace", "1") as gateway, ThreadPoolExecutor(4) as threads:
        host, port = gateway.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(f"{head}\r\n\r\nhalf".encode())
            asked: list[tuple[str, dict[str, Any] | None]] = [
                ("models", None),
                ("completions", {"prompt": "a"}),
                ("completions", {"prompt": "a", "stream": True}),
                ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ]
            answers = [
                threads.submit(requests.request, "POST" if body else "GET", f"{gateway.url}/v1/{path}", json=body)
                for path, body in asked
            ]
            assert wait_for(lambda: f"dynatree_gateway_num_requests_running {len(asked) + 1}.0" in figures_of(gateway))
            gateway.process.terminate()
            cut = connection.makefile("rb").read().decode()
            assert cut.startswith("HTTP/1.1 503")
            assert "x-request-id" in cut
            assert '"code":"service_unavailable"' in cut
            for each in answers:
                answer = each.result()
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
                assert answer.headers["X-Request-Id"]
        gateway.process.wait(20)
    assert "Traceback" not in gateway.log


def test_a_file_that_is_no_socket_stays(embedded_services: EmbeddedServices, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    assert main(["gateway", "--server", embedded_services.draft_address, "--listen", f"unix:{precious}"]) == 1
    assert precious.read_text() == "data"


@pytest.mark.long
def test_a_certificate_that_is_not_its_keys_changes_nothing(
    embedded_services: EmbeddedServices, tmp_path: Path
) -> None:
    """A rotation by two renames passes through such a mismatched pair."""
    authority = Authority(tmp_path)
    first, second = authority.pair("first"), authority.pair("second")
    live, key = tmp_path / "live.pem", tmp_path / "live.key"
    shutil.copy(first.certificate, live)
    shutil.copy(first.key, key)
    tls = ("--tls-cert", str(live), "--tls-key", str(key))
    with running_gateway(embedded_services.draft_address, *tls) as gateway:

        def shown() -> str:
            host, port = gateway.url.removeprefix("https://").split(":")
            return ssl.get_server_certificate((host, int(port)), timeout=10)

        before = shown()
        shutil.copy(second.certificate, live)
        assert wait_for(lambda: "cannot be reloaded" in gateway.log)
        assert shown() == before
        shutil.copy(second.key, key)
        assert wait_for(lambda: shown() != before)


def test_a_connection_without_encryption_needs_a_word() -> None:
    for arguments in (
        ["--listen", "0.0.0.0:0"],
        ["--server", "192.0.2.1:50051"],
    ):
        assert main(["gateway", *arguments]) == 1


def test_the_description_is_openapi(gateway: Gateway) -> None:
    description = requests.get(f"{gateway.url}/openapi.json", timeout=60).json()

    assert description["openapi"].startswith("3.")
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics"} <= description[
        "paths"
    ].keys()


def test_what_is_no_draft_service_is_named_by_no_address(embedded_services: EmbeddedServices) -> None:
    with running_gateway(embedded_services.verify_address) as gateway:
        answer = requests.post(f"{gateway.url}/v1/completions", json={"prompt": "a"}, timeout=60)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
    assert "verify.sock" not in answer.text


def test_two_interrupts_at_once_end_the_gateway_without_a_traceback():
    command = [
        sys.executable,
        "-m",
        "dynatree.cli.main",
        "gateway",
        "--listen",
        "127.0.0.1:0",
        "--server",
        "127.0.0.1:1",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        log = ""
        while "as HTTP on" not in log:
            log += process.stderr.readline()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        log += process.stderr.read()
    assert "shut down" in log
    assert "Traceback" not in log


def test_a_model_without_a_name_is_refused(capsys):
    assert main(["gateway", "--served-model-name", "a", ""]) == 2
    assert "the name is empty" in capsys.readouterr().err
