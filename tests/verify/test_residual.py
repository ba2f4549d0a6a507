"""Tests residual acceptance alone: committed tokens follow the target's distribution, whatever the draft proposes."""

import math
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from dynatree.common.tree import ROOT, DraftDistribution, TokenTree
from dynatree.verify.residual import accept_residual

DRAWS = 5_000
TARGET = np.array([0.05, 0.3, 0.15, 0.1, 0.4])
DRAFT = {0: 0.5, 2: 0.2, 3: 0.1, 4: 0.2}  # likely where the target is unlikely, and without token 1


def drawn_tree(draws: int, replacement: bool, random: np.random.Generator) -> TokenTree:
    """Return a root whose children are these draws, with one child below the first."""
    tokens, probs = list(DRAFT), list(DRAFT.values())
    drawn = random.choice(tokens, size=draws, replace=replacement, p=probs).tolist()
    children = list(dict.fromkeys(drawn))
    below = random.choice(tokens, p=probs)
    candidates = DraftDistribution(tuple(tokens), tuple(probs))
    places = tuple(children.index(token) for token in drawn) if replacement else ()
    return TokenTree(
        (*children, int(below)),
        (*[ROOT] * len(children), 0),
        candidates=(replace(candidates, draws=places), candidates, *[None] * len(children)),
    )


@pytest.mark.parametrize(("children", "replacement"), [(1, False), (3, False), (2, True), (4, True)])
def test_commits_follow_the_target(children: int, replacement: bool) -> None:
    """Checked are the first token, and the second after each first one, within four standard deviations."""
    random = np.random.default_rng(children)
    turned = TARGET[::-1].copy()  # the target's distribution below the root
    pairs = np.zeros((5, 5))
    for _ in range(DRAWS):
        tree = drawn_tree(children, replacement, random)
        verdict = accept_residual(tree, lambda node: TARGET if node == ROOT else turned, lambda depth: random)
        assert [tree.token_ids[node] for node in verdict.accepted] == list(verdict.token_ids[:-1])
        first, *rest = verdict.token_ids
        second = rest[0] if rest else accept_residual(TokenTree(), lambda node: turned, lambda depth: random).bonus
        pairs[first, second] += 1
    expected = TARGET[:, None] * turned
    deviation = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (abs(pairs / DRAWS - expected) < 4 * deviation).all()


def test_a_good_draft_is_accepted() -> None:
    """If D = R, a child is always accepted; one choice is made at each depth."""
    probs = DraftDistribution((1, 2), (0.25, 0.75))
    tree = TokenTree((1, 2, 2), (ROOT, ROOT, 0), candidates=(probs, probs, None, None))
    target = np.array([0.0, 0.25, 0.75])
    random = Mock(**{"random.return_value": 1 - 1e-9})
    depths: list[int] = []
    verdict = accept_residual(tree, lambda node: target, lambda depth: (depths.append(depth), random)[1])
    assert verdict.accepted == (0, 2)
    assert verdict.token_ids == (1, 2, 2)
    assert depths == [1, 2, 3]


def test_what_the_target_never_says_is_never_committed() -> None:
    """Neither a child of probability 0 nor a draw at the very end of the distribution is committed."""
    tree = TokenTree((0,), (ROOT,), candidates=(DraftDistribution((0,), (1.0,)), None))
    target = np.array([0.0, 0.5, 0.5, 0.0])
    for value, token in ((0.0, 1), (0.49, 1), (0.51, 2), (math.nextafter(1.0, 0.0), 2), (1.0, 2)):
        random = Mock(**{"random.return_value": value})
        assert accept_residual(tree, lambda node: target, lambda depth, random=random: random).token_ids == (token,)


def test_rounded_draft_probabilities_are_normalised() -> None:
    """R(3) = D(3) = 0.5 once D is normalised, so the child is always accepted."""
    tree = TokenTree((3,), (ROOT,), candidates=(DraftDistribution((3, 4), (0.5004, 0.5004)), None))
    target = np.array([0.0, 0.0, 0.0, 0.5, 0.5])
    unlucky = Mock(**{"random.return_value": 1 - 1e-9})
    assert accept_residual(tree, lambda node: target, lambda depth: unlucky).accepted == (0,)


@pytest.mark.parametrize(
    ("draws", "token"), [((), 1), ((0,), 1), ((0, 0), 2)], ids=["without replacement", "one draw", "a repeated draw"]
)
def test_a_repeated_draw_is_rejected_again(draws: tuple[int, ...], token: int) -> None:
    """R = (0.2, 0.6, 0.2) minus D = (0.5, 0.5, 0) leaves (0, 1/3, 2/3) once, and (0, 0, 1) twice."""
    tree = TokenTree((0,), (ROOT,), candidates=(DraftDistribution((0, 1), (0.5, 0.5), draws), None))
    random = Mock(**{"random.side_effect": [*[0.9] * max(len(draws), 1), 0.1]})
    verdict = accept_residual(tree, lambda node: np.array([0.2, 0.6, 0.2]), lambda depth: random)
    assert (verdict.accepted, verdict.token_ids) == ((), (token,))
