"""Tests when the client library sends a request again."""

from __future__ import annotations

import time

import grpc
import pytest

from dynatree.client._attempts import Attempts

UNAVAILABLE, BUSY = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
TOO_LONG = grpc.StatusCode.OUT_OF_RANGE
INTERNAL, MISMATCH = grpc.StatusCode.INTERNAL, grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture(name="clock")
def clock_fixture(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the attempts read."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_request_that_has_begun_is_tried_for_its_window(clock: list[float]) -> None:
    attempts = Attempts(1, connect_seconds=5.0, resume_seconds=30.0)
    assert attempts.received() is None
    pauses = []
    while (pause := attempts.after(UNAVAILABLE)) is not None:
        pauses.append(pause)
        clock[0] += pause + 0.01
    assert 30.0 <= clock[0] - 100.0 < 32.0
    assert pauses[0] < pauses[1] < pauses[2]
    assert max(pauses) == 1.0


def test_a_request_may_be_tried_for_hours(clock: list[float]) -> None:
    attempts = Attempts(1, connect_seconds=1e9, resume_seconds=1e9)
    assert [attempts.after(UNAVAILABLE) for _ in range(2000)][-1] == 1.0


def test_the_window_begins_anew_with_what_is_received(clock: list[float]) -> None:
    attempts = Attempts(1, connect_seconds=5.0, resume_seconds=30.0)
    attempts.received()
    assert attempts.after(UNAVAILABLE) is not None
    clock[0] += 25.0
    assert attempts.received() == 25.0
    assert attempts.received() is None
    clock[0] += 25.0
    assert attempts.after(UNAVAILABLE) is not None


def test_a_request_of_which_nothing_came_is_tried_as_long_as_a_connection(clock: list[float]) -> None:
    attempts = Attempts(1, connect_seconds=5.0, resume_seconds=30.0)
    assert attempts.after(UNAVAILABLE) is not None
    clock[0] += 5.5
    assert attempts.after(UNAVAILABLE) is None


def test_other_servers_are_tried_at_once(clock: list[float]) -> None:
    attempts = Attempts(3, connect_seconds=5.0, resume_seconds=30.0)
    assert [attempts.after(UNAVAILABLE) for _ in range(2)] == [0.0, 0.0]
    assert attempts.after(UNAVAILABLE) == pytest.approx(0.2)


def test_a_server_that_refused_is_not_asked_again(clock: list[float]) -> None:
    """Every server is asked once; then the request is refused."""
    for code in (BUSY, MISMATCH):
        attempts = Attempts(2, connect_seconds=5.0, resume_seconds=30.0)
        assert attempts.after(code, retry_after=0.5) == 0.0
        assert attempts.after(code, retry_after=0.5) is None


def test_a_quotas_refusal_holds_for_every_server(clock: list[float]) -> None:
    """A request without a token fails at once. A completion that has begun waits for its quota at its server."""
    attempts = Attempts(3, connect_seconds=5.0, resume_seconds=30.0)
    assert attempts.after(BUSY, retry_after=0.5, quota=True) is None
    attempts.received()
    assert attempts.after(UNAVAILABLE) == 0.0
    assert attempts.after(BUSY, retry_after=0.5, quota=True) == 0.5
    assert attempts.after(BUSY, retry_after=60.0, quota=True) == 1.0


def test_one_that_has_begun_waits_for_room(clock: list[float]) -> None:
    attempts = Attempts(1, connect_seconds=5.0, resume_seconds=30.0)
    attempts.received()
    assert attempts.after(UNAVAILABLE) is not None
    assert attempts.after(BUSY, retry_after=0.7) == 0.7
    assert attempts.after(BUSY, retry_after=60.0) == 1.0
    assert attempts.after(MISMATCH) is None


def test_one_that_has_begun_waits_for_a_context_that_is_long_enough(clock: list[float]) -> None:
    """A server accepted it, so it fits somewhere; a request without a token may be too long for all servers."""
    attempts = Attempts(2, connect_seconds=5.0, resume_seconds=30.0)
    assert attempts.after(TOO_LONG) is None
    attempts.received()
    assert attempts.after(UNAVAILABLE) is not None
    assert [attempts.after(TOO_LONG) is None for _ in range(4)] == [False] * 4
    clock[0] += 31.0
    assert attempts.after(TOO_LONG) is None


def test_a_failure_is_tried_once_more_over_the_whole_request(clock: list[float]) -> None:
    attempts = Attempts(2, connect_seconds=5.0, resume_seconds=30.0)
    attempts.received()
    assert attempts.after(INTERNAL) is not None
    attempts.received()
    assert attempts.after(INTERNAL) is None


def test_a_failure_of_a_request_of_which_nothing_came_is_its_own(clock: list[float]) -> None:
    assert Attempts(2, connect_seconds=5.0, resume_seconds=30.0).after(INTERNAL) is None


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_the_requests_own_fault(code: grpc.StatusCode, clock: list[float]) -> None:
    attempts = Attempts(2, connect_seconds=5.0, resume_seconds=30.0)
    attempts.received()
    assert attempts.after(code) is None


def test_without_resuming() -> None:
    attempts = Attempts(1, connect_seconds=-1.0, resume_seconds=-1.0)
    assert attempts.after(UNAVAILABLE) is None
    attempts.received()
    assert attempts.after(UNAVAILABLE) is None
