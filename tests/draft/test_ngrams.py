"""Tests n-grams: the index, the estimated value of their tokens, and the policies `ngram` and `hybrid`."""

import math

import pytest

from dynatree.common.tree import ROOT
from dynatree.draft.policies import create_policy
from dynatree.draft.policies.growing_tree import GrowingTree, TrieNode
from dynatree.draft.policies.lookup import Lookup, NGramSettings
from dynatree.draft.policies.ngram_index import NGramIndex
from tests.support.growing import LOOP, along, constant, edges, frozen, grow, outcome_of, read


def test_the_ngram_index_finds_the_longest_and_latest_match():
    index = NGramIndex(range(1, 4))
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3]
    assert index.continuations(tokens, depth=3, count=2) == [(3, [4, 9, 2]), (2, [5, 9, 1])]
    assert index.continuations([*tokens, 7], depth=3, count=2) == [], "7 is new"


def test_a_continuation_into_the_end_goes_round():
    index = NGramIndex(range(2, 5))
    tokens = [8, 1, 2, 3, 1, 2, 3, 1, 2]
    assert index.continuations(tokens, depth=7, count=1) == [(4, [3, 1, 2, 3, 1, 2, 3])]


def test_only_the_last_places_of_an_ngram_are_looked_at():
    """Otherwise every round of a long loop would search the whole loop for a second continuation."""
    index = NGramIndex([1])
    tokens = [7, 1, *[7, 2] * 63, 7]
    assert [chain[0] for _, chain in index.continuations(tokens, 1, 2)] == [2, 1]
    assert [chain[0] for _, chain in index.continuations([*tokens, 2, 7], 1, 2)] == [2]


def test_the_index_grows_with_the_sequence():
    whole, stepwise = NGramIndex(range(1, 4)), NGramIndex(range(1, 4))
    tokens = [(7 * i * i + i) % 5 for i in range(60)]
    for stop in range(2, len(tokens)):
        assert stepwise.continuations(tokens[:stop], 4, 3) == NGramIndex(range(1, 4)).continuations(tokens[:stop], 4, 3)
    assert whole.continuations(tokens, 4, 3) == stepwise.continuations(tokens, 4, 3)


def test_ngram_needs_no_draft_model_and_is_empty_without_a_match():
    policy = create_policy("ngram", {"depth": 6})
    assert policy.breadth == 0
    tree = frozen(policy, None, context=LOOP)
    assert tree.token_ids == (5, 6, 7, 8, 5, 6)
    assert len(frozen(create_policy("ngram", {}), None, context=(1, 2, 3))) == 0


def test_hybrid_merges_both_sources_under_one_budget():
    policy = create_policy("hybrid", {"max_nodes": 12, "max_depth": 3, "ngram_depth": 8})
    model = constant(*[0.01] * 5, 0.5, 0.25, 0.2)  # the loop continues with token 5 too
    tree = frozen(policy, model, context=LOOP)
    assert len(tree) == 12
    paths = edges(tree)
    assert (5, 6) in paths, "the loop's continuation"
    assert (6,) in paths, "the model's second guess"
    root_children = [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == ROOT]
    assert len(set(root_children)) == len(root_children)


@pytest.mark.parametrize(("right", "least", "most"), [(True, 11, 12), (False, 0, 3)])
def test_hybrid_lengthens_the_continuations_that_prove_right_and_shortens_the_others(right, least, most):
    policy = create_policy("hybrid", {"max_nodes": 12, "max_depth": 3, "ngram_depth": 12})
    model = constant(0.04, *[0.0001] * 4, 0.24, 0.24, 0.24, 0.24)  # the draft gives nothing to the loop's next token
    depths, context = [], LOOP
    for number in range(12):
        tree = frozen(policy, model, context=context)
        path = along(tree, [LOOP[(len(context) + depth) % 4] for depth in range(20)])
        policy.observe(outcome_of(tree, path if right else ()))
        context += (LOOP * 5)[len(context) % 4 :][: len(path) + 1] if right else (100 + number, *LOOP[:3], *LOOP)
        depths.append(len(path))
    assert 3 < depths[0] < 11
    assert least <= depths[-1] <= most


CONTEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2)


def guesses(lookup, context, **options):
    """The guesses of a lookup: their tokens, parents and log-probabilities."""
    tree = GrowingTree(TrieNode(context[-1]), context)
    lookup.add_to(tree, **options)
    return [(tree.node(node).token, tree.parent(node), tree.log_prob(node)) for node in range(len(tree))]


def test_a_token_goes_by_the_match_before_it():
    lookup = Lookup(NGramSettings(shortest=2, longest=4, depth=6))
    before = lookup.rates()
    tokens, parents, log_probs = zip(*guesses(lookup, CONTEXT), strict=True)
    assert tokens == (3, 4, 5, 6, 7, 8)
    assert parents == (ROOT, 0, 1, 2, 3, 4)
    assert log_probs == tuple(math.log(before[f"rate_{match}"]) for match in (2, 3, 4, 4, 6, 6))
    assert log_probs[0] == math.log(0.5)


@pytest.mark.parametrize("sent", [1, 6])
def test_what_came_is_learnt_from_whether_it_was_sent_or_not(sent):
    """Only likely tokens are sent; rates of sent tokens alone would be too high for the others."""
    policy = create_policy("ngram", {"depth": 6})
    before = policy.parameters()
    tree = frozen(policy, constant(1.0), context=CONTEXT, max_nodes=sent)
    policy.observe(outcome_of(tree, along(tree, (3, 4, 7))))
    frozen(policy, constant(1.0), context=(*CONTEXT, 3, 4, 7))  # right after matches of 2 and 3, wrong after 4
    after = policy.parameters()
    assert {name for name in after if after[name] > before[name]} == {"rate_2", "rate_3"}
    assert {name for name in after if after[name] < before[name]} == {"rate_4"}


def test_another_first_token_than_the_first_continuations_is_worth_what_such_tokens_are():
    lookup = Lookup(NGramSettings(shortest=1, longest=4, depth=3))
    context = (1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3)
    other = guesses(lookup, context)[3:]
    assert [(token, parent) for token, parent, _ in other] == [(5, ROOT), (9, 3), (1, 4)]
    rates = lookup.rates()
    assert other[0][2] == math.log(rates["rate_others"]) < math.log(rates["rate_2"])
    assert other[1][2] == math.log(rates["rate_3"])
    guesses(lookup, (*context, 5))
    assert lookup.rates()["rate_others"] > rates["rate_others"]
    assert lookup.rates()["rate_3"] < rates["rate_3"]


def test_the_models_word_counts_where_it_has_read_what_comes_before():
    values = {}
    for prob in (0.001, 0.4, 0.9):
        policy = create_policy("hybrid", {"max_nodes": 200, "breadth": 2})
        tree, _, _ = grow(policy, constant(0.05, *[0.0001] * 2, prob), context=(1, 2, 3, 3, 3, 8, 8, 1, 2))
        values[prob] = [tree.value(node) for node in range(3)]
    assert values[0.4] == pytest.approx([1 / 2, 1 / 3, 1 / 4]), "what such tokens have as a rule changes nothing"
    assert values[0.001][0] < 0.1
    assert values[0.9][2] > 0.7


def test_the_beginning_of_the_likeliest_continuation_is_read_with_the_root():
    policy = create_policy("hybrid", {})
    tree = GrowingTree(TrieNode(LOOP[-1]), LOOP)
    level = policy.start(tree)
    assert level == [ROOT, 0, 1, 2, 3]
    assert [tree.depth(node) for node in level] == [0, 1, 2, 3, 4]
    for node in level:
        read(tree, node, constant(0.6, 0.3, 0.1), policy.breadth)
    policy.grow(tree, level)
    assert all(tree.has_child(node, 0) for node in level), "one forward gives children to all of them"


@pytest.mark.parametrize(("max_depth", "level"), [(1, [ROOT]), (2, [ROOT, 0]), (3, [ROOT, 0, 1])])
def test_no_node_is_read_that_could_have_no_children(max_depth, level):
    tree = GrowingTree(TrieNode(LOOP[-1]), LOOP, max_depth=max_depth)
    assert create_policy("hybrid", {}).start(tree) == level
    tree = GrowingTree(TrieNode(LOOP[-1]), LOOP)
    assert create_policy("hybrid", {"max_depth": max_depth}).start(tree) == level, "nor any that may have none"


def test_what_was_read_before_changes_no_tree():
    """A trie after re-rooting or drafting ahead may hold more of a continuation than is read with the root."""
    trees, model = [], constant(*[0.02] * 5, 0.2, 0.2, 0.2, 0.2)
    for known in (0, 4, 12):
        policy = create_policy("hybrid", {})
        tree = GrowingTree(TrieNode(LOOP[-1]), LOOP)
        policy.start(tree)
        for node in range(known):
            read(tree, node, model, policy.breadth)
        tree, selected, _ = grow(policy, model, context=LOOP, root=tree.node(ROOT))
        trees.append(tree.freeze(selected))
    assert trees[0] == trees[1] == trees[2]


class Forcing:
    """A grammar that always allows only the token 7."""

    forced = 7

    def allows(self, token):
        return token == 7

    def after(self, token):
        return self if token == 7 else None


def test_forced_tokens_end_at_the_largest_tree_that_is_sent():
    tree = GrowingTree(TrieNode(3, grammar=Forcing()), (1, 2, 3), max_nodes=5, max_depth=40)
    Lookup(NGramSettings()).add_to(tree)
    assert [tree.node(node).token for node in range(len(tree))] == [7] * 5
    assert [tree.log_prob(node) for node in range(len(tree))] == [0.0] * 5
