"""Acceptance: pure functions from a tree and the target's choices to what is committed.

DynaTree section 3.5. The tree is rooted at the last committed token, so the first condition there, that the root's
token be the target's, always holds, and the target's choice at the root takes the place of the prefix logits.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from dynatree.common.log_probs import TopLogProbs
from dynatree.common.messages import FinishReason
from dynatree.common.tree import ROOT, TokenTree


@dataclass(frozen=True)
class Verdict:
    """What one round commits.

    `accepted` are the nodes on the accepted path, from the root down. `token_ids` are their tokens and, where the round
    was not cut short, the target's own choice after the last of them (the bonus token). `finish_reason` is set where
    the session ends here. `log_probs` has one entry for each token where the request asked for them, and
    `top_log_probs` the likeliest tokens in the place of each.
    """

    accepted: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    log_probs: tuple[float, ...] = ()
    top_log_probs: TopLogProbs = ()

    @property
    def bonus(self) -> int | None:
        """The target's own choice after the last accepted node; None where the round was cut short."""
        own = self.token_ids[len(self.accepted) :]
        return own[0] if own else None


def accept(tree: TokenTree, choices: Sequence[int]) -> Verdict:
    """Walk from the root along the target's own choices for as long as the tree has them.

    Args:
        tree: The drafted tree.
        choices: The token that the target chooses after the root (`choices[0]`) and after node `i` (`choices[i + 1]`).

    Returns:
        The path and the bonus token: exactly the tokens that plain decoding would have chosen one by one, since each
        choice was made with the tokens before it, and no others, in view.
    """
    node = ROOT
    path: list[int] = []
    while (child := tree.children.get((node, choices[node + 1]))) is not None:
        path.append(child)
        node = child
    return Verdict(tuple(path), (*(tree.token_ids[n] for n in path), choices[node + 1]))


def cut(verdict: Verdict, remaining: int, end_tokens: Set[int]) -> Verdict:
    """End the commit at its first end-of-sequence token, or after `remaining` tokens (at least 1)."""
    for count, token in enumerate(verdict.token_ids[:remaining], start=1):
        if token in end_tokens:
            return _shorten(verdict, count, FinishReason.STOP)
    if len(verdict.token_ids) >= remaining:
        return _shorten(verdict, remaining, FinishReason.LENGTH)
    return verdict


def _shorten(verdict: Verdict, count: int, reason: FinishReason) -> Verdict:
    return Verdict(verdict.accepted[:count], verdict.token_ids[:count], reason)
