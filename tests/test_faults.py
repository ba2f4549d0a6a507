"""A service or the network fails at one place of a completion, and the completion is what it would have been.

Real processes, real sockets. `python tests/fault_matrix.py` runs every combination; here are some of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults import OPTIONS, Cluster, Fault, combinations, complete, outcome, running_cluster

from dynatree.client import Completion

pytestmark = pytest.mark.long
SOME = [each for number, each in enumerate(combinations()) if number % 23 == 0]


@pytest.fixture(scope="module", name="cluster")
def cluster_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("c")) as cluster:
        yield cluster


@pytest.fixture(scope="module", name="expected")
def expected_fixture(cluster: Cluster) -> dict[str, Completion]:
    """What comes without a fault."""
    return {name: complete(cluster.client, name) for name in OPTIONS}


@pytest.mark.parametrize(("who", "where", "how", "name"), SOME)
def test_a_fault_changes_nothing(
    cluster: Cluster, expected: dict[str, Completion], who: str, where: str, how: str, name: str
) -> None:
    fault = Fault(who, where, how, cluster)
    fault.arm()
    try:
        completion = complete(cluster.client, name)
    finally:
        cluster.restore()
    assert fault.at is not None, "the fault did not happen"
    if name == "residual":  # draws depend on the trees: only their distribution is promised
        assert len(completion.token_ids) == len(expected[name].token_ids)
        return
    assert outcome(completion) == outcome(expected[name])
