"""Tests the components of a round's time."""

import pytest

from dynatree.common.messages import Commit, VerifyTimings
from dynatree.common.tree import TokenTree
from dynatree.draft.growth.round import Growth, Round


def a_round(*timings, ahead=0.0):
    commit = Commit(1, 5, (7,), (), timings=VerifyTimings(*timings))
    growth = Growth(TokenTree(), 0.3, 0.2, draft_forwards=2, commit_seconds=0.05)
    return Round(growth, commit, exchange_seconds=1.0, ahead_seconds=ahead)


def test_the_exchange_is_work_waiting_and_the_wire():
    done = a_round(0.2, 0.02, 0.01, 0.9)
    assert done.waited_seconds == pytest.approx(0.67)
    assert done.wire_seconds == pytest.approx(0.1)
    assert done.verify_seconds == pytest.approx(0.33)
    assert done.draft_seconds == pytest.approx(0.35)


def test_drafting_ahead_that_went_on_is_waiting_and_no_cost_of_the_tree():
    done = a_round(0.2, 0.02, 0.01, 0.9, ahead=0.4)
    assert done.waited_seconds == pytest.approx(1.07)
    assert done.verify_seconds == pytest.approx(0.33)


def test_a_service_that_names_no_times_waited_for_nothing():
    assert a_round(0.0, 0.0, 0.0, 0.0).waited_seconds == 0.0
