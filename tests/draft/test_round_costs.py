"""Tests what rounds and draft forward passes are expected to cost: `round_costs`, `verify_cost`."""

import math

import pytest

from dynatree.draft.control.round_costs import Costs, RoundCost
from dynatree.draft.control.verify_cost import largest_tree
from dynatree.draft.policies import create_policy
from tests.support.growing import along, constant, grow, measured, outcome_of


def test_costs_are_learnt_for_each_size_that_fills_tiles():
    costs = Costs()
    for nodes, seconds in ((0, 0.2), (12, 0.21), (15, 0.23), (13, 0.22), (16, 0.3), (23, 0.32), (20, 0.31)) * 8:
        costs.observe(RoundCost(nodes, seconds, 4 if nodes else 0, 0.02))
    assert costs.verify(0) == 0.2
    assert costs.verify(12) == costs.verify(15) in (0.21, 0.22)
    assert costs.verify(16) == costs.verify(23) in (0.3, 0.31)
    assert costs.draft_forward_seconds == pytest.approx(0.005)


def test_sizes_never_tried_are_to_the_nearest_tried_as_they_were_at_the_start():
    costs = Costs(
        measured((1, 0.1), (2, 0.1), (4, 0.11), (8, 0.12), (16, 0.2), (32, 0.4), (64, 0.8)), measured((4, 0.003))
    )
    assert [costs.verify(nodes) for nodes in (0, 3, 5, 15, 63)] == pytest.approx([0.1, 0.11, 0.115, 0.2, 0.8])
    assert costs.verify(127) == pytest.approx(1.6), "on the line through the last two"
    assert costs.draft_forward_seconds == pytest.approx(0.003)
    costs.observe(RoundCost(15, 0.3, 2, 0.01))
    assert costs.verify(0) == pytest.approx(0.15), "the machine is slower now"
    assert costs.verify(63) == pytest.approx(1.2)
    assert not costs.plain_is_due
    costs.observe(RoundCost(0, 0.2, 0, 0.0))
    assert costs.verify(1) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("points", "nodes"),
    [
        ([(1, 0.1), (16, 0.11), (64, 0.15), (128, 0.151), (256, 0.4)], 63),
        ([(1, 0.002), (64, 0.002), (65, 0.0021), (256, 0.0025)], 255),
        ([(1, 0.1), (16, 0.2)], 0),
        ([], 0),
    ],
)
def test_nodes_that_are_nearly_free_are_those_within_half_a_plain_step(points, nodes):
    assert Costs(measured(*points)).nodes_within(1.5) == nodes


@pytest.mark.parametrize(("seconds", "limit"), [(0.004, 63), (0.0021, 255)])
def test_a_tree_may_be_as_large_as_rows_are_nearly_free(seconds, limit):
    """On a GPU that verifies 256 rows at little more than the cost of one; otherwise as on a CPU, 63 nodes."""
    costs = Costs(measured((1, 0.002), (64, 0.002), (256, seconds)), measured((4, 1e-6)))
    flat = constant(*[0.25] * 4)
    assert len(grow(create_policy("throughput", {"max_depth": 5}, costs), flat)[1]) == limit
    assert len(grow(create_policy("throughput", {"max_depth": 5, "max_nodes": 9}, costs), flat)[1]) == 9


@pytest.mark.parametrize(
    "points", [[], [(1, 0.1)], [(0, 1.0), (4, 0.0), (8, -1.0), (16, math.inf), (32, math.nan)], [(4, 0.1)] * 2]
)
def test_where_nothing_was_measured_smaller_trees_are_tried_first(points):
    costs = Costs(measured(*points))
    assert costs.verify(1) < 1.2 * costs.verify(0)
    assert costs.verify(15) > 2 * costs.verify(0)


def test_a_forward_that_was_disturbed_at_the_start_is_no_dearer_than_a_larger_one():
    costs = Costs(measured((1, 0.1), (2, 0.9), (4, 0.12), (8, 0.11), (16, 0.2)))
    assert [costs.verify(nodes) for nodes in (0, 1, 3, 7, 15)] == pytest.approx([0.1, 0.11, 0.11, 0.11, 0.2])


def test_before_a_plain_step_was_seen_its_cost_is_estimated_from_a_trees():
    costs = Costs()
    costs.observe(RoundCost(63, 0.4, 2, 0.01))
    assert 0.1 < costs.verify(0) < costs.verify(15) <= 0.4, "a tree costs no more than a larger one"


@pytest.mark.parametrize(("verify", "draft"), [(2.2, 12.0), (2.2, 4.0), (8.0, 8.0)])
def test_the_draft_is_back_soon_after_another_program_had_the_cores(verify, draft):
    """A benchmark lost the draft for the rest of a completion to a program that ran for twenty seconds."""
    costs = Costs(measured((1, 0.2), (2, 0.21), (4, 0.22), (8, 0.4), (16, 0.6)), measured((4, 0.012)))
    policy = create_policy("throughput", {}, costs)
    levels = []
    for number in range(90):
        slower = (verify, draft) if 30 <= number < 60 else (1.0, 1.0)
        tree, selected, forwards = grow(policy, constant(0.7, 0.15, 0.05), context=(1000 + number,))
        sent = tree.freeze(selected)
        accepted = along(sent, [0] * (number % 5))
        seconds = 0.2 + 0.02 * len(sent)
        policy.observe(
            outcome_of(sent, accepted, verify=slower[0] * seconds, draft=slower[1] * 0.012 * forwards, levels=forwards)
        )
        levels.append(forwards)
    usual = sorted(levels[10:30])[10]
    assert usual >= 2
    assert sum(each >= usual - 1 for each in levels[66:]) >= 20


def test_a_load_that_begins_is_not_blamed_on_the_draft():
    costs = Costs()
    for _ in range(8):
        costs.observe(RoundCost(7, 0.2, 0, 0.0))
    for _ in range(8):
        costs.observe(RoundCost(0, 0.1, 0, 0.0))
    for _ in range(8):
        costs.observe(RoundCost(7, 0.5, 2, 0.01))
    assert costs.draft_contention == 0.0


def test_what_a_verification_takes_longer_after_draft_forwards_is_theirs():
    costs = Costs()
    for _ in range(8):
        costs.observe(RoundCost(7, 0.2, 0, 0.0))
    for _ in range(8):
        costs.observe(RoundCost(7, 0.25, 2, 0.01))
    assert costs.verify(7) == pytest.approx(0.2)
    assert costs.draft_contention == pytest.approx(0.05)
    for _ in range(20):
        costs.observe(RoundCost(7, 0.15, 2, 0.01))
    assert costs.verify(7) == 0.15, "without the draft it would take no longer than that"
    assert costs.draft_contention == 0.0


@pytest.mark.parametrize("first", [0.199, 2.0], ids=["none", "a stall"])
def test_the_first_round_after_a_forward_does_not_settle_what_is_taken_longer(first):
    costs = Costs()
    for _ in range(8):
        costs.observe(RoundCost(7, 0.2, 0, 0.0))
    costs.observe(RoundCost(7, first, 2, 0.01))
    for _ in range(8):
        costs.observe(RoundCost(7, 0.25, 2, 0.01))
    assert costs.draft_contention == pytest.approx(0.05)


def test_forwards_that_also_catch_up_bound_what_a_forward_costs():
    costs = Costs()
    costs.observe(RoundCost(7, 0.2, 2, 2.0))  # a stall
    costs.observe(RoundCost(7, 0.2, 1, 0.05, caught_up=False))
    assert costs.draft_forward_seconds == 0.05
    costs.observe(RoundCost(7, 0.2, 1, 0.08, caught_up=False))
    assert costs.draft_forward_seconds == 0.05


def test_a_plain_step_is_due_until_it_was_seen_and_again_after_long():
    costs = Costs()
    assert not costs.plain_is_due, "the first rounds may be trees"
    for _ in range(2):
        costs.observe(RoundCost(15, 1.2, 2, 0.01))
    for _ in range(2):
        assert costs.plain_is_due
        costs.observe(RoundCost(0, 0.3, 0, 0.0))
    assert not costs.plain_is_due
    for _ in range(257):
        costs.observe(RoundCost(15, 1.2, 2, 0.01))
    assert costs.plain_is_due


def test_a_plain_step_costs_no_more_than_any_tree():
    costs = Costs()
    costs.observe(RoundCost(0, 1.9, 0, 0.0))  # a stall
    costs.observe(RoundCost(15, 0.3, 2, 0.01))
    assert costs.verify(0) == 0.3


def test_a_size_that_was_only_verified_after_draft_forwards_costs_what_it_took():
    costs = Costs()
    for _ in range(20):
        costs.observe(RoundCost(7, 0.25, 2, 0.01))
    assert (costs.verify(7), costs.draft_contention) == (pytest.approx(0.25), 0.0)


def test_a_stall_in_the_only_round_of_a_size_does_not_rule_it_out():
    costs = Costs(measured((1, 0.2), (8, 0.21), (16, 0.22), (32, 0.23)))
    for _ in range(8):
        costs.observe(RoundCost(0, 0.2, 0, 0.0))
        costs.observe(RoundCost(7, 0.21, 2, 0.01))
    costs.observe(RoundCost(15, 2.0, 2, 0.01))
    assert costs.verify(15) < 0.23
    for _ in range(3):
        costs.observe(RoundCost(15, 0.5, 2, 0.01))
    assert costs.verify(15) > 0.4, "tried often enough"
    for _ in range(300):
        costs.observe(RoundCost(7, 0.21, 2, 0.01))
    assert costs.verify(15) < 0.23, "worth another trial"


def test_a_stall_hardly_counts_and_a_lasting_change_does():
    costs = Costs()
    for _ in range(20):
        costs.observe(RoundCost(15, 0.2, 2, 0.01))
    costs.observe(RoundCost(15, 20.0, 2, 0.01))
    assert costs.verify(15) == 0.2
    for _ in range(9):
        costs.observe(RoundCost(15, 0.6, 2, 0.01))
    assert costs.verify(15) == 0.6


def test_the_largest_tree_of_a_price_fills_the_tiles():
    nodes = (0, 1, 2, 3, 4, 5, 6, 8, 15, 16, 31, 32, 48, 63, 64, 256)
    assert [largest_tree(each) for each in nodes] == [0, 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63, 63, 127, 511]
