"""The drafter: grows a session's tree with one draft forward a level, and re-roots it after each commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dynatree.common.engine import Engine, Segment
from dynatree.common.errors import ServiceBusyError
from dynatree.common.sampling import Sampling, scores, tempered
from dynatree.common.tree import ROOT, TokenTree
from dynatree.draft.growing_tree import GrowingTree, Proposal, TrieNode
from dynatree.draft.policies import Policy

LEAST_LOG_PROB = -1e4  # a tree carries finite numbers only


@dataclass
class DraftSession:
    """What the draft model knows of one session.

    Invariant: slots 0 to `rows` of arena row `row` are `committed[:rows]` in order, and slots `rows` to `used` belong
    to nodes below `root`, which stands for the last committed token. `rows` lags behind `committed` by the tokens that
    the draft has not read yet; once the root has proposals the two are equal.
    """

    row: int
    committed: list[int]
    sampling: Sampling
    rows: int = 0
    used: int = 0
    root: TrieNode = field(init=False)

    def __post_init__(self) -> None:
        self.root = TrieNode(self.committed[-1])


@dataclass(frozen=True)
class Growth:
    """A grown tree, and the seconds that growing it took: in all, and in draft forwards."""

    tree: TokenTree
    seconds: float
    forward_seconds: float


class Drafter:
    """Opens, grows, commits and closes sessions on the draft model.

    Not thread-safe: one thread calls everything but `open`, which only takes a free row.

    Args:
        engine: The draft model; its arena needs `2 * max_tree_nodes` scratch slots a session.
        max_tree_nodes: The largest tree of any policy.
        vocab_size: Tokens that may be proposed: those that both models embed and the tokenizer has.
    """

    def __init__(self, engine: Engine, max_tree_nodes: int, vocab_size: int) -> None:
        self.engine = engine
        self._max_tree_nodes = max_tree_nodes
        self._vocab_size = vocab_size
        self._context = engine.info.context_length

    def open(self, prompt_ids: Sequence[int], sampling: Sampling) -> DraftSession:
        """Take a free row; nothing is read yet.

        Raises:
            ServiceBusyError: Every session is in use.
        """
        row = self.engine.arena.allocate()
        if row is None:
            raise ServiceBusyError("every session of the draft service is in use; try again later")
        return DraftSession(row, list(prompt_ids), sampling)

    def close(self, session: DraftSession) -> None:
        """Free the session's arena row."""
        self.engine.arena.free(session.row)

    def read(self, session: DraftSession, policy: Policy) -> None:
        """Read the committed tokens that have no row yet: the prompt, while the target reads it too."""
        if policy.breadth and session.rows < len(session.committed) <= self._context:
            self._expand(session, GrowingTree(session.root), [ROOT], policy.breadth)

    def grow(self, session: DraftSession, policy: Policy, max_depth: int, max_nodes: int) -> Growth:
        """Grow a tree below the last committed token, at most `max_depth` deep and of at most `max_nodes` nodes.

        One draft forward for each level that has nodes which the draft has not read yet. What it has read, in this
        round or before the last re-rooting, costs nothing, and the tree is the same either way.
        """
        started = time.perf_counter()
        forward_seconds = 0.0
        # a node at depth d is proposed by a token at position committed + d - 2, which the draft must still embed
        max_depth = min(max_depth, self._context + 1 - len(session.committed))
        tree = GrowingTree(session.root)
        level = [ROOT] if max_depth > 0 and policy.breadth else []
        while level and len(tree) < max_nodes:
            forward_seconds += self._expand(session, tree, level, policy.breadth)
            level = [node for node in policy.grow(tree, level) if tree.depth(node) < max_depth]
        return Growth(tree.freeze(max_nodes), time.perf_counter() - started, forward_seconds)

    def commit(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        """Append committed tokens and re-root: rows on their path join the prefix, rows below it stay, others go."""
        node, path = session.root, []
        at_prefix = session.rows == len(session.committed)
        for token in token_ids:
            node = node.child(token) if at_prefix else TrieNode(token)
            at_prefix = at_prefix and node.slot is not None
            if at_prefix:
                path.append(node)
        session.committed.extend(token_ids)
        kept = list(node.descendants()) if at_prefix else []
        if len(kept) > self._max_tree_nodes:  # leave room for the next tree
            kept = []
            node.children.clear()
        slots = [n.slot for n in (*path, *kept) if n.slot is not None]
        self.engine.arena.move(session.row, slots, session.rows)
        for slot, survivor in enumerate((*path, *kept), start=session.rows):
            survivor.slot = slot
        session.rows += len(path)
        session.used = session.rows + len(kept)
        session.root = node if at_prefix else TrieNode(session.committed[-1])

    def _expand(self, session: DraftSession, tree: GrowingTree, level: Sequence[int], breadth: int) -> float:
        """Read the nodes of a level that have no proposals yet, in one forward; returns its seconds."""
        unread = [node for node in level if tree.node(node).proposals is None]
        if not unread:
            return 0.0
        segment = _catch_up(session) if unread == [ROOT] else _level(session, tree, unread)
        started = time.perf_counter()
        (logits,) = self.engine.forward([segment])
        self.engine.synchronize()
        seconds = time.perf_counter() - started
        base = len(session.committed)
        proposals = self._propose(logits, [base + tree.depth(n) for n in unread], session.sampling, breadth)
        session.used = segment.stop
        if unread == [ROOT]:
            session.rows = session.used
        for index, (node, proposed) in enumerate(zip(unread, proposals, strict=True)):
            tree.node(node).proposals = proposed
            if node != ROOT:
                tree.node(node).slot = segment.start + index
        return seconds

    def _propose(
        self, logits: Tensor, positions: Sequence[int], sampling: Sampling, breadth: int
    ) -> list[tuple[Proposal, ...]]:
        """The best `breadth` continuations of each row of logits `[rows, vocabulary]`, ranked as the target ranks.

        When sampling, both sides perturb their logits with one noise, so the draft's best perturbed tokens are its best
        guesses of the target's sample (drafter-invariant coupling).
        """
        logits = logits[:, : self._vocab_size].float()
        best = scores(logits, positions, sampling).topk(min(breadth, logits.shape[-1]), dim=-1)
        if sampling.greedy:
            log_probs = best.values - logits.logsumexp(-1, keepdim=True)
        else:
            log_probs = tempered(logits, sampling).log_softmax(-1).gather(-1, best.indices)
        return [
            tuple(
                Proposal(token, min(max(log_prob, LEAST_LOG_PROB), 0.0)) for token, log_prob in zip(*row, strict=True)
            )
            for row in zip(best.indices.tolist(), log_probs.tolist(), strict=True)
        ]


def _catch_up(session: DraftSession) -> Segment:
    """The committed tokens that the draft has not read, the root last."""
    unread = session.committed[session.rows :]
    positions = range(session.rows, len(session.committed))
    return Segment(session.row, session.rows, unread, positions, keep=[len(unread) - 1])


def _level(session: DraftSession, tree: GrowingTree, nodes: Sequence[int]) -> Segment:
    """Nodes behind the slots in use; each sees the committed prefix, its ancestors and itself."""
    mask = torch.zeros(len(nodes), session.used + len(nodes) - session.rows, dtype=torch.bool)
    visible = mask.numpy()  # shares memory; element assignment is cheaper there
    for index, node in enumerate(nodes):
        visible[index, session.used - session.rows + index] = True
        for ancestor in tree.ancestors(node):
            assert ancestor.slot is not None, "a node's ancestors are read before it"
            visible[index, ancestor.slot - session.rows] = True
    root = len(session.committed) - 1
    positions = [root + tree.depth(node) for node in nodes]
    return Segment(session.row, session.used, [tree.node(n).token for n in nodes], positions, mask=mask)
