"""Tests the token tree: invalid trees are refused, and its properties are right."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.tree import ROOT, DraftDistribution, TokenTree
from dynatree.common.wire import tree_from_pb, tree_to_pb
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.v1 import tree_pb2
from dynatree.verify.layout import depth_first
from tests.support.trees import random_trees

LIMITS = {"max_nodes": 4, "max_depth": 2, "vocab_size": 10}


@pytest.mark.parametrize(
    ("token_ids", "parents", "log_probs", "message"),
    [
        ((1, 2), (-1,), (), "2 parents"),
        ((1, 2), (-1, 1), (), r"parents\[1\] is 1"),
        ((1, 2), (0, -1), (), r"parents\[0\] is 0"),
        ((1, 2), (1, -1), (), r"parents\[0\] is 1"),
        ((1, 2), (-1, -2), (), r"parents\[1\] is -2"),
        ((1, 1), (-1, -1), (), "repeats token 1"),
        ((1, 2), (-1, 0), (-0.5,), "0 or 2 log_probs"),
        ((1,), (-1,), (0.5,), r"log_probs\[0\] is 0.5"),
        ((1,), (-1,), (float("nan"),), r"log_probs\[0\] is nan"),
        ((1,), (-1,), (float("-inf"),), r"log_probs\[0\] is -inf"),
    ],
)
def test_malformed_trees_are_refused(token_ids, parents, log_probs, message):
    with pytest.raises(InvalidArgumentError, match=message):
        TokenTree(token_ids, parents, log_probs)


def test_a_draft_distribution_names_so_many_tokens():
    uniform = DraftDistribution(tuple(range(256)), (1 / 256,) * 256)
    assert TokenTree((3,), (ROOT,), candidates=(uniform, None)).candidates[0] == uniform
    with pytest.raises(InvalidArgumentError, match=r"257 candidate_ids and 257 candidate_probs, .* 1 to 256"):
        DraftDistribution(tuple(range(257)), (1 / 257,) * 257)
    with pytest.raises(InvalidArgumentError, match="0 candidate_ids"):
        DraftDistribution((), ())
    with pytest.raises(InvalidArgumentError, match="needs 0 or 2 candidate_counts, got 1"):
        TokenTree((3,), (ROOT,), candidates=(uniform,))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (tree_pb2.TokenTree(token_ids=range(5), parents=[-1] * 5), "5 nodes, at most 4"),
        (tree_pb2.TokenTree(token_ids=[1], parents=[-1] * 5), "5 nodes, at most 4"),
        (tree_pb2.TokenTree(token_ids=[1, 2, 3], parents=[-1, 0, 1]), "3 levels deep, at most 2"),
        (tree_pb2.TokenTree(token_ids=[10], parents=[-1]), r"token_ids\[0\] is 10"),
    ],
)
def test_messages_beyond_a_limit_are_refused(message, expected):
    with pytest.raises(InvalidArgumentError, match=expected):
        tree_from_pb(message, **LIMITS)


def test_a_huge_message_is_refused_before_anything_is_built():
    message = tree_pb2.TokenTree(token_ids=[0] * 1_000_000, parents=[-1] * 1_000_000)
    with pytest.raises(InvalidArgumentError, match="at most 4"):
        tree_from_pb(message, **LIMITS)


def test_siblings_of_different_parents_may_share_a_token():
    tree = TokenTree((7, 8, 7), (-1, -1, 1))
    assert tree.children == {(-1, 7): 0, (-1, 8): 1, (1, 7): 2}
    assert tree.path(2) == (1, 2)
    assert tree.depths == (1, 1, 2)


@given(random_trees())
def test_the_mask_shows_each_node_its_path(tree):
    mask = ancestor_mask(tree.parents)
    assert mask.shape == (len(tree) + 1, len(tree) + 1)
    assert torch.equal(mask[0].nonzero().flatten(), torch.tensor([0]))
    for node in range(len(tree)):
        visible = {column - 1 for column in mask[node + 1].nonzero().flatten().tolist()}
        assert visible == {ROOT, *tree.path(node)}
        assert len(visible) == tree.depths[node] + 1


@given(random_trees())
def test_a_tree_survives_the_wire(tree):
    message = tree_to_pb(tree, round_=3, base_length=5)
    parsed = tree_pb2.TokenTree.FromString(message.SerializeToString())
    assert (parsed.round, parsed.base_length) == (3, 5)
    assert tree_from_pb(parsed, max_nodes=64, max_depth=64, vocab_size=2048) == tree


@given(random_trees(), st.booleans(), st.randoms(use_true_random=False))
def test_depth_first_is_the_same_tree_with_likeliest_children_next(tree, rated, generator):
    if rated:
        tree = replace(tree, log_probs=tuple(-generator.random() for _ in range(len(tree))))
    order = depth_first(tree, range(len(tree)))
    laid_out = tree.take(order)
    assert laid_out == TokenTree(laid_out.token_ids, laid_out.parents, laid_out.log_probs), "which validates"
    assert sorted(order) == list(range(len(tree)))
    for place, node in enumerate(order):
        assert laid_out.token_ids[place] == tree.token_ids[node]
        assert tuple(order[above] for above in laid_out.path(place)) == tree.path(node)
        if tree.log_probs:
            assert laid_out.log_probs[place] == tree.log_probs[node]
    for parent in range(-1, len(tree)):
        children = laid_out.children_of(parent)
        assert not children or children[0] == parent + 1
        if tree.log_probs:
            assert list(children) == sorted(children, key=lambda child: -laid_out.log_probs[child])


def test_depth_first_keeps_the_order_of_draws():
    drawn_from = DraftDistribution((7, 8, 9), (0.2, 0.5, 0.3))
    tree = TokenTree(
        (7, 8, 9, 8), (-1, -1, 0, 2), (-1.6, -0.7, -1.2, -0.7), (drawn_from, drawn_from, None, drawn_from, None)
    )
    order = depth_first(tree, range(4))
    laid_out = tree.take(order)
    assert order == (0, 2, 3, 1)
    assert laid_out == TokenTree(
        (7, 9, 8, 8), (-1, 0, 1, -1), (-1.6, -1.2, -0.7, -0.7), (drawn_from, drawn_from, drawn_from, None, None)
    )
