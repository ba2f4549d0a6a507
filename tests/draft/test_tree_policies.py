"""Tests the best trees: DySpec's theorem, Sequoia's dynamic programming, and the shapes of other policies."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.model_info import ForwardCost
from dynatree.common.tree import ROOT, DraftDistribution, TokenTree
from dynatree.draft.control.round_costs import Costs
from dynatree.draft.control.verify_cost import largest_tree
from dynatree.draft.policies import create_policy, policy_names, residual_policies
from dynatree.draft.policies.growing_tree import GrowingTree, Proposal, TrieNode
from dynatree.draft.policies.papers.sequoia import best_shape, fastest_shape
from tests.support.growing import LOOP, along, constant, edges, frozen, grow, outcome_of

VOCABULARY = 3


def weight(tree, node):
    return math.exp(sum(tree.log_probs[n] for n in tree.path(node)))


@st.composite
def scripted_models(draw):
    """A draft over three tokens whose probabilities depend on the path, from a table."""
    number = st.integers(1, 50)
    table = draw(st.lists(st.tuples(number, number, number), min_size=13, max_size=13))

    def model(path):
        place = 0
        for token in path:
            place = place * VOCABULARY + token + 1
        row = table[place % len(table)]
        return tuple(value / sum(row) for value in row)

    return model


def best_expected_length(model, nodes, depth):
    """Return the largest sum of path probabilities of trees within `nodes` and `depth`, by brute force."""

    def below(path, room, levels):
        """Return, for each size up to `room`, the best relative sum of a forest of `levels` levels below a path."""
        best = [0.0] * (room + 1)
        if levels == 0:
            return best
        for token in range(VOCABULARY):
            probability = model(path)[token]
            child = below((*path, token), room - 1, levels - 1) if room else []
            best = [
                max(
                    [best[total]]
                    + [best[total - size] + probability * (1 + child[size - 1]) for size in range(1, total + 1)]
                )
                for total in range(room + 1)
            ]
        return best

    return below((), nodes, depth)[nodes]


@settings(max_examples=60, deadline=None)
@given(model=scripted_models(), nodes=st.integers(1, 6))
def test_dyspec_gives_the_tree_of_greatest_expected_accepted_length(model, nodes):
    """Theorem (B) of DySpec's appendix D.1."""
    policy = create_policy("dyspec", {"max_nodes": nodes, "breadth": VOCABULARY, "max_depth": 4})
    tree = frozen(policy, model)
    assert len(tree) == nodes
    expected = sum(weight(tree, node) for node in range(len(tree)))
    assert expected == pytest.approx(best_expected_length(model, nodes, 4))


@settings(max_examples=60, deadline=None)
@given(model=scripted_models(), nodes=st.integers(1, 20))
def test_dyspec_needs_no_more_forwards_than_levels_and_equals_the_heap(model, nodes):
    policy = create_policy("dyspec", {"max_nodes": nodes, "breadth": VOCABULARY, "max_depth": 6})
    tree, selected, forwards = grow(policy, model)
    assert forwards <= 6
    sent = tree.freeze(selected)
    paths = {tuple(sent.token_ids[n] for n in sent.path(node)): weight(sent, node) for node in range(len(sent))}
    # Algorithm 1, one node at a time
    heap = {(token,): p for token, p in enumerate(model(()))}
    taken = {}
    while len(taken) < nodes:
        best = max(heap, key=heap.get)
        taken[best] = heap.pop(best)
        if len(best) < 6:
            heap |= {(*best, token): taken[best] * p for token, p in enumerate(model(best))}
    assert sorted(paths.values()) == pytest.approx(sorted(taken.values()))


@settings(max_examples=60, deadline=None)
@given(model=scripted_models(), nodes=st.integers(1, 20), sampled=st.booleans())
def test_the_threshold_of_the_last_node_gives_the_same_tree(model, nodes, sampled):
    """Algorithm 2 with Algorithm 1's last threshold gives the same tree (DySpec, section 4.3 and appendix A.1)."""
    one = create_policy("dyspec", {"max_nodes": nodes, "breadth": VOCABULARY, "max_depth": 6})
    tree, selected, _ = grow(one, model, sampled=sampled)
    worst = min(tree.value(node) for node in selected)
    other = create_policy("dyspec-threshold", {"threshold": worst, "breadth": VOCABULARY, "max_depth": 6})
    greedy, layered = tree.freeze(selected), frozen(other, model, sampled=sampled)
    assert len(layered) >= len(greedy), "equal values may let in more"
    assert edges(greedy) <= edges(layered)
    if len(layered) > len(greedy):
        again, chosen, _ = grow(other, model, sampled=sampled)
        assert sum(again.value(node) > worst for node in chosen) < nodes


@pytest.mark.parametrize(
    ("name", "settings_"),
    [("dyspec", {"max_nodes": 2, "max_depth": 2}), ("dyspec-threshold", {"threshold": 0.46, "max_depth": 2})],
)
def test_a_worse_proposal_does_not_hide_a_better_one_behind_it(name, settings_):
    """With independent noise, the draft ranks proposals by the noise, so their probabilities are in no order."""
    policy = create_policy(name, settings_)
    tree = GrowingTree(TrieNode(99), (99,), max_depth=2)
    level = policy.start(tree)
    for probabilities in ((0.45, 0.5), (0.02, 0.97)):
        for node in level:
            tree.node(node).proposals = tuple(Proposal(token, math.log(p)) for token, p in enumerate(probabilities))
        level = policy.grow(tree, level)
    tokens = [[above.token for above in reversed(tree.path(node))] for node in policy.select(tree)]
    assert tokens == [[1], [1, 1]]


def test_drawn_children_are_judged_before_they_are_known():
    """In Algorithm 1, the value of a draw is the chance that verification reaches it."""
    tree = GrowingTree(TrieNode(99), (99,), sampled=True)
    first = tree.add(ROOT, Proposal(1, math.log(0.2)))
    second = tree.add(ROOT, Proposal(0, math.log(0.7)))
    below = tree.add(second, Proposal(2, math.log(0.5)))
    assert [tree.value(n) for n in (first, second, below)] == pytest.approx([1.0, 0.8, 0.7])


CALIBRATED = ("dynatree", "dyspec", "dyspec-threshold", "fixed", "hybrid", "opt-tree")


def surprising_costs():
    """Costs of a service that has learnt that likely draws are seldom accepted, and unlikely ones often."""
    costs = Costs()
    for _ in range(200):
        for calibration in (costs.track_record.calibration, costs.track_record.residual_calibration):
            calibration.observe(math.log(0.9), False)
            calibration.observe(math.log(0.06), True)
            calibration.observe(math.log(0.04), True)
    return costs


@pytest.mark.parametrize(
    ("name", "settings_"),
    [(name, {}) for name in residual_policies()]
    + [(name, {"calibrated": 1}) for name in residual_policies() if name in CALIBRATED],
)
def test_policies_keep_or_drop_no_draw_for_its_token(name, settings_):
    """Whatever the k-th draw below the root is, the decision to keep it is the same."""
    sizes = set()
    for order in itertools.permutations(range(3)):
        probabilities = (0.9, 0.06, 0.04)

        def read_in_order(tree, node, breadth, order=order, probabilities=probabilities):
            draws = [Proposal(token, math.log(probabilities[token])) for token in order]
            tree.node(node).proposals = tuple(draws[:breadth])
            tree.node(node).candidates = DraftDistribution((0, 1, 2), probabilities)

        policy = create_policy(name, settings_, surprising_costs())
        tree = GrowingTree(TrieNode(99), (99,), sampled=True)
        if not policy.breadth:
            continue
        level = policy.start(tree)
        read_in_order(tree, ROOT, policy.breadth)
        policy.grow(tree, level)
        chosen = [node for node in policy.select(tree) if tree.parent(node) == ROOT]
        assert [tree.node(node).token for node in chosen][:1] == [order[0]], "the first draw is always verified"
        sizes.add((order[0], len(chosen) > 1))
    # a second draw may depend on the first draw, but on no later one
    assert len({first for first, _ in sizes}) == len(sizes)


@settings(max_examples=40, deadline=None)
@given(model=scripted_models(), nodes=st.integers(1, 12), seed=st.integers(0, 99))
def test_calibrated_draws_are_chosen_before_they_are_known(model, nodes, seed):
    """Whether a node's second draw is sent, anywhere in the tree, does not depend on its token."""
    costs, generator = Costs(), random.Random(seed)
    for _ in range(300):
        costs.track_record.residual_calibration.observe(math.log(generator.random()), generator.random() < 0.5)
    settings_ = {"max_nodes": nodes, "breadth": 3, "max_depth": 3, "calibrated": 1}
    policy = create_policy("dyspec", settings_, costs)

    def tree_of(swapped):
        tree = GrowingTree(TrieNode(99), (99,), sampled=True)
        level = policy.start(tree)
        while level:
            for node in level:
                path = path_of(tree, node)
                order = sorted(range(VOCABULARY), key=lambda token: hash((seed, path, token)))
                if path == swapped:  # the same first draw, and the others exchanged
                    order = [order[0], *order[:0:-1]]
                tree.node(node).proposals = tuple(Proposal(token, math.log(model(path)[token])) for token in order)
                tree.node(node).candidates = DraftDistribution(tuple(range(VOCABULARY)), model(path))
            level = policy.grow(tree, level)
        return tree, policy.select(tree)

    def path_of(tree, node):
        return tuple(above.token for above in reversed(tree.path(node)))

    def draws_sent(tree, selected, path):
        return sum(path_of(tree, node)[:-1] == path for node in selected)

    tree, selected = tree_of(None)
    for path in {(), *(path_of(tree, node) for node in selected)}:
        # a third draw may depend on the second, which differs here
        assert min(draws_sent(*tree_of(path), path), 2) == min(draws_sent(tree, selected, path), 2)


def brute_force_shape(rates, nodes, depth):
    """Return the largest expected length of any tree of ranks, by brute force."""

    def forests(rank, room, levels):
        yield 0.0
        if rank == len(rates) or room == 0 or levels == 0:
            return
        for inside in range(room):
            for below in trees(inside, levels - 1):
                for rest in forests(rank + 1, room - 1 - inside, levels):
                    yield rates[rank] * (1 + below) + rest

    def trees(room, levels):
        return forests(0, room, levels)

    return max(forests(0, nodes, depth))


@settings(max_examples=40, deadline=None)
@given(rates=st.lists(st.integers(0, 20), min_size=3, max_size=3), nodes=st.integers(1, 6), depth=st.integers(1, 4))
def test_sequoias_programme_matches_brute_force(rates, nodes, depth):
    rates = tuple(rate / 60 for rate in rates)
    shape = best_shape(rates, nodes, depth)
    assert shape.expected == pytest.approx(brute_force_shape(rates, nodes, depth))
    # the tree has the counted shape
    values, levels = {0: 1.0}, {0: 0}
    for place, (width, first) in enumerate(zip(shape.widths, shape.first, strict=True)):
        for rank in range(width):
            values[first + rank] = values[place] * rates[rank]
            levels[first + rank] = levels[place] + 1
    assert sum(values.values()) - 1.0 == pytest.approx(shape.expected)
    assert len(shape.widths) - 1 <= nodes
    assert max(levels.values()) <= depth


class Linear:
    """Known costs of a verification and of a draft forward pass, in plain steps."""

    def __init__(self, row, draft_forward):
        self.draft_forward_seconds = draft_forward
        self._row = row

    def verify(self, nodes):
        return 1.0 + self._row * largest_tree(nodes)


@settings(max_examples=25, deadline=None)
@given(
    rates=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    row=st.sampled_from([0.0, 0.02, 0.2, 2.0]),
    draft_forward=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_sequoia_takes_the_shape_of_the_most_tokens_a_second(rates, row, draft_forward):
    rates = tuple(rate / 60 for rate in rates)
    costs, nodes, depth = Linear(row, draft_forward), 6, 3
    shape = fastest_shape(rates, nodes, depth, costs)

    def rate(expected, size, levels):
        return (1 + expected) / (costs.verify(size) + levels * draft_forward)

    best = max(rate(brute_force_shape(rates, n, d), n, d) for n in range(1, nodes + 1) for d in range(1, depth + 1))
    size = max(len(shape.widths) - 1, 1)
    assert rate(shape.expected, size, max(shape.depth, 1)) == pytest.approx(best)


def test_sequoia_learns_the_costs_that_choose_its_shape():
    """If the start measured free rows, the largest tree is best; once rounds have proved expensive, a small one is."""
    costs = Costs([ForwardCost(1, 0.1), ForwardCost(256, 0.1)], [ForwardCost(1, 0.0001)])

    def sent():
        policy = create_policy("sequoia", {"max_nodes": 0}, costs)
        tree = frozen(policy, constant(*[0.1] * 8), max_nodes=255)
        assert policy.parameters() == {"nodes": len(tree), "depth": tree.depth}
        return policy, tree

    policy, largest = sent()
    assert len(largest) == 255
    for _ in range(10):
        policy.observe(outcome_of(largest, (0,), verify=3.0, draft=0.0002))
        policy.observe(outcome_of(TokenTree(), (), verify=0.1, draft=0.0, levels=0))
    assert len(sent()[1]) < 255


def test_sequoia_sends_its_shape_whatever_the_draft_says():
    settings_ = {"max_nodes": 12, "max_depth": 4}
    shapes = set()
    for model in (constant(0.9, 0.05, 0.05), constant(0.34, 0.33, 0.33)):
        tree = frozen(create_policy("sequoia", settings_), model)
        shapes.add(tree.parents)
    assert len(shapes) == 1
    assert len(shapes.pop()) == 12


def test_specinfer_follows_its_configuration():
    tree = frozen(create_policy("specinfer", {}), constant(0.5, 0.3, 0.2))
    assert [tree.depths.count(d) for d in range(1, 10)] == [1, 1, 3, 3, 3, 3, 3, 3, 0]
    short = frozen(create_policy("specinfer", {"widths": (2, 2)}), constant(0.5, 0.3, 0.2))
    assert [short.depths.count(d) for d in range(1, 4)] == [2, 4, 0]


def test_opt_tree_expands_a_beam_and_sends_the_best_of_all_levels():
    policy = create_policy("opt-tree", {"max_nodes": 4, "width": 2, "max_depth": 3, "delta": 0.0})
    tree, selected, forwards = grow(policy, constant(0.6, 0.3, 0.1))
    assert forwards == 3
    sent = tree.freeze(selected)
    paths = sorted((round(weight(sent, node), 3) for node in range(len(sent))), reverse=True)
    assert paths == [0.6, 0.36, 0.3, 0.216]


def test_opt_tree_ends_when_a_level_adds_too_little():
    policy = create_policy("opt-tree", {"max_nodes": 50, "width": 3, "max_depth": 10, "delta": 0.3})
    _, _, forwards = grow(policy, constant(0.5, 0.3, 0.2))
    # the levels add 1, 1, 1, ..., of which a beam of 3 keeps less and less
    assert forwards < 10
    _, _, patient = grow(create_policy("opt-tree", {"delta": 0.0, "max_depth": 10}), constant(0.5, 0.3, 0.2))
    assert patient == 10


@pytest.mark.parametrize("name", policy_names())
@settings(max_examples=15, deadline=None)
@given(model=scripted_models(), max_nodes=st.integers(0, 12), max_depth=st.integers(1, 5))
def test_every_policy_keeps_the_sessions_limits(name, model, max_nodes, max_depth):
    tree = frozen(create_policy(name, {}), model, context=LOOP, max_nodes=max_nodes, max_depth=max_depth)
    assert isinstance(tree, TokenTree)
    assert len(tree) <= max_nodes
    assert tree.depth <= max_depth


def test_contradicting_settings_are_refused():
    with pytest.raises(InvalidArgumentError, match="rates sum to"):
        create_policy("sequoia", {"rates": [0.9, 0.9]})
    with pytest.raises(InvalidArgumentError, match="shortest is 5 and longest is 4"):
        create_policy("ngram", {"shortest": 5})
    with pytest.raises(InvalidArgumentError, match=r"dynamic_breadth is 2, expected 0 \(off\) or 1 \(on\)"):
        create_policy("dynatree", {"dynamic_breadth": 2})


def test_dynatrees_components_switch_off():
    model = constant(0.5, 0.3, 0.2)
    off = {"dynamic_breadth": 0, "dynamic_depth": 0, "history": 0, "breadth_mid": 2, "base_depth": 5, "tau": 0.0}
    plain = create_policy("dynatree", off)
    fixed = create_policy("fixed", {"depth": 5, "breadth": 2, "tau": 0.0})
    assert frozen(plain, model) == frozen(fixed, model)
    for _ in range(20):
        plain.observe(outcome_of(frozen(plain, model), ()))
    assert frozen(plain, model) == frozen(fixed, model), "history is off"


@pytest.mark.parametrize(
    ("name", "sampled"),
    [(name, sampled) for name in CALIBRATED for sampled in (False, True) if not sampled or name in residual_policies()],
)
def test_calibrated_policies_go_by_what_the_drafts_word_proved_to_be_worth(name, sampled):
    """The draft says 0.45 and is right most of the time, so the calibrated tree is deeper, also in the next session."""
    settings_ = {"max_nodes": 24, "calibrated": 1}
    costs, model = Costs(), constant(0.45, 0.3, 0.25)
    policy = create_policy(name, settings_, costs)
    first = frozen(policy, model, sampled=sampled).depth
    for number in range(60):
        tree = frozen(policy, model, sampled=sampled)
        policy.observe(outcome_of(tree, along(tree, [0] * (number % 12))))
    assert frozen(policy, model, sampled=sampled).depth > first
    assert frozen(create_policy(name, settings_, costs), model, sampled=sampled).depth > first
    plain = {key: value for key, value in settings_.items() if key != "calibrated"}
    assert frozen(create_policy(name, plain, costs), model, sampled=sampled).depth == first
    kinds = (costs.track_record.calibration, costs.track_record.residual_calibration)
    untouched, learnt = kinds if sampled else kinds[::-1]
    assert untouched.log_prob(math.log(0.45)) == pytest.approx(math.log(0.45)), "draws have a calibration of their own"
    assert learnt.log_prob(math.log(0.45)) > math.log(0.6)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_node_that_was_not_verified_is_judged_by_the_targets_next_token(sampled):
    """Under load the verify service removes nodes, but whether they were right is known.

    A draw that the target refused may return as its own choice, which does not make it accepted.
    """
    costs, model = Costs(), constant(0.45, 0.3, 0.25)
    policy = create_policy("fixed", {"depth": 2, "breadth": 1, "calibrated": 1}, costs)
    for _ in range(60):
        tree = frozen(policy, model, sampled=sampled)
        assert tree.token_ids[0] == 0
        policy.observe(replace(outcome_of(tree, ()), next_token=0))
    kinds = (costs.track_record.calibration, costs.track_record.residual_calibration)
    learnt = math.exp(kinds[sampled].log_prob(math.log(0.45)))
    assert learnt < 0.3 if sampled else learnt > 0.6


@pytest.mark.parametrize("name", sorted(set(policy_names()) - set(CALIBRATED)))
def test_other_policies_take_no_calibrated_values(name):
    with pytest.raises(InvalidArgumentError, match=f"policy {name} has no setting calibrated"):
        create_policy(name, {"calibrated": 1})


def test_a_tree_with_other_probabilities() -> None:
    """A node's path probability is its parent's new one times its own, and it stays below its parent's."""
    tree = GrowingTree(TrieNode(99), (99,))
    top = tree.add(ROOT, Proposal(5, math.log(0.5)))
    below = tree.add(top, Proposal(6, math.log(0.25)))
    beside = tree.add(ROOT, Proposal(7, math.log(0.125)))
    tree.revalue([Proposal(5, math.log(0.8), -3.0), Proposal(6, math.log(0.4)), Proposal(7, math.log(0.1))])
    assert [tree.log_prob(node) for node in (top, below, beside)] == [math.log(p) for p in (0.8, 0.4, 0.1)]
    assert [tree.path_log_prob(node) for node in (top, below, beside)] == pytest.approx(
        [math.log(p) for p in (0.8, 0.32, 0.1)]
    )
    assert [tree.value(node) for node in (top, below, beside)] == pytest.approx([0.8, 0.32, 0.1])
    assert [tree.draft_log_prob(node) for node in (top, below, beside)] == [-3.0, None, None]


@pytest.mark.parametrize("sampled", [False, True])
def test_sequoias_shape_is_the_best_within_the_services_limit(sampled):
    model = constant(0.4, 0.3, 0.2, 0.1)
    trees = [
        frozen(create_policy("sequoia", {"max_nodes": nodes}), model, max_nodes=20, sampled=sampled)
        for nodes in (20, 500)
    ]
    assert trees[0] == trees[1]
    assert len(trees[0]) == 20
