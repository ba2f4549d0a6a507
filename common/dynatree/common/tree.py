"""The token tree: flat, immutable, valid once constructed.

DynaTree section 3.3 (the tree) and section 3.4 (serialisation and the tree attention mask).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dynatree.common.errors import InvalidArgumentError
from dynatree.v1 import tree_pb2

ROOT = -1


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens below the last committed one (the root, which is not stored).

    Node `i` carries `token_ids[i]` and hangs below node `parents[i]`, or below the root where that is `ROOT`.
    Parents precede children, and siblings carry different tokens, so a sequence of tokens names at most one path.
    `log_probs[i]` is the draft's natural log-probability of node `i` given its parent.

    Raises:
        InvalidArgumentError: The arrays do not describe such a tree.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()

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

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to `node`, both included; empty for the root."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

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
        tree = cls(tuple(message.token_ids), tuple(message.parents), tuple(message.log_probs))
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
