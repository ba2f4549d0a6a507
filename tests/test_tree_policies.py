"""The best trees: DySpec's theorem, Sequoia's dynamic programme, and the shapes of the other policies."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.tree import ROOT, Candidates, TokenTree
from dynatree.draft.costs import Costs
from dynatree.draft.growing_tree import GrowingTree, Proposal, TrieNode
from dynatree.draft.ngram_index import NGramIndex
from dynatree.draft.policies import Outcome, create_policy, policies_that_take_draws, policy_names
from dynatree.draft.policies.sequoia import best_shape

VOCABULARY = 3


def grow(policy, model, *, context=(99,), drawn=False, max_nodes=256, max_depth=64):
    """The growing tree of a policy, and what it selects, on a scripted draft: `model(path)` gives probabilities."""
    tree = GrowingTree(TrieNode(context[-1]), context, max_nodes=max_nodes, max_depth=max_depth, drawn=drawn)
    level, forwards = [ROOT], 0
    while level:
        if policy.breadth:
            forwards += 1
            for node in level:
                read(tree, node, model, policy.breadth)
        level = [node for node in policy.grow(tree, level) if tree.depth(node) < max_depth]
    return tree, policy.select(tree), forwards


def read(tree, node, model, breadth):
    path = tuple(above.token for above in reversed(tree.path(node)))
    probabilities = model(path)
    ranked = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    tree.node(node).proposals = tuple(Proposal(token, math.log(probabilities[token])) for token in ranked[:breadth])
    if tree.drawn:
        tree.node(node).candidates = Candidates(tuple(ranked), tuple(probabilities[token] for token in ranked))


def frozen(policy, model, **options):
    tree, selected, _ = grow(policy, model, **options)
    return tree.freeze(selected)


def weight(tree, node):
    return math.exp(sum(tree.log_probs[n] for n in tree.path(node)))


def constant(*probabilities):
    return lambda path: probabilities


@st.composite
def scripted_models(draw):
    """A draft over three tokens whose probabilities depend on the path, by table."""
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
    """The greatest sum of path probabilities of any tree of at most so many nodes and levels, by trying them all."""

    def below(path, room, levels):
        """The best sum of a forest of at most `room` nodes below a path, relative to its probability, by room."""
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
    """DySpec appendix D.1, theorem (B)."""
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
@given(model=scripted_models(), nodes=st.integers(1, 20), drawn=st.booleans())
def test_the_threshold_of_the_last_node_gives_the_same_tree(model, nodes, drawn):
    """DySpec section 4.3 and appendix A.1: Algorithm 2 with the threshold that Algorithm 1 ended at."""
    one = create_policy("dyspec", {"max_nodes": nodes, "breadth": VOCABULARY, "max_depth": 6})
    tree, selected, _ = grow(one, model, drawn=drawn)
    worst = min(tree.value(node) for node in selected)
    other = create_policy("dyspec-threshold", {"threshold": worst, "breadth": VOCABULARY, "max_depth": 6})
    greedy, layered = tree.freeze(selected), frozen(other, model, drawn=drawn)
    assert len(layered) >= len(greedy), "equal values may let in more"
    assert edges(greedy) <= edges(layered)
    if len(layered) > len(greedy):
        again, chosen, _ = grow(other, model, drawn=drawn)
        assert sum(again.value(node) > worst for node in chosen) < nodes


def edges(tree):
    return {tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(len(tree))}


def test_drawn_children_are_judged_before_they_are_known():
    """Algorithm 1: the value of a draw is the chance that verification comes to it."""
    tree = GrowingTree(TrieNode(99), (99,), drawn=True)
    first = tree.add(ROOT, Proposal(1, math.log(0.2)))
    second = tree.add(ROOT, Proposal(0, math.log(0.7)))
    below = tree.add(second, Proposal(2, math.log(0.5)))
    assert [tree.value(n) for n in (first, second, below)] == pytest.approx([1.0, 0.8, 0.7])


@pytest.mark.parametrize("name", policies_that_take_draws())
def test_policies_keep_or_drop_no_draw_for_its_token(name):
    """Whatever the k-th draw below the root is, the decision to have it is the same."""
    sizes = set()
    for order in itertools.permutations(range(3)):
        probabilities = (0.9, 0.06, 0.04)

        def read_in_order(tree, node, breadth, order=order, probabilities=probabilities):
            draws = [Proposal(token, math.log(probabilities[token])) for token in order]
            tree.node(node).proposals = tuple(draws[:breadth])
            tree.node(node).candidates = Candidates((0, 1, 2), probabilities)

        policy = create_policy(name, {})
        tree = GrowingTree(TrieNode(99), (99,), drawn=True)
        if not policy.breadth:
            continue
        read_in_order(tree, ROOT, policy.breadth)
        policy.grow(tree, [ROOT])
        chosen = [node for node in policy.select(tree) if tree.parent(node) == ROOT]
        assert [tree.node(node).token for node in chosen][:1] == [order[0]], "the first draw is always verified"
        sizes.add((order[0], len(chosen) > 1))
    # a second draw may depend on what the first was, and on nothing that came after it
    assert len({first for first, _ in sizes}) == len(sizes)


def brute_force_shape(rates, nodes, depth):
    """The greatest expected length of any tree of ranks, by trying all."""

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
    # what it unfolds is what it counted
    values, levels = {0: 1.0}, {0: 0}
    for place, (width, first) in enumerate(zip(shape.widths, shape.first, strict=True)):
        for rank in range(width):
            values[first + rank] = values[place] * rates[rank]
            levels[first + rank] = levels[place] + 1
    assert sum(values.values()) - 1.0 == pytest.approx(shape.expected)
    assert len(shape.widths) - 1 <= nodes
    assert max(levels.values()) <= depth


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
    short = frozen(create_policy("specinfer", {"k1": 2, "k2": 2, "k3": 0}), constant(0.5, 0.3, 0.2))
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
    # the levels add 1, 1, 1 ... of which the beam of 3 keeps less and less
    assert forwards < 10
    _, _, patient = grow(create_policy("opt-tree", {"delta": 0.0, "max_depth": 10}), constant(0.5, 0.3, 0.2))
    assert patient == 10


def test_the_ngram_index_finds_the_longest_and_latest_match():
    index = NGramIndex(shortest=1, longest=3)
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3]
    assert index.continuations(tokens, depth=3, count=2) == [(3, [4, 9, 2]), (2, [5, 9, 1])]
    assert index.continuations([*tokens, 7], depth=3, count=2) == [], "7 is new"


def test_a_continuation_into_the_end_goes_round():
    index = NGramIndex(shortest=2, longest=4)
    tokens = [8, 1, 2, 3, 1, 2, 3, 1, 2]
    assert index.continuations(tokens, depth=7, count=1) == [(4, [3, 1, 2, 3, 1, 2, 3])]


def test_the_index_grows_with_the_sequence():
    whole, stepwise = NGramIndex(1, 3), NGramIndex(1, 3)
    tokens = [(7 * i * i + i) % 5 for i in range(60)]
    for stop in range(2, len(tokens)):
        assert stepwise.continuations(tokens[:stop], 4, 3) == NGramIndex(1, 3).continuations(tokens[:stop], 4, 3)
    assert whole.continuations(tokens, 4, 3) == stepwise.continuations(tokens, 4, 3)


LOOP = (5, 6, 7, 8) * 5


def test_ngram_needs_no_draft_model_and_is_empty_without_a_match():
    policy = create_policy("ngram", {"depth": 6})
    assert policy.breadth == 0
    tree = frozen(policy, None, context=LOOP)
    assert tree.token_ids == (5, 6, 7, 8, 5, 6)
    assert len(frozen(create_policy("ngram", {}), None, context=(1, 2, 3))) == 0


def test_hybrid_merges_both_sources_under_one_budget():
    policy = create_policy("hybrid", {"max_nodes": 12, "max_depth": 3, "ngram_depth": 8})
    model = constant(*[0.01] * 5, 0.5, 0.25, 0.2)  # token 5 is what the loop goes on with, too
    tree = frozen(policy, model, context=LOOP)
    assert len(tree) == 12
    paths = edges(tree)
    assert (5, 6) in paths, "the loop's continuation"
    assert (6,) in paths, "the model's second guess"
    root_children = [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == ROOT]
    assert len(set(root_children)) == len(root_children)


def outcome_of(tree, accepted, *, verify=0.1, draft=0.004, levels=2):
    return Outcome(tree, accepted, levels=levels, draft_seconds=draft, verify_seconds=verify)


def test_hybrid_lengthens_the_continuations_that_prove_right():
    policy = create_policy("hybrid", {"max_nodes": 12, "max_depth": 3, "ngram_depth": 12})
    model = constant(*[0.1] * 10)
    depths = []
    for _ in range(12):
        tree = frozen(policy, model, context=LOOP)
        right = [LOOP[i % 4] for i in range(12)]
        accepted, node = [], ROOT
        for token in right:
            node = tree.children.get((node, token))
            if node is None:
                break
            accepted.append(node)
        policy.observe(outcome_of(tree, tuple(accepted)))
        depths.append(len(accepted))
    assert depths[-1] > depths[0]
    assert depths[-1] >= 10


def test_costs_are_learnt_from_rounds():
    costs = Costs()
    for nodes in (0, 8, 16, 32, 8, 0, 24, 16) * 8:
        costs.observe(nodes, 0.2 + 0.003 * nodes, 4 if nodes else 0, 0.02)
    assert costs.verify(0) == pytest.approx(0.2, rel=0.05)
    assert costs.slope == pytest.approx(0.003, rel=0.15)
    assert costs.level == pytest.approx(0.005)


def expensive_nodes():
    costs = Costs()
    for nodes in (0, 4, 8, 16) * 16:
        costs.observe(nodes, 0.01 * (1 + nodes), 2 if nodes else 0, 0.002)
    return costs


def free_nodes():
    costs = Costs()
    for nodes in (0, 4, 8, 16, 32, 64) * 16:
        costs.observe(nodes, 0.2, 2 if nodes else 0, 0.0002)
    return costs


def test_throughput_sends_more_where_nodes_are_cheaper():
    model = constant(0.7, 0.2, 0.1)
    few = frozen(create_policy("throughput", {}, expensive_nodes()), model)
    many = frozen(create_policy("throughput", {}, free_nodes()), model)
    assert len(few) < len(many)
    assert len(many) > 20


def test_throughput_gives_up_a_hostile_draft_and_tries_it_again():
    costs = free_nodes()
    for _ in range(200):
        costs.observe(0, 0.01, 0, 0.0)
        costs.observe(8, 0.02, 4, 0.02)  # a level costs half a plain step
    policy = create_policy("throughput", {}, costs)
    drafted = []
    for _ in range(300):
        tree, selected, forwards = grow(policy, constant(0.4, 0.3, 0.3))
        sent = tree.freeze(selected)
        policy.observe(outcome_of(sent, (), verify=0.01 + 0.00125 * len(sent), draft=0.005 * forwards, levels=forwards))
        drafted.append(forwards > 0)
    assert drafted[0]
    late = drafted[100:]
    assert sum(late) <= len(late) / 20, "it pauses for longer each time"
    assert any(late), "and tries again"


@pytest.mark.parametrize("name", policy_names())
@settings(max_examples=15, deadline=None)
@given(model=scripted_models(), max_nodes=st.integers(0, 12), max_depth=st.integers(1, 5))
def test_every_policy_keeps_the_sessions_limits(name, model, max_nodes, max_depth):
    tree = frozen(create_policy(name, {}), model, context=LOOP, max_nodes=max_nodes, max_depth=max_depth)
    assert isinstance(tree, TokenTree)
    assert len(tree) <= max_nodes
    assert tree.depth <= max_depth


def test_contradicting_settings_are_refused():
    with pytest.raises(InvalidArgumentError, match="p1 to p8 sum to"):
        create_policy("sequoia", {"p1": 0.9, "p2": 0.9})
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
