"""Rounds that take the default policy the same time on every machine, for tests that count what it drafts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from dynatree.draft.policies import Outcome
from dynatree.draft.policies.throughput import Throughput

DRAFT_SECONDS = 1e-3  # of a draft forward
STEP_SECONDS = 2e-2  # of verifying an empty tree
NODE_SECONDS = 1e-4  # of each of its nodes


@contextmanager
def steady_times() -> Iterator[None]:
    """Whatever a round takes, `throughput` learns these times of it."""
    observe = Throughput.observe

    def observe_steadily(policy: Throughput, outcome: Outcome) -> None:
        verify_seconds = STEP_SECONDS + NODE_SECONDS * len(outcome.tree)
        draft_seconds = DRAFT_SECONDS * outcome.levels
        observe(policy, replace(outcome, draft_seconds=draft_seconds, verify_seconds=verify_seconds, waited_seconds=0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Throughput, "observe", observe_steadily)
        yield
