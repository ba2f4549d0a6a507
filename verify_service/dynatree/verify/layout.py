"""Placement of trees and prompt pieces in the target's forward pass."""

from __future__ import annotations

from collections.abc import Iterable

from dynatree.common.tree import ROOT, TokenTree
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.verify.session import VerifySession


def depth_first(tree: TokenTree, nodes: Iterable[int]) -> tuple[int, ...]:
    """The given nodes of a tree, ascending and with their parents, in depth-first order.

    A node's likeliest child follows it directly, so the keys of the likeliest path are placed as in plain decoding:
    in low precision, the sums of attention depend on the slots of the keys. Children that were drawn keep their order.
    """
    below: dict[int, list[int]] = {}
    for node in nodes:
        below.setdefault(tree.parents[node], []).append(node)
    if tree.log_probs and not tree.candidates:
        for siblings in below.values():
            siblings.sort(key=lambda node: -tree.log_probs[node])
    order: list[int] = []
    pending = below.get(ROOT, [])[::-1]
    while pending:
        order.append(pending.pop())
        pending += below.get(order[-1], [])[::-1]
    return tuple(order)


def prompt_segment(session: VerifySession, tokens: int) -> Segment:
    """The next tokens of a session's prompt; logits are kept for the prompt's last token, or for all if requested."""
    request, start, stop = session.request, session.read, session.read + tokens
    if request.decoding.prompt_log_probs:
        keep = range(tokens)
    else:
        keep = range(tokens - 1 if stop == len(request.prompt_ids) else tokens, tokens)
    return Segment(session.kv, start, request.prompt_ids[start:stop], range(start, stop), keep=keep)


def tree_segment(session: VerifySession, tree: TokenTree) -> Segment:
    """The root and the tree after the session's committed slots; each token's position follows from its depth."""
    root = session.length - 1
    positions = [root, *(root + depth for depth in tree.depths)]
    mask = ancestor_mask(tree.parents) if tree else None
    return Segment(session.kv, root, [session.pending, *tree.token_ids], positions, mask=mask)
