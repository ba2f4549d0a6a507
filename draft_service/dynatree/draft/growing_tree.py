"""The tree of one round while it grows, and what the draft model knows of each of its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dynatree.common.tree import ROOT, TokenTree


@dataclass(frozen=True)
class Proposal:
    """A token that may follow a node, with the draft's natural log-probability of it there."""

    token: int
    log_prob: float


@dataclass(eq=False)
class TrieNode:
    """What the draft model knows of one token in its context; kept across rounds for as long as the context stands.

    `slot` is its place in the session's arena row and `proposals` its likeliest continuations, best first; both are set
    by the forward that reads the token. `children` are the continuations that some tree has used.
    """

    token: int
    slot: int | None = None
    proposals: tuple[Proposal, ...] | None = None
    children: dict[int, TrieNode] = field(default_factory=dict)

    def child(self, token: int) -> TrieNode:
        """The node of a continuation, made where it is new."""
        return self.children.setdefault(token, TrieNode(token))

    def descendants(self) -> Iterator[TrieNode]:
        """Every node below this one that has been read, parents first."""
        for child in self.children.values():
            if child.slot is not None:
                yield child
                yield from child.descendants()


class GrowingTree:
    """The tree of one round: nodes by index in the order in which they were added, `ROOT` for the root.

    A policy reads it and adds to it; see `dynatree.draft.policies.Policy`.
    """

    def __init__(self, root: TrieNode) -> None:
        self._root = root
        self._nodes: list[TrieNode] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._log_probs: list[float] = []
        self._path_log_probs: list[float] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, index: int) -> TrieNode:
        """What the draft model knows of a node."""
        return self._root if index == ROOT else self._nodes[index]

    def depth(self, index: int) -> int:
        """A node's distance from the root, d(u) in DynaTree section 3.3."""
        return 0 if index == ROOT else self._depths[index]

    def path_log_prob(self, index: int) -> float:
        """The cumulative log-probability of a node, log p(u) in DynaTree section 3.3; 0 for the root."""
        return 0.0 if index == ROOT else self._path_log_probs[index]

    def proposals(self, index: int) -> tuple[Proposal, ...]:
        """The likeliest continuations of an expanded node, best first."""
        proposals = self.node(index).proposals
        assert proposals is not None, "the growth loop expands a node before a policy sees it"
        return proposals

    def add(self, parent: int, proposal: Proposal) -> int:
        """Add a child below a node; returns its index."""
        self._nodes.append(self.node(parent).child(proposal.token))
        self._parents.append(parent)
        self._depths.append(self.depth(parent) + 1)
        self._log_probs.append(proposal.log_prob)
        self._path_log_probs.append(self.path_log_prob(parent) + proposal.log_prob)
        return len(self._nodes) - 1

    def ancestors(self, index: int) -> Iterator[TrieNode]:
        """The nodes above a node, the root left out."""
        while (index := self._parents[index]) != ROOT:
            yield self._nodes[index]

    def freeze(self, max_nodes: int) -> TokenTree:
        """The immutable tree to send: the first `max_nodes` nodes, which are a tree since parents are added first."""
        return TokenTree(
            token_ids=tuple(node.token for node in self._nodes[:max_nodes]),
            parents=tuple(self._parents[:max_nodes]),
            log_probs=tuple(self._log_probs[:max_nodes]),
        )
