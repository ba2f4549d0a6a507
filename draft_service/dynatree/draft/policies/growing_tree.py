"""The growing tree of one round, and the draft model's knowledge of each node."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol, Self

from dynatree.common.limits import MAX_TREE_NODES
from dynatree.common.tree import ROOT, DraftDistribution, TokenTree
from dynatree.draft.policies.suffix_index import SuffixIndex


@dataclass(frozen=True)
class Proposal:
    """A token that may follow a node, with the natural log-probability that the target chooses it there.

    `draft_log_prob` is the draft model's own log-probability if `log_prob` is calibrated; else None.
    """

    token: int
    log_prob: float
    draft_log_prob: float | None = None


class Allowed(Protocol):
    """Which tokens a request's grammar allows next; `dynatree.engine.grammar.state.GrammarState` implements it."""

    @property
    def bits(self) -> bytes:
        """One bit per token, lowest first: whether it may follow."""

    @property
    def forced(self) -> int | None:
        """The only token that may follow; None if there are several."""

    def allows(self, token: int) -> bool:
        """Whether a token may follow."""

    def after(self, token: int) -> Self | None:
        """Return the state of the grammar after one more token; None if the grammar forbids the token."""


@dataclass(eq=False)
class TrieNode:
    """The draft model's knowledge of one token in its context, kept across rounds while the context is valid.

    The forward pass that reads the token sets `slot` and `proposals`.

    Attributes:
        token: The token id.
        slot: The token's KV slot in the session's range, if it has one.
        proposals: The likeliest continuations, best first, or the draws in their order; None before they are known.
        candidates: The distribution that the proposals were drawn from, if they are draws.
        children: The continuations that a tree has used, by token.
        grammar: What the request's grammar allows after the token; None if it allows anything.
    """

    token: int
    slot: int | None = None
    proposals: tuple[Proposal, ...] | None = None
    candidates: DraftDistribution | None = None
    children: dict[int, TrieNode] = field(default_factory=dict)
    grammar: Allowed | None = None

    def child(self, token: int) -> TrieNode:
        """Return the node of a continuation, created if it is new."""
        child = self.children.get(token)
        if child is None:
            child = TrieNode(token, grammar=self.grammar and self.grammar.after(token))
            self.children[token] = child
        return child

    def descendants(self) -> Iterator[TrieNode]:
        """Yield every node below this one that has a slot, parents first."""
        for child in self.children.values():
            if child.slot is not None:
                yield child
                yield from child.descendants()


class GrowingTree:
    """The tree of one round. Nodes are indexed in the order in which they were added; the root is `ROOT`.

    A policy reads the tree and adds nodes; see `dynatree.draft.policies.Policy`.

    Attributes:
        context: The committed tokens, the root last.
        earlier: The principal's earlier completions, if the tree may have candidates from them.
        vocab_size: Number of token ids that may be proposed.
        catch_up_seconds: Expected seconds in which the draft model reads committed tokens before the first expansion.
        max_nodes: Size limit of the tree that is sent.
        max_depth: Depth limit of the nodes that are sent.
        sampled: Whether continuations are random draws (residual sampling). Whether a draw is kept may then depend on
            its ancestors, its earlier siblings, the distribution that it is drawn from and other nodes' draws, but
            never on its own token or on draws below it.
        replacement: Whether draws are made with replacement, so that a token may repeat.
        sent: The nodes of the frozen tree, in its order; empty before `freeze`.
    """

    def __init__(
        self,
        root: TrieNode,
        context: Sequence[int],
        *,
        max_nodes: int = MAX_TREE_NODES,
        max_depth: int = MAX_TREE_NODES,
        sampled: bool = False,
        replacement: bool = False,
        earlier: SuffixIndex | None = None,
        vocab_size: int = sys.maxsize,
        catch_up_seconds: float = 0.0,
    ) -> None:
        self.context = context
        self.catch_up_seconds = catch_up_seconds
        self.earlier = earlier
        self.vocab_size = vocab_size
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.sampled = sampled
        self.replacement = sampled and replacement
        self.sent: Sequence[int] = ()
        self._root = root
        self._calibrated: Callable[[float], float] | None = None
        self._nodes: list[TrieNode] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._log_probs: list[float] = []
        self._draft_log_probs: list[float | None] = []
        self._path_log_probs: list[float] = []
        self._values: list[float] = []
        self._spent: dict[int, float] = {}  # by node: summed probability of its children
        self._edges: dict[tuple[int, int], int] = {}  # child node by parent and token
        self._draws: dict[int, list[int]] = {}  # by node: its children in the order of their draws with replacement

    def __len__(self) -> int:
        return len(self._nodes)

    def calibrate(self, calibrated: Callable[[float], float]) -> None:
        """Use calibrated log-probabilities from now on: `calibrated(log_prob)` in place of the draft's own."""
        self._calibrated = calibrated

    def node(self, index: int) -> TrieNode:
        """The trie node of a tree node."""
        return self._root if index == ROOT else self._nodes[index]

    def parent(self, index: int) -> int:
        """The parent of a node."""
        return self._parents[index]

    def depth(self, index: int) -> int:
        """A node's distance from the root, d(u) in DynaTree section 3.3."""
        return 0 if index == ROOT else self._depths[index]

    def log_prob(self, index: int) -> float:
        """The log-probability of a node given its parent."""
        return self._log_probs[index]

    def draft_log_prob(self, index: int) -> float | None:
        """The draft model's own log-probability of a node whose log-probability is calibrated; else None."""
        return self._draft_log_probs[index]

    def path_log_prob(self, index: int) -> float:
        """The cumulative log-probability of a node, log p(u) in DynaTree section 3.3; 0 for the root."""
        return 0.0 if index == ROOT else self._path_log_probs[index]

    def value(self, index: int) -> float:
        """The expected contribution of a node to the accepted length, as far as a policy may know it.

        For ranked continuations it is the path probability (DySpec appendix D.1, equation 12):

            v(u) = p(u)

        For draws it is the probability that verification reaches the draw, whatever its token (DySpec Algorithm 1):

            v(u) = p(parent) (1 - sum of p(s | parent) over the earlier siblings s)

        A value is never above the parent's value, and the value of a draw is never above an earlier sibling's. So the
        n nodes of highest value always form a tree.
        """
        return self._values[index]

    def next_value(self, parent: int, log_prob: float) -> float:
        """The `value` that the next child of a node would have."""
        path = self.path_log_prob(parent)
        if self.sampled:
            return math.exp(path) * max(0.0, 1.0 - self._spent.get(parent, 0.0))
        return math.exp(path + log_prob)

    def proposals(self, index: int) -> Sequence[Proposal]:
        """The continuations of an expanded node: the draft's likeliest first, or the draws in their order."""
        proposals = self.node(index).proposals
        assert proposals is not None, "the growth loop expands a node before a policy sees it"
        if self._calibrated is None or self.forced(index) is not None:
            return proposals
        return [Proposal(each.token, self._calibrated(each.log_prob), each.log_prob) for each in proposals]

    def is_expanded(self, index: int) -> bool:
        """Whether a node already has proposals, so that its expansion takes no forward pass.

        A node has one certain proposal without a forward pass if the grammar allows only one token after it.
        """
        node = self.node(index)
        if node.proposals is None and (token := self.forced(index)) is not None:
            node.proposals = (Proposal(token, 0.0),)
        return node.proposals is not None

    def allows(self, index: int, token: int) -> bool:
        """Whether the grammar allows a token after a node."""
        grammar = self.node(index).grammar
        return grammar is None or grammar.allows(token)

    def forced(self, index: int) -> int | None:
        """The only token that the grammar allows after a node; None if there are several, or if nodes are drawn."""
        grammar = self.node(index).grammar
        return None if grammar is None or self.sampled else grammar.forced

    def confidence(self, index: int) -> float:
        """The highest next-token probability after an expanded node, c(u) in DynaTree section 3.3; 0 if none."""
        node = self.node(index)
        assert node.proposals is not None, "the growth loop expands a node before a policy sees it"
        if not node.proposals:
            return 0.0
        if node.candidates is not None:
            highest = max(node.candidates.probs)
        else:
            highest = math.exp(max(proposal.log_prob for proposal in node.proposals))
        return highest if self._calibrated is None else math.exp(self._calibrated(math.log(highest)))

    def has_child(self, parent: int, token: int) -> bool:
        """Whether a node already has a child with this token."""
        return (parent, token) in self._edges

    def add(self, parent: int, proposal: Proposal) -> int:
        """Add a child below a node and return its index; a repeated draw returns the existing child."""
        known = self._edges.get((parent, proposal.token)) if self.replacement else None
        if self.replacement:
            self._draws.setdefault(parent, []).append(len(self) if known is None else known)
        if known is not None:
            return known
        value = self.next_value(parent, proposal.log_prob)
        self._values.append(value if parent == ROOT else min(value, self._values[parent]))  # against rounding
        self._nodes.append(self.node(parent).child(proposal.token))
        self._parents.append(parent)
        self._depths.append(self.depth(parent) + 1)
        self._log_probs.append(proposal.log_prob)
        self._draft_log_probs.append(proposal.draft_log_prob)
        self._path_log_probs.append(self.path_log_prob(parent) + proposal.log_prob)
        self._edges[parent, proposal.token] = len(self._nodes) - 1
        self._spent[parent] = self._spent.get(parent, 0.0) + math.exp(proposal.log_prob)
        return len(self._nodes) - 1

    def revalue(self, proposals: Sequence[Proposal]) -> None:
        """Replace the log-probabilities of all nodes, given in order as proposals of their tokens; not for draws."""
        for index, (parent, proposal) in enumerate(zip(self._parents, proposals, strict=True)):
            path = self.path_log_prob(parent) + proposal.log_prob
            self._log_probs[index] = proposal.log_prob
            self._draft_log_probs[index] = proposal.draft_log_prob
            self._path_log_probs[index] = path
            self._values[index] = math.exp(path) if parent == ROOT else min(math.exp(path), self._values[parent])

    def path(self, index: int) -> list[TrieNode]:
        """The nodes from a node up to the root, without the root."""
        path = []
        while index != ROOT:
            path.append(self._nodes[index])
            index = self._parents[index]
        return path

    def freeze(self, nodes: Sequence[int], *, distributions: bool = True) -> TokenTree:
        """Build the immutable tree to send from these nodes, parents first, as far as the limits allow.

        A tree of draws carries the distributions that they were drawn from, unless `distributions` is false.
        """
        self.sent = [node for node in nodes if self._depths[node] <= self.max_depth][: self.max_nodes]
        index = {ROOT: ROOT} | {node: place for place, node in enumerate(self.sent)}
        parents = tuple(index[self._parents[node]] for node in self.sent)
        return TokenTree(
            token_ids=tuple(self._nodes[node].token for node in self.sent),
            parents=parents,
            log_probs=tuple(self._log_probs[node] for node in self.sent),
            candidates=self._candidates(set(parents)) if distributions and self.sampled and self.sent else (),
        )

    def _candidates(self, parents: set[int]) -> tuple[DraftDistribution | None, ...]:
        """The distributions of the children of the root and of each sent node; None for nodes without sent children."""
        sent = set(self.sent)
        return tuple(
            self._distribution(node, sent) if place in parents else None
            for place, node in enumerate((ROOT, *self.sent), start=ROOT)
        )

    def _distribution(self, node: int, sent: Set[int]) -> DraftDistribution | None:
        """The distribution of a node's children; with replacement, also the draws before the first unsent child."""
        candidates = self.node(node).candidates
        if candidates is None or not self.replacement:
            return candidates
        places: dict[int, int] = {}
        drawn = takewhile(sent.__contains__, self._draws[node])
        return replace(candidates, draws=tuple(places.setdefault(child, len(places)) for child in drawn))
