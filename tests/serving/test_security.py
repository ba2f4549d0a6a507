"""Tests who may call, and over which connections; each test is a line of the table in docs/guides/security.md."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from dynatree.client import (
    AsyncClient,
    AuthenticationError,
    Client,
    DynaTreeError,
    ServerBusyError,
    ServerUnavailableError,
)
from dynatree.common.errors import StartupError
from dynatree.draft.target import replicas
from dynatree.draft.text.prompts import PromptEncoder
from dynatree.serving import files, healthcheck
from dynatree.serving.admission import Quota
from dynatree.serving.channel import ChannelSettings, Connector
from dynatree.serving.grpc_options import MAX_METADATA_BYTES
from dynatree.serving.security import SecuritySettings, is_local
from dynatree.serving.tokens import TokenFile, read_token
from dynatree.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from tests.support.certificates import Authority
from tests.support.model_zoo import save_random_model
from tests.support.processes import wait_until
from tests.support.services import Services, running_services

ALICE, BOB, DRAFT = "alice-0123456789abcdef", "bob-0123456789abcdef", "draft-0123456789abcdef"


@dataclass
class Secured:
    """Services with TLS on all connections, client certificates between draft and verify, and tokens on both."""

    services: Services
    authority: Authority
    folder: Path

    def client(self, **settings: Any) -> Client:
        """Return a client that sends Alice's token over TLS, unless the settings differ."""
        known: dict[str, Any] = {"ca": self.authority.file, "token": ALICE, "connect_timeout": 30.0, "resume": False}
        return Client(self.services.draft_address, **(known | settings))


@pytest.fixture(scope="module", name="models")
def models_fixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("m")
    return save_random_model(folder / "target", "llama", seed=1), save_random_model(
        folder / "draft", "gpt_neox", seed=2
    )


@pytest.fixture(scope="module", name="secured")
def secured_fixture(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("s")
    authority = Authority(folder)
    server, draft = authority.pair("server"), authority.pair("draft")
    (folder / "tokens").write_text(f"# who\n\nalice:{ALICE}\nbob:{BOB}\n")
    (folder / "verify-tokens").write_text(f"draft:{DRAFT}\n")
    (folder / "token").write_text(f"{DRAFT}\n")
    with running_services(
        folder,
        *models,
        address="localhost:0",
        security=SecuritySettings(server.certificate, server.key, tokens=folder / "tokens"),
        verify_security=SecuritySettings(server.certificate, server.key, authority.file, folder / "verify-tokens"),
        channel=ChannelSettings(authority.file, draft.certificate, draft.key, folder / "token"),
    ) as services:
        yield Secured(services, authority, folder)


def refused_session(secured: Secured, credentials: grpc.ChannelCredentials | None, token: str | None) -> grpc.RpcError:
    """Return the error of opening a session at the verify service."""
    address = secured.services.verify_address
    channel = grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    stub = verify_pb2_grpc.VerifyServiceStub(channel)  # type: ignore[no-untyped-call]
    request = verify_pb2.VerifyServiceGetModelInfoRequest()
    with channel, pytest.raises(grpc.RpcError) as caught:
        stub.GetModelInfo(request, metadata=metadata, timeout=60.0)
    return caught.value


def test_a_token_that_is_known(secured: Secured) -> None:
    with secured.client() as client:
        assert client.generate("Once", max_new_tokens=4).token_ids
        assert client.model_info().target.name


def test_a_token_that_is_known_to_the_asynchronous_client(secured: Secured) -> None:
    async def run() -> int:
        async with AsyncClient(secured.services.draft_address, ca=secured.authority.file, token=ALICE) as client:
            return len((await client.generate("Once", max_new_tokens=4)).token_ids)

    assert asyncio.run(run())


@pytest.mark.parametrize("token", [None, "wrong-0123456789abcdef", DRAFT])
def test_no_token_or_a_wrong_one(secured: Secured, token: str | None) -> None:
    with secured.client(token=token) as client:
        with pytest.raises(AuthenticationError, match="no known token"):
            client.generate("Once", max_new_tokens=4)
        with pytest.raises(AuthenticationError):
            client.model_info()


def test_an_error_names_the_request_and_no_secret(secured: Secured) -> None:
    with secured.client(token="wrong-0123456789abcdef") as client, pytest.raises(AuthenticationError) as caught:
        client.generate("Once", max_new_tokens=4)
    assert caught.value.request_id
    assert f"(request {caught.value.request_id})" in str(caught.value)
    assert not any(secret in str(caught.value) for secret in (ALICE, BOB, "wrong-"))


def test_the_log_names_a_request_that_is_refused(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dynatree")
    with secured.client(token="wrong-0123456789abcdef") as client, pytest.raises(AuthenticationError) as caught:
        client.generate("Once", max_new_tokens=4)
    fields = [record.__dict__["fields"] for record in caplog.records if record.message == "request refused"]
    assert {"request_id": caught.value.request_id, "code": "UNAUTHENTICATED"} in fields


def test_health_needs_no_token(secured: Secured) -> None:
    credentials = grpc.ssl_channel_credentials(secured.authority.file.read_bytes())
    assert healthcheck.failure(secured.services.draft_address, 60.0, credentials=credentials) is None
    arguments = [secured.services.draft_address, "--ca", str(secured.authority.file)]
    assert healthcheck.main(arguments) == 0
    assert healthcheck.main([*arguments, "--service", "liveness"]) == 0


def test_plaintext_to_a_tls_port(secured: Secured) -> None:
    with (
        secured.client(ca=None, insecure=True, connect_timeout=0.5) as client,
        pytest.raises(ServerUnavailableError),
    ):
        client.generate("Once", max_new_tokens=4)
    assert healthcheck.failure(secured.services.draft_address, 2.0) is not None


def test_tls_to_a_plaintext_port(models: tuple[Path, Path], tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with (
        running_services(tmp_path, *models, address="localhost:0") as services,
        Client(services.draft_address, ca=authority.file, connect_timeout=0.5, resume=False) as client,
        pytest.raises(ServerUnavailableError),
    ):
        client.generate("Once", max_new_tokens=4)


def test_another_authority(secured: Secured, tmp_path: Path) -> None:
    with (
        secured.client(ca=Authority(tmp_path, "other").file, connect_timeout=1.0) as client,
        pytest.raises(ServerUnavailableError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.generate("Once", max_new_tokens=4)


def test_the_verify_service_wants_a_certificate_and_a_token(secured: Secured, tmp_path: Path) -> None:
    roots = secured.authority.file.read_bytes()
    good = secured.authority.pair("client")
    expired = secured.authority.pair("expired", expired=True)
    other = Authority(tmp_path, "other").pair("stranger")

    def credentials(pair: Any) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(roots, pair.key.read_bytes(), pair.certificate.read_bytes())

    unavailable, unknown = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED
    assert refused_session(secured, None, DRAFT).code() is unavailable
    assert refused_session(secured, grpc.ssl_channel_credentials(roots), DRAFT).code() is unavailable
    assert refused_session(secured, credentials(expired), DRAFT).code() is unavailable
    assert refused_session(secured, credentials(other), DRAFT).code() is unavailable
    assert refused_session(secured, credentials(good), None).code() is unknown
    assert refused_session(secured, credentials(good), ALICE).code() is unknown


def test_tokens_are_replaced_under_load(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOOK_SECONDS", 0.05)
    tokens, carol = secured.folder / "tokens", "carol-0123456789abcdef"
    before = tokens.read_text()
    with secured.client() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [client.generate("Once", max_new_tokens=8) for _ in range(30)])

        def replace(text: str) -> None:
            replacement = tokens.with_suffix(".new")
            replacement.write_text(text)
            os.replace(replacement, tokens)
            time.sleep(0.1)

        replace(f"nobody\n{before}carol:{carol}\n")  # the first line is invalid
        with secured.client(token=carol) as other:
            assert other.generate("Once", max_new_tokens=4).token_ids
        replace(before)
        with secured.client(token=carol) as other, pytest.raises(AuthenticationError):
            other.generate("Once", max_new_tokens=4)
        assert len(running.result(240)) == 30


def test_a_certificate_is_replaced_under_load(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections get the new certificate, and old connections continue."""
    monkeypatch.setattr(files, "LOOK_SECONDS", 0.05)
    with secured.client() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [client.generate("Once", max_new_tokens=8) for _ in range(30)])
        first = _served_certificate(secured)
        secured.authority.pair("server")  # into the same files
        time.sleep(0.1)
        assert _served_certificate(secured) != first
        assert len(running.result(240)) == 30
        with secured.client() as other:
            assert other.generate("Once", max_new_tokens=4).token_ids


def test_grpc_gets_no_certificate_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration is freed by gRPC; giving the same one to two connections crashed a service."""
    monkeypatch.setattr(files, "LOOK_SECONDS", 0.0)
    authority = Authority(tmp_path)
    pair = authority.pair("server")
    given: list[Any] = []

    def credentials(first: Any, fetch: Any, **_: Any) -> None:
        given.append(first)
        for turn in range(6):
            if turn in (2, 4):
                authority.pair("server")
            given.append(fetch())

    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", credentials)
    SecuritySettings(pair.certificate, pair.key).server_credentials()
    assert [each is None for each in given] == [False, True, True, False, True, False, True]
    assert len({id(each) for each in given if each is not None}) == 3


def _served_certificate(secured: Secured) -> str:
    import ssl

    host, port = secured.services.draft_address.rsplit(":", 1)
    return ssl.get_server_certificate((host, int(port)), timeout=60.0)


@pytest.mark.long
def test_the_draft_service_connects_anew_with_a_new_certificate(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open sessions keep the old connection, and nothing fails meanwhile."""
    monkeypatch.setattr(files, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(replicas, "RESOLVE_SECONDS", 0.2)
    secured.authority.pair("draft")  # into the same files
    until = time.monotonic() + 8.0
    with secured.client() as client:
        while time.monotonic() < until:
            assert len(client.generate("Once", max_new_tokens=8, ignore_eos=True).token_ids) == 8


def test_a_principal_has_its_own_prefixes_only(secured: Secured) -> None:
    """Another principal's token does not give access to cached prefixes of the first principal."""
    prompt = list(range(5, 60))
    with secured.client() as alice, secured.client(token=BOB) as bob:
        assert alice.generate(prompt, max_new_tokens=2).stats.cached_tokens == 0
        assert bob.generate(prompt, max_new_tokens=2).stats.cached_tokens == 0
        wait_until(lambda: secured.services.sessions == 0)
        assert alice.generate(prompt, max_new_tokens=2).stats.cached_tokens > 0
    with secured.client(token=BOB, principal="alice") as mallory:
        assert mallory.generate([*prompt, 7], max_new_tokens=2).stats.cached_tokens < len(prompt) + 1


def test_quotas_of_sessions(models: tuple[Path, Path], tmp_path: Path) -> None:
    quota = Quota(sessions=1, queue=1)
    with (
        running_services(tmp_path, *models, quota=quota, queue=8) as services,
        Client(services.draft_address, principal="greedy", resume=False) as greedy,
    ):
        streams = [greedy.stream("Once", max_new_tokens=100, ignore_eos=True, n=n) for n in (64, 1)]
        next(streams[0])  # has the principal's only session for many completions; the second waits
        waiting = partial(services.draft_registry.get_sample_value, "dynatree_num_requests_waiting")
        wait_until(lambda: waiting() == 1)
        with pytest.raises(ServerBusyError, match="1 requests of this principal are waiting"):
            greedy.generate("Once", max_new_tokens=4)
        with Client(services.draft_address, principal="other") as other:
            assert other.generate("Once", max_new_tokens=4).token_ids
        assert next(streams[0]).token_ids
        streams[0].close()
        assert sum(len(chunk.token_ids) for chunk in streams[1]) == 100


@pytest.fixture(scope="module", name="with_quota")
def with_quota_fixture(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """The quota refills by one token per second, so an exhausted one stays exhausted for the test."""
    with running_services(tmp_path_factory.mktemp("q"), *models, quota=Quota(tokens=60)) as services:
        yield services


def quota_client(services: Services, principal: str) -> Client:
    return Client(services.draft_address, principal=principal, resume=False)


def is_exhausted(client: Client, tokens: int = 50) -> bool:
    """Whether the quota refuses a request of `tokens` tokens."""
    try:
        client.generate([5], max_new_tokens=tokens - 1)
    except ServerBusyError as error:
        return "60 tokens per minute" in error.details and error.retry_after is not None
    return False


def test_a_quota_of_tokens(with_quota: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    with quota_client(with_quota, "greedy") as greedy, quota_client(with_quota, "other") as other:
        completion = greedy.generate("Once", max_new_tokens=100, ignore_eos=True)
        assert len(completion.token_ids) == 100, "with all of the minute's tokens left"
        assert is_exhausted(greedy, 5)
        assert other.generate("Once", max_new_tokens=4).token_ids
        monkeypatch.delattr(PromptEncoder, "text")
        with pytest.raises(ServerBusyError):  # before its text is tokenized
            greedy.generate("Once", max_new_tokens=5)


def test_a_quota_counts_what_may_be_used_at_once(with_quota: Services) -> None:
    def generate(_: int) -> int:
        try:
            return len(client.generate([7], max_new_tokens=49, ignore_eos=True).token_ids)
        except ServerBusyError:
            return 0

    with quota_client(with_quota, "at once") as client, ThreadPoolExecutor(30) as threads:
        assert sum(threads.map(generate, range(30))) == 49


def test_a_quota_counts_the_tokens_that_a_request_goes_on_from(with_quota: Services) -> None:
    request = draft_pb2.GenerateRequest(token_ids=draft_pb2.TokenIds(ids=[7]), max_new_tokens=50, ignore_eos=True)
    request.resume.token_ids[:] = range(20, 65)
    outcomes = []
    with grpc.insecure_channel(with_quota.draft_address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
        for _ in range(12):
            call = stub.Generate(request, metadata=(("dynatree-principal", "resuming"),))
            try:
                outcomes.append(sum(len(response.token_ids) for response in call))
            except grpc.RpcError as error:
                outcomes.append(dict(error.trailing_metadata())["dynatree-refused"])
    assert outcomes == [5, *["quota"] * 11]


def test_a_quota_counts_every_completion(with_quota: Services) -> None:
    with quota_client(with_quota, "several") as client:
        assert len(client.generate([7], max_new_tokens=24, n=2, ignore_eos=True).alternatives) == 1
        with pytest.raises(ServerBusyError, match="needs at least 30 tokens"):
            client.generate([7], max_new_tokens=9, n=3)


def test_a_quota_counts_a_prompt_whose_prefill_is_cancelled(
    with_quota: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    forward = with_quota.target.forward

    def held(segments: Any) -> Any:
        begun.set()
        assert goes_on.wait(20)
        return forward(segments)

    monkeypatch.setattr(with_quota.target, "forward", held)
    with quota_client(with_quota, "cancelling") as client, ThreadPoolExecutor(1) as threads:
        stream = client.stream(list(range(5, 45)), max_new_tokens=4)
        reading = threads.submit(list, stream)
        assert begun.wait(20)
        stream.close()
        reading.result(20)
        goes_on.set()
        assert is_exhausted(client, 30)
        assert not is_exhausted(client, 10)


def test_a_quota_gives_back_what_was_not_used(with_quota: Services) -> None:
    """Short answers with a high limit follow one another; none would fit if the previous one kept its limit charged."""
    with quota_client(with_quota, "asking") as asking, quota_client(with_quota, "short") as client:
        third = asking.generate([7], max_new_tokens=3, ignore_eos=True).token_ids[-1]
        for _ in range(3):
            completion = client.generate([7], max_new_tokens=40, stop_token_ids=[third])
            assert len(completion.token_ids) <= 3
        with pytest.raises(DynaTreeError, match="vocabulary"):
            client.generate([10**6], max_new_tokens=40)  # costs nothing
        assert not is_exhausted(client, 45)


def test_a_quota_leaves_room_for_requests_that_name_no_length(with_quota: Services) -> None:
    """Their limit is the context, which exceeds the quota."""
    with quota_client(with_quota, "asking for open") as asking, quota_client(with_quota, "open") as client:
        third = asking.generate([7], max_new_tokens=3, ignore_eos=True).token_ids[-1]
        for _ in range(5):
            assert len(client.generate([7], stop_token_ids=[third]).token_ids) <= 3
        with pytest.raises(ServerBusyError, match="needs at least 60 tokens"):
            client.generate([7] * 30, n=2)  # only their prompts are charged


def test_a_full_queue_is_told_apart_from_a_quota(models: tuple[Path, Path], tmp_path: Path) -> None:
    with (
        running_services(tmp_path, *models, sessions=1, queue=0) as services,
        Client(services.draft_address, resume=False) as client,
        grpc.insecure_channel(services.draft_address) as channel,
    ):
        stream = client.stream([7], max_new_tokens=60, ignore_eos=True, n=64)  # the session is held until it is closed
        next(stream)
        stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(draft_pb2.GenerateRequest(token_ids=draft_pb2.TokenIds(ids=[7]))))
        error: Any = refused.value
        assert dict(error.trailing_metadata())["dynatree-refused"] == "queue"
        assert next(stream).token_ids
        stream.close()


def test_special_tokens_are_text_unless_asked_for(models: tuple[Path, Path], tmp_path: Path) -> None:
    with running_services(tmp_path, *models) as services, Client(services.draft_address) as client:
        special = next(iter(services.draft.tokenizer.all_special_tokens))
        text = f"Once{special}"
        as_text = client.generate(text, max_new_tokens=1).prompt_tokens
        as_token = client.generate(text, max_new_tokens=1, special_tokens=True).prompt_tokens
        assert as_token < as_text


# At start


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/x", True),
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("127.8.9.1:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("example.org:1", False),
        ("localhost.example.org:1", False),
    ],
)
def test_what_is_local(address: str, local: bool) -> None:
    assert is_local(address) == local
    if local:
        SecuritySettings().check_plain(address)
        Connector().check([address])
    else:
        with pytest.raises(StartupError, match="--insecure"):
            SecuritySettings().check_plain(address)
        with pytest.raises(StartupError, match="--insecure"):
            Connector().check([address])
        SecuritySettings(insecure=True).check_plain(address)
        Connector(ChannelSettings(insecure=True)).check([address])


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    pair = Authority(tmp_path).pair("server")
    with pytest.raises(StartupError, match="both --tls-cert and --tls-key"):
        SecuritySettings(certificate=pair.certificate)
    with pytest.raises(StartupError, match="--client-ca requires TLS"):
        SecuritySettings(client_ca=pair.certificate)
    with pytest.raises(StartupError, match="both --verify-cert and --verify-key"):
        ChannelSettings(ca=pair.certificate, key=pair.key)
    with pytest.raises(StartupError, match="expected --verify-ca"):
        ChannelSettings(certificate=pair.certificate, key=pair.key)
    with pytest.raises(StartupError, match="TLS cannot be used"):
        SecuritySettings(tmp_path / "none", pair.key).server_credentials()


def test_certificates_that_make_no_sense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Invalid files are an error at start; later, the previous contents stay in force."""
    authority = Authority(tmp_path)
    good, other = authority.pair("good"), authority.pair("other")
    for certificate, key in ((good.certificate, other.key), (good.key, good.key), (good.certificate, good.certificate)):
        with pytest.raises(StartupError, match=r"TLS cannot be used.*not a certificate and its unencrypted key"):
            SecuritySettings(certificate, key).server_credentials()
        with pytest.raises(StartupError, match="not a certificate and its unencrypted key"):
            Connector(ChannelSettings(authority.file, certificate, key))
    with pytest.raises(StartupError, match="key has no certificates"):
        Connector(ChannelSettings(good.key))
    with pytest.raises(StartupError, match="key has no certificates"):
        SecuritySettings(good.certificate, good.key, good.key).server_credentials()
    connector = Connector(ChannelSettings(authority.file, good.certificate, good.key))
    before = connector.generation
    good.certificate.write_text("junk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "LOOK_SECONDS", 0.0)
        assert connector.generation == before
    assert "the previous contents stay in force" in caplog.text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no lines principal:token"),
        ("# alice\n", "it has no lines principal:token"),
        ("alice", "line 1"),
        (":0123456789abcdef", "line 1"),
        ("a:b", "16"),
    ],
)
def test_a_token_file_that_makes_no_sense(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(StartupError, match=reason):
        TokenFile(file)


def test_who_is_known_by_which_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"alice:{ALICE}\nbob:{BOB}\nalice:second-0123456789abcdef\n")
    tokens = TokenFile(file)
    assert tokens.principal(f"Bearer {ALICE}") == "alice"
    assert tokens.principal("bearer second-0123456789abcdef") == "alice"
    assert tokens.principal(f"Bearer {BOB}") == "bob"
    for wrong in ("", ALICE, f"Basic {ALICE}", "Bearer ", f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}", "Bearer \xe9"):
        assert tokens.principal(wrong) is None


@pytest.mark.parametrize("text", ["", "two words\n", "a\nb", "t\xe9"])
def test_a_file_with_no_single_token(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ValueError, match="one token"):
        read_token(tmp_path / "token")


def test_a_client_shows_no_token_in_plain_text_to_another_machine() -> None:
    with pytest.raises(ValueError, match="plain text"):
        Client("example.org:50051", token=ALICE)
    Client("example.org:50051", token=ALICE, insecure=True).close()
    Client("localhost:50051", token=ALICE).close()
    with pytest.raises(ValueError, match="printable ASCII"):
        Client("localhost:50051", token="two words")
    with pytest.raises(ValueError, match="given together"):
        Client("localhost:50051", cert="x")


@pytest.mark.parametrize(
    "method",
    ["DraftService/Generate", "DraftService/GetModelInfo", "VerifyService/Verify", "VerifyService/GetModelInfo"],
)
def test_undecodable_bytes_are_the_callers_fault(models: tuple[Path, Path], tmp_path: Path, method: str) -> None:
    with running_services(tmp_path, *models) as services:
        address = services.draft_address if "Draft" in method else services.verify_address
        with grpc.insecure_channel(address) as channel:
            call = channel.stream_stream(f"/dynatree.v1.{method}")
            with pytest.raises(grpc.RpcError, match="the message cannot be decoded") as caught:
                list(call(iter([b"\xff\xff\xff"]), timeout=5.0))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_headers_that_are_too_large(models: tuple[Path, Path], tmp_path: Path) -> None:
    with running_services(tmp_path, *models) as services, grpc.insecure_channel(services.draft_address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
        request = draft_pb2.DraftServiceGetModelInfoRequest()
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModelInfo(request, metadata=(("large", "x" * 2 * MAX_METADATA_BYTES),), timeout=5.0)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stub.GetModelInfo(request, metadata=(("small", "x" * 1000),), timeout=5.0)  # the connection stays open


def test_a_resume_of_what_never_was(models: tuple[Path, Path], tmp_path: Path) -> None:
    """A client may claim any tokens; it gets the target's continuation, as for a prompt."""
    with running_services(tmp_path, *models) as services, grpc.insecure_channel(services.draft_address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]

        def code(**changes: Any) -> Any:
            resume = draft_pb2.Resume(**changes)
            request = draft_pb2.GenerateRequest(text="Once", max_new_tokens=4, resume=resume)
            try:
                list(stub.Generate(request, timeout=5.0))
            except grpc.RpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        assert code(token_ids=[5, 6]) is grpc.StatusCode.OK
        assert code(token_ids=[5, 6, 7, 8]) is grpc.StatusCode.OK  # nothing remains to generate
        assert code(index=1) is grpc.StatusCode.INVALID_ARGUMENT
        assert code(token_ids=[10**6]) is grpc.StatusCode.INVALID_ARGUMENT
        assert code(token_ids=[5] * 5) is grpc.StatusCode.OUT_OF_RANGE  # more than the request generates
        assert code(round=2**64 - 1) is grpc.StatusCode.OUT_OF_RANGE
        assert code(target_fingerprint="another") is grpc.StatusCode.FAILED_PRECONDITION
