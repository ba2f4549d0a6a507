"""Acceptance by residual sampling: DySpec's Algorithm 3 over children drawn without replacement.

A child drawn from the draft's distribution D is accepted with probability min(1, R(y) / D(y)), where R starts as the
target's distribution and after each rejection becomes the normalised positive part of R - D, while D loses the rejected
token. What is committed follows the target's distribution exactly, whatever D is, as long as no child was kept or left
out for the token that it carries (docs/explanation/exactness.md has the condition and its proof). With a single child a
node this is speculative sampling (Leviathan et al. 2023).

Children drawn with replacement are SpecInfer's multi-step speculative sampling (Miao et al. 2023, Algorithm 2): D stays
as it is, and a token that was drawn twice is tried twice. Its second trial always fails, and R loses D once more.

DySpec's listing draws the number that decides about a child from N(0, 1), and no token below an accepted leaf. The
number is uniform here, as the acceptance probability requires, and a leaf is followed by the target's own token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dynatree.common.sampling import NOT_CHOSEN
from dynatree.common.tree import ROOT, TokenTree
from dynatree.verify.accept import Verdict

Distribution = NDArray[np.float64]


def accept_residual(
    tree: TokenTree, target: Callable[[int], Distribution], random: Callable[[int], np.random.Generator]
) -> Verdict:
    """Walk down from the root while drawn children are accepted, then draw one token from what is left.

    Args:
        tree: The drafted tree, with the distributions that its children were drawn from.
        target: The target's distribution `[vocabulary]` of the token after a node (`ROOT` for the root).
        random: Fresh random numbers for the choice at a depth; the walk makes one choice at each.

    Returns:
        The accepted path, its tokens, and the token drawn after it; `NOT_CHOSEN` where the target's distribution there
        is none.
    """
    node, depth = ROOT, 1
    path: list[int] = []
    while True:
        generator, distribution = random(depth), target(node)
        broken = not math.isfinite(distribution[0])  # a softmax makes of one NaN or infinity nothing but NaN
        accepted, rest = (None, distribution) if broken else _try_children(tree, node, distribution, generator)
        if accepted is None:
            token = NOT_CHOSEN if broken else _draw(rest, generator)
            return Verdict(tuple(path), (*(tree.token_ids[n] for n in path), token))
        path.append(accepted)
        node, depth = accepted, depth + 1


def _try_children(
    tree: TokenTree, node: int, residual: Distribution, generator: np.random.Generator
) -> tuple[int | None, Distribution]:
    """The first child that is accepted, or None and the distribution that remains."""
    children = tree.children_of(node)
    candidates = tree.candidates[node + 1] if children else None
    if candidates is None:
        return None, residual
    ids = np.array(candidates.token_ids)
    draft = np.zeros_like(residual)
    draft[ids] = np.array(candidates.probs) / sum(candidates.probs)
    for place in candidates.draws or range(len(children)):
        child, token = children[place], tree.token_ids[children[place]]
        if generator.random() * draft[token] < residual[token]:
            return child, residual
        rest = np.maximum(residual - draft, 0.0)
        if rest.sum() > 0.0:  # else the two are equal up to rounding, where nothing is ever rejected
            residual = rest / rest.sum()
        if not candidates.draws:
            draft[token] = 0.0
            if draft.sum() > 0.0:
                draft /= draft.sum()
    return None, residual


def _draw(distribution: Distribution, generator: np.random.Generator) -> int:
    """One token by inversion of the cumulative distribution."""
    cumulative = distribution.cumsum()
    token = int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))
    return min(token, int(np.flatnonzero(distribution)[-1]))
