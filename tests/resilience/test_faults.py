"""Tests that a completion is unchanged when a service or the network fails at one place of it.

The tests use real processes and real sockets, and some faults of each kind; `python -m tests.campaigns.fault_matrix`
runs all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynatree.client import Client, Completion, ServerUnavailableError
from tests.support.faults import OPTIONS, PROMPT, Cluster, Fault, combinations, complete, outcome, running_cluster

pytestmark = [pytest.mark.early, pytest.mark.long]
SOME = [each for number, each in enumerate(combinations()) if number % 27 == 0 and each[1] != "queue"]
QUEUED = [each for each in combinations() if each[1] == "queue" and each[3] == "greedy"]


@pytest.fixture(scope="module", name="cluster")
def cluster_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("c")) as cluster:
        yield cluster


@pytest.fixture(scope="module", name="expected")
def expected_fixture(cluster: Cluster) -> dict[str, Completion]:
    """The results without a fault."""
    return {name: complete(cluster.client, name) for name in OPTIONS}


@pytest.fixture(scope="module", name="full_cluster")
def full_cluster_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose verify services take one session each."""
    with running_cluster(
        tmp_path_factory.mktemp("f"), verify_arguments=("--max-sessions", "1", "--idle-timeout", "5")
    ) as cluster:
        yield cluster


@pytest.mark.parametrize(("who", "where", "how", "name"), SOME)
def test_a_fault_changes_nothing(
    cluster: Cluster, expected: dict[str, Completion], who: str, where: str, how: str, name: str
) -> None:
    check(cluster, expected, who, where, how, name)


@pytest.mark.parametrize(("who", "where", "how", "name"), QUEUED)
def test_a_fault_while_a_session_waits(
    full_cluster: Cluster, expected: dict[str, Completion], who: str, where: str, how: str, name: str
) -> None:
    check(full_cluster, expected, who, where, how, name)


def check(cluster: Cluster, expected: dict[str, Completion], who: str, where: str, how: str, name: str) -> None:
    fault = Fault(who, where, how, cluster)
    fault.arm()
    started = time.monotonic()
    try:
        completion = complete(cluster.client, name)
    finally:
        seconds = time.monotonic() - started
        cluster.restore()
    assert fault.at is not None, "the fault did not happen"
    assert seconds < 20.0, "a service that hangs is found by pings within 15 s; a place that it holds is free in 5"
    if name == "residual":  # draws depend on the trees, so only their distribution is fixed
        assert len(completion.token_ids) == len(expected[name].token_ids)
        return
    assert outcome(completion) == outcome(expected[name])


def test_the_only_verify_service_comes_back(tmp_path: Path) -> None:
    with running_cluster(tmp_path, replicas=1) as cluster:
        for name in ("greedy", "gumbel", "stop strings", "log-probabilities"):
            expected = complete(cluster.client, name)
            Fault("verify", "tree sent", "SIGKILL", cluster).arm()
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(complete, cluster.client, name)
                killed = cluster.verifies[0].process
                assert killed is not None
                killed.wait(30)
                cluster.restore()
                completion = running.result(60)
            assert outcome(completion) == outcome(expected)
            assert completion.stats.resumes >= 1


def test_the_only_verify_service_stays_away(tmp_path: Path) -> None:
    """The client has received exactly the committed tokens, and the error gives the reason."""
    with running_cluster(tmp_path, replicas=1, draft_arguments=("--resume-timeout", "1")) as cluster:
        expected = complete(cluster.client, "greedy")
        Fault("verify", "tree sent", "SIGKILL", cluster).arm()
        with Client(cluster.drafts[0].address, resume_timeout=1.0) as client:
            received: list[int] = []
            stream = client.stream(PROMPT, max_new_tokens=24, ignore_eos=True)
            with pytest.raises(ServerUnavailableError, match="verify service"):
                received.extend(token for chunk in stream for token in chunk.token_ids)
        assert 0 < len(received) < 24
        assert tuple(received) == expected.token_ids[: len(received)]
