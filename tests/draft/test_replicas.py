"""Tests which verify service is chosen next, and how a draft service discovers verify services."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio

from dynatree.common.errors import FailedPreconditionError, PeerUnavailableError, StartupError
from dynatree.common.model_info import ModelInfo
from dynatree.draft.target import replica as replica_module
from dynatree.draft.target import replicas as module
from dynatree.draft.target.replica import Replica
from dynatree.draft.target.replicas import Replicas
from dynatree.draft.target.target import Target
from dynatree.draft.target.verify_client import VerifyClient
from dynatree.serving.address import split_addresses
from dynatree.serving.channel import Connector
from tests.common.test_wire import INFO

DRAFT = replace(INFO, name="draft", fingerprint="")


class FakeService:
    """A verify service without a network: whether it serves, and its model."""

    def __init__(self, info: ModelInfo = INFO, serves: bool | None = True) -> None:
        self.info = info
        self.serves = serves
        self.changed = asyncio.Event()

    def set(self, serves: bool | None) -> None:
        """Change the state, where None means that the connection breaks, and notify the watchers."""
        self.serves = serves
        self.changed.set()


class FakeClient:
    """Takes the place of `VerifyClient` in a `Replica`."""

    services: ClassVar[dict[str, FakeService]] = {}

    def __init__(self, address: str, connector: Connector, server_name: str | None = None) -> None:
        self.address = address
        self.server_name = server_name

    async def model_info(self, timeout: float) -> ModelInfo:
        return self.services[self.address].info

    async def serving(self) -> AsyncGenerator[bool]:
        service = self.services.get(self.address)
        if service is None:
            raise PeerUnavailableError("nobody is there")
        while True:
            if service.serves is None:
                raise PeerUnavailableError("the connection is broken")
            yield service.serves
            service.changed.clear()
            await service.changed.wait()

    async def answers(self, timeout: float) -> bool:
        return self.services[self.address].serves is not None

    async def cause(self) -> str:
        return "" if self.address in self.services else "Connection refused"

    async def close(self) -> None:
        pass


def run(
    addresses: str, services: Callable[[], dict[str, FakeService]], work: Callable[[Replicas], Awaitable[None]]
) -> None:
    """Call a function with started replicas."""

    async def main() -> None:
        FakeClient.services = services()
        replicas = Replicas(addresses, Connector(), lambda info: Target.of(info, DRAFT, 50254, None))
        try:
            await replicas.start(2.0)
            await work(replicas)
        finally:
            await replicas.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VerifyClient", FakeClient)


async def settled(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def by_address(replicas: Replicas, address: str) -> Replica:
    return next(each for each in replicas.all if each.address == address)


def test_the_one_with_the_fewest_sessions_is_next() -> None:
    async def work(replicas: Replicas) -> None:
        await settled(lambda: all(each.ready for each in replicas.all))
        first, second = replicas.all
        first.sessions = 2
        assert replicas.choose() is second
        second.sessions = 3
        assert replicas.choose() is first
        assert replicas.choose(avoid=[first]) is second
        assert replicas.choose(avoid=[first, second]) is None

    run("a:1,b:1", lambda: {"a:1": FakeService(), "b:1": FakeService()}, work)


def test_one_that_stops_serving_is_left_out_until_it_serves_again() -> None:
    async def work(replicas: Replicas) -> None:
        told: list[bool] = []

        async def tell(ready: bool) -> None:
            told.append(ready)

        replicas.follow(tell)
        FakeClient.services["a:1"].set(False)
        await settled(lambda: not replicas.ready)
        with pytest.raises(PeerUnavailableError, match="no verify service is ready"):
            replicas.first()
        assert replicas.target.info.name == INFO.name, "as it was last"
        FakeClient.services["a:1"].set(True)
        await settled(lambda: replicas.ready)
        await settled(lambda: told[-1])
        assert told[0]
        assert False in told

    run("a:1", lambda: {"a:1": FakeService()}, work)


@pytest.mark.parametrize(("state", "level"), [(False, "INFO"), (None, "WARNING")], ids=["drains", "breaks"])
def test_only_a_service_that_ends_without_notice_is_warned_of(
    caplog: pytest.LogCaptureFixture, state: bool | None, level: str
) -> None:
    async def work(replicas: Replicas) -> None:
        FakeClient.services["a:1"].set(state)
        await settled(lambda: not replicas.ready)

    caplog.set_level("INFO")
    run("a:1", lambda: {"a:1": FakeService()}, work)
    said = [(each.levelname, each.message) for each in caplog.records]
    assert said == [(level, "the verify service at a:1 does not serve")]


def test_a_connection_that_is_too_old_is_no_lost_service(tmp_path: Path) -> None:
    """The server closes it, and the health stream with it."""
    address, watched = f"unix:{tmp_path}/verify.sock", []
    ages = [("grpc.max_connection_age_ms", 100), ("grpc.max_connection_age_grace_ms", 100)]

    class Client(VerifyClient):
        async def model_info(self, timeout: float) -> ModelInfo:
            return INFO

        def serving(self) -> AsyncGenerator[bool]:
            watched.append(self)
            return super().serving()

    async def main() -> None:
        server = grpc.aio.server(options=ages)
        health_pb2_grpc.add_HealthServicer_to_server(aio.HealthServicer(), server)
        server.add_insecure_port(address)
        await server.start()
        states: list[bool] = []
        replica = Replica(
            address,
            lambda: Client(address, Connector()),
            lambda info: Target.of(info, DRAFT, 50254, None),
            lambda: states.append(replica.ready),
        )
        watching = asyncio.ensure_future(replica.watch())
        try:
            await settled(lambda: len(watched) == 3, 60.0)
            assert replica.ready
            assert False not in states
            await server.stop(0)
            await settled(lambda: not replica.ready, 60.0)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await replica.close()
            await server.stop(0)

    asyncio.run(main())


def test_a_completion_goes_on_only_where_its_tokens_are() -> None:
    other = replace(INFO, name="other", fingerprint="ef" * 32)

    async def work(replicas: Replicas) -> None:
        await settled(lambda: all(each.ready for each in replicas.all))
        same, different = by_address(replicas, "a:1"), by_address(replicas, "b:1")
        same.sessions = 5
        assert replicas.choose() is different
        assert replicas.choose(like=INFO) is same
        assert replicas.first(INFO.fingerprint) is same
        with pytest.raises(FailedPreconditionError, match="continues only there"):
            replicas.first("01" * 32)

    run("a:1,b:1", lambda: {"a:1": FakeService(), "b:1": FakeService(other)}, work)


def test_a_target_that_measured_other_costs_is_the_same_target() -> None:
    """Learnt round costs are kept when a service comes back, and dropped when it has other weights."""
    again = replace(INFO, forward_costs=(), device_id="another", context_length=1024)

    async def work(replicas: Replicas) -> None:
        [replica] = replicas.all
        costs = replicas.target.costs
        replica.adopt(again)
        assert replicas.target.costs is costs
        assert replicas.target.info.context_length == 1024
        replica.adopt(replace(again, fingerprint="ef" * 32))
        assert replicas.target.costs is not costs

    run("a:1", lambda: {"a:1": FakeService()}, work)


def test_a_target_that_does_not_fit() -> None:
    mismatched = replace(INFO, name="odd", tokenizer_fingerprint="cd" * 32)

    async def work(replicas: Replicas) -> None:
        await asyncio.sleep(0.05)
        assert replicas.first().address == "a:1"
        FakeClient.services["a:1"].set(False)
        await settled(lambda: not replicas.ready)
        message = (
            r"draft model draft and target model odd .*; some-model, the target of another verify service, has the"
        )
        with pytest.raises(FailedPreconditionError, match=message):
            replicas.first()

    run("a:1,b:1", lambda: {"a:1": FakeService(), "b:1": FakeService(mismatched)}, work)
    with pytest.raises(StartupError, match="different tokenizers"):
        run("b:1", lambda: {"b:1": FakeService(mismatched)}, work)


def test_nobody_is_there() -> None:
    async def work(replicas: Replicas) -> None:
        raise AssertionError("it has not started")

    with pytest.raises(StartupError, match="no verify service answered at a:1,b:1 within 2 s: Connection refused"):
        run("a:1,b:1", dict, work)


def test_a_name_that_stands_for_more_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new service is found, and a removed one is forgotten when it has no session left."""
    monkeypatch.setattr(module, "RESOLVE_SECONDS", 0.02)
    found = ["10.0.0.1"]

    async def resolve(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("verify", 50052)
        if not found:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)

    async def work(replicas: Replicas) -> None:
        found.append("10.0.0.2")
        await settled(lambda: len(replicas.all) == 2 and all(each.ready for each in replicas.all))
        second = by_address(replicas, "10.0.0.2:50052")
        assert second._client.server_name == "verify"  # type: ignore[attr-defined]
        found.remove("10.0.0.1")
        await asyncio.sleep(0.1)
        assert len(replicas.all) == 2, "it serves on, although its name is gone"
        first = by_address(replicas, "10.0.0.1:50052")
        first.sessions = 1
        FakeClient.services["10.0.0.1:50052"].set(False)
        await asyncio.sleep(0.1)
        assert len(replicas.all) == 2, "it has a session"
        first.sessions = 0
        await settled(lambda: len(replicas.all) == 1)
        found.clear()
        await asyncio.sleep(0.1)
        assert len(replicas.all) == 1, "a name server that is down does not mean that the services are"

    addresses = ("10.0.0.1:50052", "10.0.0.2:50052")
    run("dns:///verify:50052", lambda: {address: FakeService() for address in addresses}, work)


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:1", ("a:1",)),
        ("a:1, b:2,a:1", ("a:1", "b:2")),
        ("unix:/x,dns:///verify:50052", ("unix:/x", "dns:///verify:50052")),
        ("[::1]:5", ("[::1]:5",)),
    ],
)
def test_addresses(text: str, addresses: tuple[str, ...]) -> None:
    assert split_addresses(text) == addresses


@pytest.mark.parametrize("text", ["", "a", "a:1,", "dns:///verify", "http://a:1", "a:99999", "dns://8.8.8.8/a:1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        split_addresses(text)


def test_a_service_that_refused_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service may have learnt the draft's new token since; its health does not change with that."""
    monkeypatch.setattr(replica_module, "RETRY_SECONDS", 0.02)
    asked = []

    async def model_info(self: FakeClient, timeout: float) -> ModelInfo:
        asked.append(self.address)
        if self.address == "b:1" and asked.count("b:1") < 3:
            raise FailedPreconditionError("no known token")
        return INFO

    monkeypatch.setattr(FakeClient, "model_info", model_info)

    async def work(replicas: Replicas) -> None:
        await settled(lambda: all(each.ready for each in replicas.all))

    run("a:1,b:1", lambda: {"a:1": FakeService(), "b:1": FakeService()}, work)


def test_one_that_nobody_answers_for_after_new_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "ASKING_SECONDS", 0.05)

    async def work(replicas: Replicas) -> None:
        [only] = replicas.all
        assert only.ready

        async def silent(self: FakeClient) -> AsyncGenerator[bool]:
            await asyncio.Event().wait()
            yield True

        monkeypatch.setattr(FakeClient, "serving", silent)
        only.reconnect()
        await settled(lambda: not only.ready)

    run("a:1", lambda: {"a:1": FakeService()}, work)


def test_a_connection_that_breaks_while_it_is_closed_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call after the health stream then fails, like gRPC's; asyncio logs errors that nobody has retrieved."""
    unseen: list[dict[str, Any]] = []

    async def breaking(_: FakeClient) -> AsyncGenerator[bool]:
        yield True
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise PeerUnavailableError("the verify service is out of reach: CANCELLED") from None

    async def work(replicas: Replicas) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        await replicas.close()
        assert len(asyncio.all_tasks()) == 1, "something goes on after the channels are closed"

    monkeypatch.setattr(FakeClient, "serving", breaking)
    run("a:1", lambda: {"a:1": FakeService()}, work)
    gc.collect()
    assert unseen == []


def test_an_error_of_one_look_up_does_not_end_the_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESOLVE_SECONDS", 0.02)
    errors = [RuntimeError("can't start new thread"), UnicodeError("label empty or too long")]
    found = ["10.0.0.1"]

    async def resolve(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        if len(found) == 2 and errors:
            raise errors.pop()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)

    async def work(replicas: Replicas) -> None:
        found.append("10.0.0.2")
        await settled(lambda: len(replicas.all) == 2)

    addresses = ("10.0.0.1:50052", "10.0.0.2:50052")
    run("dns:///verify:50052", lambda: {address: FakeService() for address in addresses}, work)


def test_a_reconnection_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All services are reached with the new certificates, although no channel could be opened at first."""
    monkeypatch.setattr(module, "RESOLVE_SECONDS", 0.02)
    generations: list[object] = ["old"]
    monkeypatch.setattr(Connector, "generation", property(lambda _: generations[-1]))
    opened: list[str] = []

    class Counted(FakeClient):
        def __init__(self, address: str, connector: Connector, server_name: str | None = None) -> None:
            super().__init__(address, connector, server_name)
            if len(generations) == 2:
                opened.append(address)
                if len(opened) == 1:
                    raise RuntimeError("no channel can be opened")

    monkeypatch.setattr(module, "VerifyClient", Counted)

    async def work(replicas: Replicas) -> None:
        generations.append("new")
        await settled(lambda: opened == ["a:1", "a:1", "b:1"])
        await settled(lambda: all(each.ready for each in replicas.all))

    run("a:1,b:1", lambda: {"a:1": FakeService(), "b:1": FakeService()}, work)


def test_a_follower_is_told_to_the_end_although_the_next_change_has_come() -> None:
    """The event loop alone does not keep a task from the garbage collector."""
    ended: list[bool] = []

    async def tell(ready: bool) -> None:
        try:
            await asyncio.get_running_loop().create_future()  # known to this task only
        finally:
            ended.append(ready)

    async def work(replicas: Replicas) -> None:
        replicas.follow(tell)
        await asyncio.sleep(0)
        replicas.follow(tell)
        await asyncio.sleep(0)
        gc.collect()
        assert ended == []

    run("a:1", lambda: {"a:1": FakeService()}, work)
