"""Acceptance: pure functions from a tree and the target's choices to the committed tokens.

DynaTree section 3.5. The tree is rooted at the last committed token. So the paper's first condition, that the target
chose the root's token, always holds, and the target's choice at the root replaces the prefix logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from dynatree.common.log_probs import TopLogProbs
from dynatree.common.messages import FinishReason
from dynatree.common.tree import ROOT, TokenTree


@dataclass(frozen=True)
class Verdict:
    """The outcome of one round.

    Attributes:
        accepted: Nodes on the accepted path, from the root down.
        token_ids: Tokens of these nodes and, unless the round was cut short, the target's own choice after the last
            one (the bonus token).
        finish_reason: Set if the session ends with this round.
        log_probs: One log-probability per token, if the request asked for them.
        top_log_probs: The likeliest tokens at the position of each token, if requested.
    """

    accepted: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    log_probs: tuple[float, ...] = ()
    top_log_probs: TopLogProbs = ()

    @property
    def bonus(self) -> int | None:
        """The target's own choice after the last accepted node; None if the round was cut short."""
        own = self.token_ids[len(self.accepted) :]
        return own[0] if own else None


def accept(tree: TokenTree, choices: Sequence[int]) -> Verdict:
    """Do `follow` with all choices known: after the root (`choices[0]`) and after node `i` (`choices[i + 1]`)."""
    return follow(tree, lambda node: choices[node + 1])


def follow(tree: TokenTree, choice: Callable[[int], int | None]) -> Verdict:
    """Walk from the root along the target's choices as long as the tree contains them.

    Args:
        tree: The drafted tree.
        choice: Function from a node (`ROOT` for the root) to the token that the target chooses after it. None leaves a
            node unverified: its token is then the bonus token. The root is always verified.

    Returns:
        The path and the bonus token. These are exactly the tokens of plain decoding, since each choice depended on the
        tokens before it and on no others.
    """
    node = ROOT
    path: list[int] = []
    while (token := choice(node)) is not None:
        child = tree.children.get((node, token))
        if child is None:
            return Verdict(tuple(path), (*(tree.token_ids[n] for n in path), token))
        path.append(child)
        node = child
    return Verdict(tuple(path[:-1]), tuple(tree.token_ids[n] for n in path))


def cut(verdict: Verdict, remaining: int, end_tokens: Set[int]) -> Verdict:
    """Cut the commit after its first end token, or after `remaining` tokens (at least 1)."""
    for count, token in enumerate(verdict.token_ids[:remaining], start=1):
        if token in end_tokens:
            return _shorten(verdict, count, FinishReason.STOP)
    if len(verdict.token_ids) >= remaining:
        return _shorten(verdict, remaining, FinishReason.LENGTH)
    return verdict


def _shorten(verdict: Verdict, count: int, reason: FinishReason) -> Verdict:
    return Verdict(verdict.accepted[:count], verdict.token_ids[:count], reason)
