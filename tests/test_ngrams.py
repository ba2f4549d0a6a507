"""N-grams: the index, what their tokens are worth, and the policies `ngram` and `hybrid`."""

import math

import pytest
from growing import LOOP, constant, edges, frozen, outcome_of

from dynatree.common.tree import ROOT
from dynatree.draft.ngram_index import NGramIndex
from dynatree.draft.policies import create_policy
from dynatree.draft.policies.ngram import Lookup, NGramSettings


def test_the_ngram_index_finds_the_longest_and_latest_match():
    index = NGramIndex(shortest=1, longest=3)
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3]
    assert index.continuations(tokens, depth=3, count=2) == [(3, [4, 9, 2]), (2, [5, 9, 1])]
    assert index.continuations([*tokens, 7], depth=3, count=2) == [], "7 is new"


def test_a_continuation_into_the_end_goes_round():
    index = NGramIndex(shortest=2, longest=4)
    tokens = [8, 1, 2, 3, 1, 2, 3, 1, 2]
    assert index.continuations(tokens, depth=7, count=1) == [(4, [3, 1, 2, 3, 1, 2, 3])]


def test_only_the_last_places_of_an_ngram_are_looked_at():
    """Otherwise every round of a long loop would walk through all of it for a second continuation."""
    index = NGramIndex(shortest=1, longest=1)
    tokens = [7, 1, *[7, 2] * 63, 7]
    assert [chain[0] for _, chain in index.continuations(tokens, 1, 2)] == [2, 1]
    assert [chain[0] for _, chain in index.continuations([*tokens, 2, 7], 1, 2)] == [2]


def test_the_index_grows_with_the_sequence():
    whole, stepwise = NGramIndex(1, 3), NGramIndex(1, 3)
    tokens = [(7 * i * i + i) % 5 for i in range(60)]
    for stop in range(2, len(tokens)):
        assert stepwise.continuations(tokens[:stop], 4, 3) == NGramIndex(1, 3).continuations(tokens[:stop], 4, 3)
    assert whole.continuations(tokens, 4, 3) == stepwise.continuations(tokens, 4, 3)


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


def along_the_loop(tree):
    """The nodes of a tree that go on as `LOOP` does."""
    accepted, node = [], ROOT
    while (node := tree.children.get((node, LOOP[len(accepted) % 4]))) is not None:
        accepted.append(node)
    return tuple(accepted)


@pytest.mark.parametrize(("right", "least", "most"), [(True, 11, 12), (False, 0, 3)])
def test_hybrid_lengthens_the_continuations_that_prove_right_and_shortens_the_others(right, least, most):
    policy = create_policy("hybrid", {"max_nodes": 12, "max_depth": 3, "ngram_depth": 12})
    model = constant(0.6, 0.3, 0.1)
    depths = []
    for _ in range(12):
        tree = frozen(policy, model, context=LOOP)
        path = along_the_loop(tree)
        policy.observe(outcome_of(tree, path if right else ()))
        depths.append(len(path))
    assert 3 < depths[0] < 11
    assert least <= depths[-1] <= most


def test_a_token_goes_by_the_match_before_it():
    lookup = Lookup(NGramSettings(shortest=2, longest=4, depth=6))
    context = (1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2)
    (chain,) = lookup.chains(context)
    assert [proposal.token for proposal in chain] == [3, 4, 5, 6, 7, 8]
    assert [proposal.log_prob for proposal in chain] == [math.log(lookup.rate(2 + depth)) for depth in range(6)]
    assert chain[0].log_prob == math.log(0.5)
    before = {match: lookup.rate(match) for match in (1, 2, 3, 4, 6, 9)}
    tree = frozen(create_policy("ngram", {"depth": 6}), constant(1.0), context=context)
    lookup.observe(outcome_of(tree, (0, 1)))  # 3 and 4 were right, after matches of 2 and 3; 5 was wrong, after 4
    assert lookup.rate(2) > before[2]
    assert lookup.rate(3) > before[3]
    assert lookup.rate(4) < before[4]
    assert (lookup.rate(1), lookup.rate(6), lookup.rate(9)) == (before[1], before[6], before[9])


def test_what_a_tree_did_not_carry_says_nothing():
    lookup = Lookup(NGramSettings(depth=6))
    context = (1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2)
    lookup.chains(context)
    before = lookup.rates()
    tree = frozen(create_policy("ngram", {"depth": 6}), constant(1.0), context=context, max_nodes=2)
    lookup.observe(outcome_of(tree, (0, 1)))
    assert [name for name, rate in lookup.rates().items() if rate != before[name]] == ["rate_2", "rate_3"]
