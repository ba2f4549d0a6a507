"""Where a tree's nodes stand in the target's forward."""

from __future__ import annotations

from dynatree.common.engine import Segment, ancestor_mask
from dynatree.common.tree import ROOT, TokenTree
from dynatree.verify.session import Session


def depth_first(tree: TokenTree) -> tuple[TokenTree, tuple[int, ...]]:
    """The same tree in depth-first order, and which node of `tree` each of its nodes is.

    A node's likeliest child comes right behind it, so the keys of the likeliest path stand as in plain decoding: in low
    precision the sums of attention depend on where keys stand. Draws keep their order.
    """
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        below.setdefault(parent, []).append(node)
    if tree.log_probs and not tree.candidates:
        for siblings in below.values():
            siblings.sort(key=lambda node: -tree.log_probs[node])
    order: list[int] = []
    pending = below.get(ROOT, [])[::-1]
    while pending:
        order.append(pending.pop())
        pending += below.get(order[-1], [])[::-1]
    if order == list(range(len(tree))):
        return tree, tuple(order)
    place = {ROOT: ROOT} | {node: place for place, node in enumerate(order)}
    reordered = TokenTree(
        token_ids=tuple(tree.token_ids[node] for node in order),
        parents=tuple(place[tree.parents[node]] for node in order),
        log_probs=tuple(tree.log_probs[node] for node in order) if tree.log_probs else (),
        candidates=tuple(tree.candidates[node + 1] for node in (ROOT, *order)) if tree.candidates else (),
    )
    return reordered, tuple(order)


def prompt_segment(session: Session, tokens: int) -> Segment:
    """The next tokens of a session's prompt; its last one's logits are kept, and all where the prompt's are wanted."""
    request, start, stop = session.request, session.read, session.read + tokens
    if request.prompt_log_probs:
        keep = range(tokens)
    else:
        keep = range(tokens - 1 if stop == len(request.prompt_ids) else tokens, tokens)
    return Segment(session.kv, start, request.prompt_ids[start:stop], range(start, stop), keep=keep)


def tree_segment(session: Session, tree: TokenTree) -> Segment:
    """The root and the tree behind the session's committed slots; a token's position is its distance from the start."""
    root = session.length - 1
    positions = [root, *(root + depth for depth in tree.depths)]
    mask = ancestor_mask(tree.parents) if tree else None
    return Segment(session.kv, root, [session.pending, *tree.token_ids], positions, mask=mask)
