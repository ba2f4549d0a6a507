"""The token tree: flat, immutable, valid once constructed.

DynaTree section 3.3 (the tree) and section 3.4 (serialisation and the tree attention mask).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from dynatree.common.errors import InvalidArgumentError
from dynatree.v1 import tree_pb2

ROOT = -1
MAX_CANDIDATES = 64


@dataclass(frozen=True)
class Candidates:
    """A truncated draft distribution: what the children of one node were drawn from, without replacement.

    Raises:
        InvalidArgumentError: Not a distribution over 1 to `MAX_CANDIDATES` different tokens.
    """

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]

    def __post_init__(self) -> None:
        size = len(self.token_ids)
        if not 1 <= size <= MAX_CANDIDATES or len(self.probs) != size:
            raise InvalidArgumentError(
                f"a draft distribution has {size} candidate_ids and {len(self.probs)} candidate_probs, "
                f"expected as many of each, 1 to {MAX_CANDIDATES}"
            )
        if len(set(self.token_ids)) != size:
            raise InvalidArgumentError("a draft distribution names a token twice; candidate_ids must differ")
        if not all(0.0 < p <= 1.0 for p in self.probs) or abs(sum(self.probs) - 1.0) > 1e-3:
            raise InvalidArgumentError(
                f"a draft distribution's candidate_probs sum to {sum(self.probs):g}, expected sum 1, each in (0, 1]"
            )


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens below the last committed one (the root, which is not stored).

    Node `i` carries `token_ids[i]` and hangs below node `parents[i]`, or below the root where that is `ROOT`.
    Parents precede children, and siblings carry different tokens, so a sequence of tokens names at most one path.
    `log_probs[i]` is the draft's natural log-probability of node `i` given its parent.

    `candidates` is empty unless children were drawn from distributions that the verify side must know (DySpec's
    Algorithm 3). Then it has one entry for the root and one for each node, None where no child was drawn, and siblings
    stand in the order in which they were drawn.

    Raises:
        InvalidArgumentError: The arrays do not describe such a tree.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    candidates: tuple[Candidates | None, ...] = ()

    def __post_init__(self) -> None:
        nodes = len(self.token_ids)
        if len(self.parents) != nodes:
            raise InvalidArgumentError(f"a tree of {nodes} token_ids needs {nodes} parents, got {len(self.parents)}")
        if len(self.log_probs) not in (0, nodes):
            raise InvalidArgumentError(
                f"a tree of {nodes} nodes needs 0 or {nodes} log_probs, got {len(self.log_probs)}"
            )
        for node, log_prob in enumerate(self.log_probs):
            if not -math.inf < log_prob <= 0.0:
                raise InvalidArgumentError(f"log_probs[{node}] is {log_prob}, expected a finite number not above 0")
        seen: set[tuple[int, int]] = set()
        for node, edge in enumerate(zip(self.parents, self.token_ids, strict=True)):
            parent, token = edge
            if not ROOT <= parent < node:
                raise InvalidArgumentError(f"parents[{node}] is {parent}, expected -1 (the root) or an earlier node")
            if edge in seen:
                raise InvalidArgumentError(
                    f"node {node} repeats token {token} below parent {parent}; siblings must differ"
                )
            seen.add(edge)
        self._check_candidates()

    def _check_candidates(self) -> None:
        if not self.candidates:
            return
        if len(self.candidates) != len(self) + 1:
            raise InvalidArgumentError(
                f"a tree of {len(self)} nodes needs 0 or {len(self) + 1} candidate_counts, got {len(self.candidates)}"
            )
        for node, (parent, token) in enumerate(zip(self.parents, self.token_ids, strict=True)):
            drawn_from = self.candidates[parent + 1]
            if drawn_from is None or token not in drawn_from.token_ids:
                raise InvalidArgumentError(f"node {node} carries token {token}, which its parent's candidate_ids lack")

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Each node's distance from the root; a child of the root has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """The deepest node's depth; 0 for an empty tree."""
        return max(self.depths, default=0)

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """The node that carries a token below a parent: `children[parent, token_id]`."""
        return {edge: node for node, edge in enumerate(zip(self.parents, self.token_ids, strict=True))}

    def children_of(self, parent: int) -> tuple[int, ...]:
        """A node's children in their order; `ROOT` for the root's."""
        return tuple(node for node, above in enumerate(self.parents) if above == parent)

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to `node`, both included; empty for the root."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def depth_first(self) -> tuple[TokenTree, tuple[int, ...]]:
        """The same tree in depth-first order, and which node of this one each of its nodes is.

        A node's likeliest child comes right behind it, so the path of likeliest children stands as it would without
        branches. Draws keep their order.
        """
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(node)
        if self.log_probs and not self.candidates:
            for siblings in below.values():
                siblings.sort(key=lambda node: -self.log_probs[node])
        order: list[int] = []
        pending = below.get(ROOT, [])[::-1]
        while pending:
            order.append(pending.pop())
            pending += below.get(order[-1], [])[::-1]
        if order == list(range(len(self))):
            return self, tuple(order)
        place = {ROOT: ROOT} | {node: place for place, node in enumerate(order)}
        tree = TokenTree(
            token_ids=tuple(self.token_ids[node] for node in order),
            parents=tuple(place[self.parents[node]] for node in order),
            log_probs=tuple(self.log_probs[node] for node in order) if self.log_probs else (),
            candidates=tuple(self.candidates[node + 1] for node in (ROOT, *order)) if self.candidates else (),
        )
        return tree, tuple(order)

    def ancestor_mask(self) -> Tensor:
        """Whom each token may attend to, root first: bool `[1 + nodes, 1 + nodes]`, row and column 0 the root.

        True where the column is the row's node itself or one of its ancestors (DynaTree section 3.4, matrix A without
        its prefix columns).
        """
        size = len(self) + 1
        mask = torch.eye(size, dtype=torch.bool)
        rows = mask.numpy()  # shares memory; row assignment is cheaper there
        for node, parent in enumerate(self.parents, start=1):
            rows[node] |= rows[parent + 1]
        return mask

    @classmethod
    def from_pb(cls, message: tree_pb2.TokenTree, *, max_nodes: int, max_depth: int, vocab_size: int) -> TokenTree:
        """The tree in a message, refused before anything is built where it passes a limit.

        Raises:
            InvalidArgumentError: More than `max_nodes` nodes or `max_depth` levels, a token outside `vocab_size`, or
                arrays that do not form a tree.
        """
        nodes = max(len(message.token_ids), len(message.parents), len(message.log_probs))
        if nodes > max_nodes:
            raise InvalidArgumentError(f"the tree has {nodes} nodes, at most {max_nodes} are accepted (max_tree_nodes)")
        check_token_ids(message.token_ids, vocab_size, "token_ids")
        tree = cls(
            tuple(message.token_ids),
            tuple(message.parents),
            tuple(message.log_probs),
            _candidates_from_pb(message, vocab_size),
        )
        if tree.depth > max_depth:
            raise InvalidArgumentError(
                f"the tree is {tree.depth} levels deep, at most {max_depth} fit before the length or context limit"
            )
        return tree

    def to_pb(self, *, round_: int, base_length: int) -> tree_pb2.TokenTree:
        """The message for round `round_` of a session with `base_length` committed tokens."""
        return tree_pb2.TokenTree(
            round=round_,
            base_length=base_length,
            token_ids=self.token_ids,
            parents=self.parents,
            log_probs=self.log_probs,
            candidate_counts=[0 if each is None else len(each.token_ids) for each in self.candidates],
            candidate_ids=[token for each in self.candidates if each for token in each.token_ids],
            candidate_probs=[prob for each in self.candidates if each for prob in each.probs],
        )


def _candidates_from_pb(message: tree_pb2.TokenTree, vocab_size: int) -> tuple[Candidates | None, ...]:
    counts = message.candidate_counts
    expected = sum(counts) if len(counts) <= len(message.token_ids) + 1 else -1
    if not len(message.candidate_ids) == len(message.candidate_probs) == expected:
        raise InvalidArgumentError(
            f"{len(counts)} candidate_counts for {len(message.token_ids)} nodes, {len(message.candidate_ids)} "
            f"candidate_ids and {len(message.candidate_probs)} candidate_probs do not fit together"
        )
    check_token_ids(message.candidate_ids, vocab_size, "candidate_ids")
    ids, probs = iter(message.candidate_ids), iter(message.candidate_probs)
    return tuple(
        Candidates(tuple(islice(ids, count)), tuple(islice(probs, count))) if count else None for count in counts
    )


def check_token_ids(token_ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Refuse ids that the model has no embedding for; on a GPU one would poison the process.

    Raises:
        InvalidArgumentError: An id is not in [0, vocab_size).
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for index, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise InvalidArgumentError(f"{name}[{index}] is {token}, the model's vocabulary is [0, {vocab_size})")
