"""The drafter: grows a session's tree with one draft forward a level, and re-roots it after each commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dynatree.common.engine import Engine, Segment
from dynatree.common.errors import ServiceBusyError
from dynatree.common.sampling import (
    Histories,
    Sampling,
    Scheme,
    Stream,
    adjusted,
    gumbel,
    noise,
    scores,
    warped,
)
from dynatree.common.tree import MAX_CANDIDATES, ROOT, Candidates, TokenTree
from dynatree.draft.growing_tree import GrowingTree, Proposal, TrieNode
from dynatree.draft.policies import Policy

LEAST_LOG_PROB = -1e4  # a tree carries finite numbers only
CANDIDATES = 32  # of a truncated draft distribution; the rest of its mass is dropped


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
    rounds: int = 0
    root: TrieNode = field(init=False)

    def __post_init__(self) -> None:
        self.root = TrieNode(self.committed[-1])


@dataclass(frozen=True)
class Growth:
    """A grown tree, and the seconds that growing it took: in all, and in its `levels` draft forwards."""

    tree: TokenTree
    seconds: float
    forward_seconds: float
    levels: int


class Drafter:
    """Opens, grows, commits and closes sessions on the draft model.

    Not thread-safe: one thread calls everything but `open`, which only takes a free row.

    Args:
        engine: The draft model; its arena needs `2 * max_tree_nodes` speculative slots a session.
        max_tree_nodes: The largest tree of any policy.
        vocab_size: Tokens that may be proposed: those that both models embed and the tokenizer has.

    Attributes:
        vocab_size: The same; another target may change it.
    """

    def __init__(self, engine: Engine, max_tree_nodes: int, vocab_size: int) -> None:
        self.engine = engine
        self._max_tree_nodes = max_tree_nodes
        self.vocab_size = vocab_size
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
            self.expand(session, self.new_tree(session, 0, 0), [ROOT], policy.breadth)

    def grow(self, session: DraftSession, policy: Policy, max_depth: int, max_nodes: int) -> Growth:
        """Grow a tree below the last committed token, at most `max_depth` deep and of at most `max_nodes` nodes.

        One draft forward for each level that has nodes which the draft has not read yet. What it has read, in this
        round or before the last re-rooting, costs nothing, and the tree is the same either way.
        """
        started = time.perf_counter()
        forwards = []
        max_depth = min(max_depth, self.reach(session))
        tree = self.new_tree(session, max_nodes, max_depth)
        level = policy.start(tree) if max_depth > 0 else []
        while level and self.has_room(session, tree, level):
            if seconds := self.expand(session, tree, level, policy.breadth):
                forwards.append(seconds)
            level = [node for node in policy.grow(tree, level) if tree.depth(node) < max_depth]
        return Growth(
            tree.freeze(policy.select(tree)), time.perf_counter() - started, sum(forwards), levels=len(forwards)
        )

    def reach(self, session: DraftSession) -> int:
        """The deepest node that the draft can propose; 0 or less where it has no context left."""
        # a node at depth d is proposed by a token at position committed + d - 2, which the draft must still embed
        return self._context + 1 - len(session.committed)

    def new_tree(self, session: DraftSession, max_nodes: int, max_depth: int) -> GrowingTree:
        """An empty tree below the session's root."""
        return GrowingTree(
            session.root,
            session.committed,
            max_nodes=min(max_nodes, self._max_tree_nodes),
            max_depth=max_depth,
            drawn=session.sampling.residual,
        )

    def has_room(self, session: DraftSession, tree: GrowingTree, level: Sequence[int]) -> bool:
        """Whether the session's arena row has slots for a level's unread nodes."""
        unread = sum(not tree.is_read(node) for node in level if node != ROOT)
        return session.used - session.rows + unread <= 2 * self._max_tree_nodes

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
        session.rounds += 1
        if session.sampling.residual:  # draws that shaped one tree are not fresh draws in the next: read the root anew
            at_prefix, path = False, path[: len(token_ids) - 1]
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

    def expand(self, session: DraftSession, tree: GrowingTree, level: Sequence[int], breadth: int) -> float:
        """Read the nodes of a level that have no proposals yet, in one forward; returns its seconds."""
        unread = [node for node in level if not tree.is_read(node)]
        if not unread:
            return 0.0
        segment = _segment(session, tree, unread)
        segment = replace(segment, token_ids=[self._readable(token) for token in segment.token_ids])
        started = time.perf_counter()
        (logits,) = self.engine.forward([segment])
        self.engine.synchronize()
        seconds = time.perf_counter() - started
        self._propose(session, tree, unread, logits, breadth)
        session.rows = len(session.committed)
        session.used = segment.stop
        below = [node for node in unread if node != ROOT]
        for slot, node in enumerate(below, start=segment.stop - len(below)):
            tree.node(node).slot = slot
        return seconds

    def _readable(self, token: int) -> int:
        """The token, or a stand-in: a target that is padded further may choose an id that the draft cannot embed."""
        return token if token < self.engine.info.vocab_size else 0

    def _propose(
        self, session: DraftSession, tree: GrowingTree, nodes: Sequence[int], logits: Tensor, breadth: int
    ) -> None:
        """Give nodes their best `breadth` continuations, by the logits after each `[nodes, vocabulary]`."""
        sampling = session.sampling
        logits = logits[:, : self.vocab_size].float().nan_to_num(nan=0.0)  # a guess may be bad; a tree must be finite
        histories = None
        if sampling.needs_history:
            paths = [[above.token for above in reversed(tree.path(node))] for node in nodes]
            histories = Histories(session.committed, paths)
        positions = [len(session.committed) + tree.depth(node) for node in nodes]
        if sampling.residual:
            drawn = _draw(adjusted(logits, sampling, histories), positions, sampling, session.rounds, breadth)
            for node, (candidates, draws) in zip(nodes, drawn, strict=True):
                tree.node(node).candidates, tree.node(node).proposals = candidates, draws
        else:
            for node, ranked in zip(nodes, _rank(logits, positions, sampling, histories, breadth), strict=True):
                tree.node(node).proposals = ranked


def _rank(
    logits: Tensor, positions: Sequence[int], sampling: Sampling, histories: Histories | None, breadth: int
) -> list[tuple[Proposal, ...]]:
    """The best `breadth` continuations of each row, ranked as the target ranks, with the chance of each.

    When sampling, both sides perturb their logits with one noise, so the draft's best perturbed tokens are its best
    guesses of the target's sample (drafter-invariant coupling), and what it gives for each is the softmax of the
    perturbed logits: the target's differ from them by about as much as such a softmax forgives. With noise of its own
    the draft knows no more than the token's probability.
    """
    if sampling.greedy or sampling.scheme is Scheme.GUMBEL:
        ranking = scores(logits, positions, sampling, histories)
        chances = ranking.log_softmax(-1)
    else:
        chances = warped(adjusted(logits, sampling, histories), sampling).log_softmax(-1)
        ranking = chances + noise(logits, positions, sampling.seed, Stream.DRAFT)
    best = ranking.topk(min(breadth, logits.shape[-1]), dim=-1).indices
    return [
        tuple(Proposal(token, min(max(chance, LEAST_LOG_PROB), 0.0)) for token, chance in zip(*row, strict=True))
        for row in zip(best.tolist(), chances.gather(-1, best).tolist(), strict=True)
    ]


def _draw(
    logits: Tensor, positions: Sequence[int], sampling: Sampling, round_: int, breadth: int
) -> list[tuple[Candidates, tuple[Proposal, ...]]]:
    """Up to `breadth` continuations of each row, drawn without replacement from its truncated distribution.

    The order of the log-probabilities with Gumbel noise added is that of draws without replacement (Gumbel-top-k). The
    noise is fresh in every round: a tree's shape depends on its draws, so what comes later must not.
    """
    size = min(CANDIDATES, MAX_CANDIDATES, logits.shape[-1])
    best = warped(logits, sampling).topk(size, dim=-1)
    rows = []
    for position, values, ids in zip(positions, best.values, best.indices.tolist(), strict=True):
        probs = values.softmax(-1)
        count = int((probs > 0).sum())
        log_probs = probs[:count].log().cpu()
        perturbed = log_probs + gumbel(sampling.seed, position, count, Stream.DRAFT, round_)
        order = perturbed.argsort(descending=True)[:breadth].tolist()
        candidates = Candidates(tuple(ids[:count]), tuple(probs[:count].tolist()))
        draws = tuple(Proposal(ids[place], max(min(log_probs[place].item(), 0.0), LEAST_LOG_PROB)) for place in order)
        rows.append((candidates, draws))
    return rows


def _segment(session: DraftSession, tree: GrowingTree, nodes: Sequence[int]) -> Segment:
    """Nodes, ancestors first, behind the slots in use; each sees the committed prefix, its ancestors and itself.

    The root brings the committed tokens before it that the draft has not read.
    """
    unread = session.committed[session.rows :] if nodes[0] == ROOT else []
    below = nodes[1:] if unread else nodes
    token_ids = [*unread, *(tree.node(node).token for node in below)]
    root = len(session.committed) - 1
    positions = [*range(session.rows, session.rows + len(unread)), *(root + tree.depth(node) for node in below)]
    keep = range(max(len(unread) - 1, 0), len(token_ids))
    if not below:
        return Segment(session.row, session.used, token_ids, positions, keep=keep)
    behind = session.used - session.rows
    mask = torch.zeros(len(token_ids), behind + len(token_ids), dtype=torch.bool)
    visible = mask.numpy()  # shares memory; element assignment is cheaper there
    for index in range(len(unread)):
        visible[index:, behind + index] = True
    slots = {tree.node(node): slot for slot, node in enumerate(below, start=session.used + len(unread))}
    for index, node in enumerate(below, start=len(unread)):
        for above in tree.path(node):
            slot = slots.get(above, above.slot)
            assert slot is not None, "a node's ancestors are read before it, or with it"
            visible[index, slot - session.rows] = True
    return Segment(session.row, session.used, token_ids, positions, mask=mask, keep=keep)
