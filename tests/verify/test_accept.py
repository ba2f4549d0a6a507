"""Tests acceptance, a pure function, against its definition over every path of random trees."""

from hypothesis import given
from hypothesis import strategies as st

from dynatree.common.messages import FinishReason
from dynatree.common.tree import ROOT, TokenTree
from dynatree.verify.accept import Verdict, accept, cut
from tests.support.trees import random_trees


@given(random_trees(max_nodes=16, tokens=12), st.data())
def test_the_longest_valid_path_is_committed(tree, data):
    choices = data.draw(st.lists(st.integers(2, 11), min_size=len(tree) + 1, max_size=len(tree) + 1))

    def valid(node):  # DynaTree section 3.5: every node on the path is the target's choice after its parent
        return all(tree.token_ids[n] == choices[tree.parents[n] + 1] for n in tree.path(node))

    longest = max((tree.path(n) for n in range(len(tree)) if valid(n)), key=len, default=())
    last = longest[-1] if longest else ROOT
    verdict = accept(tree, choices)
    assert verdict.accepted == longest
    assert verdict.token_ids == (*(tree.token_ids[n] for n in longest), choices[last + 1])


def test_nothing_accepted_commits_one_token():
    assert accept(TokenTree((5,), (-1,)), [6, 7]) == Verdict((), (6,))
    assert accept(TokenTree(), [6]) == Verdict((), (6,))


def test_the_first_end_token_cuts_and_counts():
    verdict = Verdict((0, 1, 2), (5, 0, 6, 7))
    assert cut(verdict, 10, {0}) == Verdict((0, 1), (5, 0), FinishReason.STOP)
    assert cut(verdict, 10, set()) == verdict


def test_the_length_limit_cuts_inside_the_accepted_run():
    verdict = Verdict((0, 1, 2), (5, 0, 6, 7))
    assert cut(verdict, 3, set()) == Verdict((0, 1, 2), (5, 0, 6), FinishReason.LENGTH)
    assert cut(verdict, 4, set()) == Verdict((0, 1, 2), (5, 0, 6, 7), FinishReason.LENGTH)
    assert cut(verdict, 5, set()) == verdict


def test_an_end_token_beyond_the_limit_is_never_seen():
    assert cut(Verdict((0,), (5, 0)), 1, {0}) == Verdict((0,), (5,), FinishReason.LENGTH)
    assert cut(Verdict((0,), (5, 0)), 2, {0}) == Verdict((0,), (5, 0), FinishReason.STOP)


def test_the_bonus_is_the_targets_own_choice():
    verdict = Verdict((0, 1), (5, 6, 7))
    assert verdict.bonus == 7
    assert cut(verdict, 2, set()).bonus is None
    assert accept(TokenTree(), [6]).bonus == 6
