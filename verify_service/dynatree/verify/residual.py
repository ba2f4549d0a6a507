"""Acceptance by residual sampling: DySpec's Algorithm 3 over children drawn without replacement.

A child drawn from the draft's distribution D is accepted with probability min(1, R(y) / D(y)), where R starts as the
target's distribution and after each rejection becomes the normalised positive part of R - D, while D loses the rejected
token. The committed tokens follow the target's distribution exactly for any D, as long as no child was kept or dropped
because of its token (docs/explanation/exactness.md has the condition and its proof). With a single child per node, this
is speculative sampling (Leviathan et al. 2023).

With children drawn with replacement, this is SpecInfer's multi-step speculative sampling (Miao et al. 2023, Algorithm
2): D does not change, and a token that was drawn twice is tried twice. The second trial always fails, and D is
subtracted from R once more.

DySpec's listing draws the random number for a child's acceptance from N(0, 1), and draws no token below an accepted
leaf. Here the number is uniform, as the acceptance probability requires, and the target's own token follows a leaf.
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
    tree: TokenTree, target: Callable[[int], Distribution | None], random: Callable[[int], np.random.Generator]
) -> Verdict:
    """Walk down from the root while drawn children are accepted, then draw one token from the residual distribution.

    Args:
        tree: The drafted tree, with the distributions from which its children were drawn.
        target: Function from a node (`ROOT` for the root) to the target's distribution `[vocabulary]` after it. None
            leaves a node unverified: its token is then the last one. The root is always verified.
        random: Function from a depth to a fresh random generator; the walk makes one choice at each depth.

    Returns:
        The accepted path, its tokens, and the token drawn after it; `NOT_CHOSEN` if the target's distribution there is
        not finite.
    """
    node, depth = ROOT, 1
    path: list[int] = []
    while (distribution := target(node)) is not None:
        generator = random(depth)
        broken = not math.isfinite(distribution[0])  # one NaN or +inf makes the whole softmax NaN
        accepted, rest = (None, distribution) if broken else _try_children(tree, node, distribution, generator)
        if accepted is None:
            token = NOT_CHOSEN if broken else _draw(rest, generator)
            return Verdict(tuple(path), (*(tree.token_ids[n] for n in path), token))
        path.append(accepted)
        node, depth = accepted, depth + 1
    return Verdict(tuple(path[:-1]), tuple(tree.token_ids[n] for n in path))


def _try_children(
    tree: TokenTree, node: int, residual: Distribution, generator: np.random.Generator
) -> tuple[int | None, Distribution]:
    """The first accepted child, or None, and the residual distribution."""
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
        if rest.sum() > 0.0:  # else both are equal up to rounding, where exact arithmetic never rejects
            residual = rest / rest.sum()
        if not candidates.draws:
            draft[token] = 0.0
            if draft.sum() > 0.0:
                draft /= draft.sum()
    return None, residual


def _draw(distribution: Distribution, generator: np.random.Generator) -> int:
    """One token, drawn by inverting the cumulative distribution."""
    cumulative = distribution.cumsum()
    token = int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))
    return min(token, int(np.flatnonzero(distribution)[-1]))
