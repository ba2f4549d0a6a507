"""Tests how long a session waits for its verify service, and how it leaves one that stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from dynatree.common.decoding import Decoding
from dynatree.common.errors import PeerUnavailableError, ServiceBusyError, ServiceError
from dynatree.common.messages import Commit, OpenSession, SessionOpened, VerifyTimings
from dynatree.common.model_info import ForwardCost
from dynatree.common.tree import TokenTree
from dynatree.draft.target import replicas as module
from dynatree.draft.target.remote_session import Patience, RemoteSession
from dynatree.draft.target.replicas import Replicas
from tests.common.test_wire import INFO
from tests.draft.test_replicas import DRAFT, FakeClient, FakeService, by_address, run, settled

PROMPT = (1, 2, 3)


class Service(FakeService):
    """A verify service that takes `opening` seconds for a session, unless it is `full`, and `round_` for a tree.

    One that is `lost` counts as ready still, and answers nothing.
    """

    def __init__(
        self,
        announced: float = 0.001,
        opening: float = 0.0,
        round_: float = 0.0,
        full: bool = False,
        lost: bool = False,
    ) -> None:
        super().__init__(replace(INFO, forward_costs=(ForwardCost(1, announced), ForwardCost(64, 2 * announced))))
        self.opening = opening
        self.round_ = round_
        self.full = full
        self.lost = lost
        self.streams: list[Stream] = []


class Stream:
    """Takes the place of `VerifyStream`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._answer: asyncio.Future[None] | None = None
        self.cancelled = False
        service.streams.append(self)

    async def open(self, request: OpenSession) -> SessionOpened:
        await asyncio.sleep(self._service.opening)
        self._check_not_lost()
        if self._service.full:
            raise ServiceBusyError("no room")
        return SessionOpened(self._service.info, 8, commit(request.round, len(request.prompt_ids)))

    async def verify(self, tree: TokenTree, last: Commit) -> Commit:
        self._check_not_lost()
        self._answer = asyncio.ensure_future(asyncio.sleep(self._service.round_))
        await self._answer
        return commit(last.next_round + 1, last.base_length)

    def _check_not_lost(self) -> None:
        if self._service.lost:
            raise PeerUnavailableError("the verify service was lost")

    async def end(self) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled = True
        if self._answer is not None:
            self._answer.cancel()


class SessionClient(FakeClient):
    """A client of a service that answers every health check."""

    def stream(self, timeout: float | None, metadata: object = ()) -> Stream:
        service = self.services[self.address]
        assert isinstance(service, Service)
        return Stream(service)

    async def answers(self, timeout: float) -> bool:
        return True


def commit(next_round: int, length: int) -> Commit:
    """The commit of one token after `length` tokens."""
    return Commit(next_round, length + 1, (7,), (), VerifyTimings(0.0, 0.0, 0.0))


@pytest.fixture(autouse=True)
def _clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VerifyClient", SessionClient)


def with_session(
    services: dict[str, Service],
    work: Callable[[Replicas, RemoteSession, Commit], Awaitable[None]],
    *,
    generated: int = 0,
    timeout: float | None = None,
    window: float = 10.0,
) -> None:
    """Call a function with a session on the first service, and its first commit."""

    async def use(replicas: Replicas) -> None:
        await settled(lambda: all(each.ready for each in replicas.all))
        request = OpenSession(PROMPT, Decoding(max_new_tokens=9), DRAFT, generated=generated)
        patience = Patience(rounds=10.0, least=0.02, most=0.02, stuck=0.1)
        async with RemoteSession(replicas, replicas.all[0], request, timeout, window, patience) as session:
            opened = await session.open(INFO)
            await work(replicas, session, opened.commit)
        assert [each.sessions for each in replicas.all] == [0] * len(services)

    run(",".join(services), lambda: dict(services), use)


@pytest.mark.parametrize(("announced", "usual", "resumes"), [(0.001, 0.001, 1), (0.1, 0.001, 0), (0.001, 0.1, 0)])
def test_a_target_whose_rounds_are_long_is_not_stuck(announced: float, usual: float, resumes: int) -> None:
    """With layers on a slow disk, each round may take longer than an answer to a tree is usually waited for."""
    service = Service(announced, round_=0.4)

    async def work(replicas: Replicas, session: RemoteSession, first: Commit) -> None:
        replicas.all[0].observe(usual)
        await session.verify(TokenTree(), first)
        assert session.resumes == resumes

    with_session({"a:1": service}, work)


def test_a_service_that_stops_is_left_when_another_has_room() -> None:
    stopping, other = Service(), Service(full=True)

    async def work(replicas: Replicas, session: RemoteSession, first: Commit) -> None:
        stopping.set(False)
        await settled(lambda: not by_address(replicas, "a:1").ready)
        second = await session.verify(TokenTree(), first)
        assert (second, session.resumes) == (commit(first.next_round + 1, first.base_length), 0)
        assert [each.sessions for each in replicas.all] == [1, 0]
        other.full = False
        third = await session.verify(TokenTree(), second)
        assert (third.resumed, third.base_length, session.resumes) == (True, second.base_length + 1, 1)
        assert [each.sessions for each in replicas.all] == [0, 1]
        assert [each.cancelled for each in (*stopping.streams, *other.streams)] == [True, True, False]

    with_session({"a:1": stopping, "b:1": other}, work)


def test_a_session_that_ends_while_it_moves_leaves_both_services() -> None:
    stopping, other = Service(), Service(opening=60.0)

    async def work(replicas: Replicas, session: RemoteSession, first: Commit) -> None:
        stopping.set(False)
        await settled(lambda: not by_address(replicas, "a:1").ready)
        moving = asyncio.ensure_future(session.verify(TokenTree(), first))
        await settled(lambda: len(other.streams) == 1)
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        assert [each.sessions for each in replicas.all] == [1, 0]
        assert [each.cancelled for each in (*stopping.streams, *other.streams)] == [False, True]

    with_session({"a:1": stopping, "b:1": other}, work)


# Which services are tried when one refuses a session or is lost


async def nothing(replicas: Replicas, session: RemoteSession, first: Commit) -> None:
    pass


@pytest.mark.parametrize("generated", [0, 2], ids=["new", "received"])
@pytest.mark.parametrize("fault", ["full", "lost"])
def test_a_session_that_is_opened_tries_each_service_once(fault: str, generated: int) -> None:
    faulty, full, free = Service(**{fault: True}), Service(full=True), Service()
    with_session({"a:1": faulty, "b:1": full, "c:1": free}, nothing, generated=generated, window=0.0)
    assert (len(faulty.streams), len(free.streams)) == (1, 1)
    assert len(full.streams) <= 1  # which of the others is first is left to chance


@pytest.mark.parametrize("generated", [0, 2], ids=["new", "received"])
@pytest.mark.parametrize(("fault", "error"), [("full", ServiceBusyError), ("lost", PeerUnavailableError)])
def test_a_session_is_refused_once_each_service_has_refused_it(
    fault: str, error: type[ServiceError], generated: int
) -> None:
    services = [Service(**{fault: True}) for _ in range(3)]
    with pytest.raises(error):
        with_session(dict(zip(("a:1", "b:1", "c:1"), services, strict=True)), nothing, generated=generated, window=0.0)
    assert [len(each.streams) for each in services] == [1, 1, 1]


def test_past_the_deadline_no_other_service_is_tried() -> None:
    full, free = Service(full=True), Service()
    with pytest.raises(ServiceBusyError):
        with_session({"a:1": full, "b:1": free}, nothing, timeout=0.0)
    assert not free.streams


def test_an_open_session_that_is_lost_fails() -> None:
    first, other = Service(), Service()

    async def work(replicas: Replicas, session: RemoteSession, commit: Commit) -> None:
        first.lost = True
        with pytest.raises(PeerUnavailableError):
            await session.verify(TokenTree(), commit)
        assert not other.streams

    with_session({"a:1": first, "b:1": other}, work, window=0.0)
