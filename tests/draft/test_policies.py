"""Tests the policies' trees against the papers' rules on a scripted draft, their constants, and their imports."""

import math
import subprocess
import sys
from dataclasses import astuple, fields, replace

import pytest

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.tree import ROOT, TokenTree
from dynatree.draft.control.constants import DEFAULT_CONTROL, ControlSettings
from dynatree.draft.control.history import ProportionalHistory, ReleasedHistory, Steering
from dynatree.draft.control.round_costs import Costs
from dynatree.draft.policies import create_policy, policy_names
from dynatree.draft.policies.growing_tree import GrowingTree, Proposal, TrieNode
from tests.support.growing import LOOP, along, grow, outcome_of


def grown(policy, probabilities):
    """Grow a policy's tree when every node's continuations have the given probabilities, best first."""
    proposals = tuple(Proposal(token, math.log(p)) for token, p in enumerate(probabilities))[: policy.breadth]
    tree = GrowingTree(TrieNode(99), [99])
    level = policy.start(tree)
    while level:
        for node in level:
            tree.node(node).proposals = proposals
        level = policy.grow(tree, level)
    return tree.freeze(policy.select(tree))


def test_autoregressive_drafts_nothing():
    assert len(grown(create_policy("autoregressive", {}), [0.9])) == 0


def test_linear_is_a_chain_of_the_likeliest():
    tree = grown(create_policy("linear", {"depth": 5}), [0.3, 0.2])
    assert tree.token_ids == (0,) * 5
    assert tree.parents == (-1, 0, 1, 2, 3)


def test_fixed_is_a_full_tree_pruned_at_tau():
    tree = grown(create_policy("fixed", {"depth": 3, "breadth": 2, "tau": 0}), [0.5, 0.25])
    assert len(tree) == 2 + 4 + 8
    pruned = grown(create_policy("fixed", {"depth": 3, "breadth": 2, "tau": 0.125}), [0.5, 0.25])
    assert sorted(
        round(math.exp(sum(pruned.log_probs[n] for n in pruned.path(node))), 6) for node in range(len(pruned))
    ) == [
        0.125,
        0.125,
        0.125,
        0.25,
        0.25,
        0.5,
    ]


def test_the_node_budget_is_strict():
    for budget in (1, 5, 6):
        tree = grown(create_policy("fixed", {"depth": 4, "breadth": 2, "tau": 0, "max_nodes": budget}), [0.5, 0.25])
        assert len(tree) == budget
        assert list(tree.depths) == sorted(tree.depths), "breadth first"


@pytest.mark.parametrize(("confidence", "children"), [(0.95, 1), (0.9, 1), (0.89, 2), (0.4, 2), (0.39, 3)])
def test_dynatree_gives_fewer_children_where_it_is_surer(confidence, children):
    settings = {"base_depth": 1, "max_depth": 2, "rho_deep": 0.999, "rho_stop": 0.001, "tau": 0}
    tree = grown(create_policy("dynatree", settings), [confidence, confidence / 20, confidence / 30])
    assert tree.depths.count(1) == children


def test_dynatree_goes_deep_only_along_likely_paths():
    settings = {
        "base_depth": 2,
        "max_depth": 6,
        "rho_stop": 0.01,
        "rho_deep": 0.6,
        "tau": 0,
        "breadth_mid": 1,
        "breadth_max": 1,
    }
    # p(u) at depth d is 0.95^d, which is above 0.6 through depth 9, so the hard limit ends it
    assert grown(create_policy("dynatree", settings), [0.95]).depth == 6
    # 0.85^d is at least 0.6 until depth 3, whose child at depth 4 is the last
    assert grown(create_policy("dynatree", settings), [0.85]).depth == 4
    # below rho_deep at once, so only D_0
    assert grown(create_policy("dynatree", settings), [0.5]).depth == 2


def test_dynatree_stops_early_and_prunes_leaves():
    settings = {"base_depth": 6, "max_depth": 8, "rho_stop": 0.2, "tau": 0.1, "breadth_mid": 2, "breadth_max": 2}
    tree = grown(create_policy("dynatree", settings), [0.5, 0.3])
    paths = [math.exp(sum(tree.log_probs[n] for n in tree.path(node))) for node in range(len(tree))]
    assert min(paths) >= 0.1
    for node, parent in enumerate(tree.parents):
        assert parent == ROOT or paths[parent] >= 0.2, node


START = Steering(base_depth=5, tau_high=0.9, rho_deep=0.5)


def moved(history):
    return history.steering.base_depth, history.steering.tau_high


def test_history_follows_the_update_rule():
    history = ProportionalHistory(START, max_depth=8, window=2, target=0.7, depth_step=1.0, tau_step=0.1)
    history.observe(10, 9)  # mean 0.9
    assert moved(history) == pytest.approx((5.2, 0.88))
    history.observe(10, 1)  # mean 0.5
    assert moved(history) == pytest.approx((5.0, 0.9))
    history.observe(10, 0)  # the first has left the window, so the mean is 0.05
    assert moved(history) == pytest.approx((4.35, 0.965))
    history.observe(0, 0)  # without drafted nodes there is no observation
    assert moved(history) == pytest.approx((4.35, 0.965))
    assert history.steering.rho_deep == 0.5


def test_history_stays_in_range():
    history = ProportionalHistory(START, max_depth=8, window=3, target=0.7, depth_step=4, tau_step=1)
    for _ in range(20):
        history.observe(10, 10)
    assert moved(history) == (7.0, 0.0)
    for _ in range(20):
        history.observe(10, 0)
    assert moved(history) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("acceptances", "expected"),
    [
        ([1.0] * 4, (5, 0.9, 0.5)),  # too few rounds
        ([1.0] * 5, (6, 0.85, 0.45)),
        ([1.0] * 40, (7, 0.5, 0.3)),  # the ends of the ranges
        ([0.25] * 5, (4, 0.95, 0.55)),
        ([0.25] * 40, (2, 0.95, 0.8)),
        ([0.75] * 40, (5, 0.9, 0.5)),  # within the dead band
        ([0.25] * 4 + [1.0] * 4, (2, 0.95, 0.65)),  # means 0.4, 0.5, 0.57, 0.625 for a target of 0.7
        ([0.25] * 4 + [1.0] * 40, (7, 0.5, 0.3)),  # rounds outside the window do not count
    ],
)
def test_the_released_history_steps_outside_a_dead_band(acceptances, expected):
    history = ReleasedHistory(START, max_depth=8, window=10, target=0.7, step=0.05)
    for acceptance in acceptances:
        history.observe(20, round(acceptance * 140))  # at most 7 tokens per round
    history.observe(0, 0)  # a completion without rounds changes nothing
    assert astuple(history.steering) == pytest.approx(expected)


def test_the_released_history_is_kept_with_what_the_sessions_share():
    """Each completion begins with the state that earlier completions of the same settings and service left."""
    costs, settings = Costs(), {"history": "released", "calibrated": 1}
    tree = TokenTree((5,), (ROOT,))

    def completed(costs, settings):
        policy = create_policy("dynatree", settings, costs)
        began = policy.parameters()["base_depth"]
        policy.observe(outcome_of(tree, ()))
        assert policy.parameters()["base_depth"] == began, "nothing changes within a completion"
        policy.end()
        return began

    assert [completed(costs, settings) for _ in range(7)] == [5, 5, 5, 5, 5, 4, 3]
    assert completed(costs, settings | {"breadth_max": 4}) == 5
    assert completed(Costs(), settings) == 5
    for base_depth in range(1, 8):
        for breadth in range(4, 15):
            completed(costs, settings | {"base_depth": base_depth, "breadth_max": breadth})
    assert completed(costs, settings) == 5, "the histories of many settings are not kept for ever"


@pytest.mark.parametrize(("over_nodes", "deeper"), [(0, True), (1, False)])
def test_acceptance_is_a_share_of_the_path(over_nodes, deeper):
    """A round whose longest path was accepted is good, although most nodes of a tree lie off any path."""
    policy = create_policy("dynatree", {"acceptance_over_nodes": over_nodes})
    tree = TokenTree((5, 6, 7, 5, 6, 7), (ROOT, ROOT, ROOT, 0, 0, 0))
    policy.observe(outcome_of(tree, (0, 3)))
    assert (policy.steering.base_depth > 5) == deeper
    assert (policy.steering.tau_high < 0.9) == deeper


def test_sessions_do_not_share_history():
    one, other = create_policy("dynatree", {}), create_policy("dynatree", {})
    tree = TokenTree((5,), (ROOT,))
    one.observe(outcome_of(tree, ()))
    assert one.steering.base_depth < other.steering.base_depth == 5


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("medusa", {}, f"unknown policy 'medusa', expected one of {', '.join(policy_names())}"),
        ("linear", {"width": 2}, "policy linear has no setting width; its settings: depth"),
        ("autoregressive", {"depth": 2}, "its settings: none"),
        ("linear", {"depth": 0}, r"depth is 0, expected a number in \[1, 64\]"),
        ("linear", {"depth": 2.5}, "depth is 2.5, expected a whole number"),
        ("linear", {"depth": math.inf}, "depth is inf, expected a whole number"),
        ("fixed", {"tau": math.nan}, "tau is nan"),
        ("dynatree", {"tau_low": 0.9}, "tau_low is 0.9 and tau_high is 0.9, expected tau_low < tau_high"),
        ("dynatree", {"rho_stop": 0.5}, "expected rho_stop < rho_deep"),
        ("dynatree", {"base_depth": 8}, "expected base_depth < max_depth"),
        ("dynatree", {"breadth_min": 3}, "expected breadth_min <= breadth_mid <= breadth_max"),
        ("dynatree", {"window": 0}, "window is 0"),
    ],
)
def test_bad_settings_are_refused_by_name_value_and_range(name, settings, message):
    with pytest.raises(InvalidArgumentError, match=message):
        create_policy(name, settings)


CONSTANTS = fields(ControlSettings)


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.name)
def test_every_constant_says_what_it_is_its_unit_and_its_source(constant):
    assert set(constant.metadata) == {"what", "unit", "neutral", "source"}
    assert constant.metadata["what"]
    assert constant.metadata["source"]


def trees(name, control):
    """Yield rounds on a looping text, with a draft that is sometimes right and verification costs with a step."""
    costs = Costs(control=control)
    policy = create_policy(name, {}, costs, control=control)
    sent, text = [], list(LOOP)
    for number in range(40):
        tree, selected, forwards = grow(policy, lambda path: (0.5, 0.3, 0.15, 0.05), context=tuple(text))
        sent.append(tree.freeze(selected))
        following = [LOOP[(len(LOOP) + number + depth) % 4] if number % 3 else 0 for depth in range(number % 7)]
        accepted = along(sent[-1], following)
        verify = 0.02 + 0.01 * (len(sent[-1]) // 8)
        policy.observe(outcome_of(sent[-1], accepted, verify=verify, draft=0.001 * forwards, levels=forwards))
        text += [*following[: len(accepted)], 1]
    return sent


@pytest.mark.parametrize("name", ["hybrid", "throughput"])
def test_policies_take_other_constants(name):
    changed = replace(DEFAULT_CONTROL, expand_along=0, prior_others_rate=0.4, prior_best_child=0.1, foresight=(1,))
    assert trees(name, DEFAULT_CONTROL) == trees(name, ControlSettings()) != trees(name, changed)


@pytest.mark.parametrize(
    "constant", [each for each in CONSTANTS if each.metadata["neutral"] is not None], ids=lambda constant: constant.name
)
def test_every_neutral_value_is_one_that_policies_work_with(constant):
    control = replace(DEFAULT_CONTROL, **{constant.name: constant.metadata["neutral"]})
    assert sum(map(len, trees("throughput", control))) > 0


def test_policies_import_neither_a_model_nor_messages():
    """Policies, costs and the tree need neither torch nor protobuf, so `dynatree --help` does not wait for them."""
    script = "import sys, dynatree.draft.policies; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "google.protobuf", "dynatree.v1", "numpy"} & set(loaded)
