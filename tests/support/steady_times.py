"""Round times that are the same on every machine, for tests that count the nodes that the default policy drafts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.tree import TokenTree
from dynatree.draft.policies import Outcome
from dynatree.draft.policies.throughput import Throughput


@dataclass(frozen=True)
class SteadyOutcome:
    """The outcome of a round, with times that depend only on the tree's nodes and on the draft forward passes."""

    tree: TokenTree
    accepted: Sequence[int]
    next_token: int | None
    draft_forwards: int
    pass_statistics: PassStatistics
    waited_seconds = 0.0
    others_draft_seconds = 0.0

    @property
    def draft_seconds(self) -> float:
        return 1e-3 * self.draft_forwards

    @property
    def verify_seconds(self) -> float:
        return 2e-2 + 1e-4 * len(self.tree)


@contextmanager
def steady_times() -> Iterator[None]:
    """Make `throughput` observe steady times instead of the real times of rounds."""
    observe = Throughput.observe

    def observe_steadily(policy: Throughput, outcome: Outcome) -> None:
        steady = SteadyOutcome(
            outcome.tree, outcome.accepted, outcome.next_token, outcome.draft_forwards, outcome.pass_statistics
        )
        observe(policy, steady)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Throughput, "observe", observe_steadily)
        yield
