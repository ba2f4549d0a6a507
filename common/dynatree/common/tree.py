"""The token tree: flat, immutable, and valid once constructed.

DynaTree section 3.3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dynatree.common.errors import InvalidArgumentError

ROOT = -1
MAX_CANDIDATES = 256  # per distribution, so that those of the largest tree fit into a message of 4 MiB
MAX_DRAWS = 64  # draws with replacement below one node


@dataclass(frozen=True)
class DraftDistribution:
    """A truncated draft distribution, from which the children of one node were drawn.

    `draws` is empty if the children were drawn without replacement; they are then in the order of the draws. Otherwise
    `draws` has one entry for each draw with replacement: the index of the drawn child among its siblings.

    Raises:
        InvalidArgumentError: The values are no distribution over 1 to `MAX_CANDIDATES` different tokens, or the draws
            are invalid.
    """

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]
    draws: tuple[int, ...] = ()

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
        if len(self.draws) > MAX_DRAWS:
            raise InvalidArgumentError(
                f"a draft distribution has {len(self.draws)} draws, at most {MAX_DRAWS} are accepted"
            )
        drawn = 0  # children so far
        for place in self.draws:
            if not 0 <= place <= drawn:
                raise InvalidArgumentError(
                    f"draws names child {place} after {drawn} children, expected one of them or the next"
                )
            drawn = max(drawn, place + 1)


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens below the last committed token (the root, which is not stored).

    Node `i` carries `token_ids[i]`. Its parent is node `parents[i]`, or the root if that is `ROOT`.
    Parents precede children, and siblings carry different tokens, so a sequence of tokens names at most one path.
    `log_probs[i]` is the draft's natural log-probability of node `i` given its parent.

    `candidates` is empty unless children were drawn from distributions that the verify service needs (DySpec's
    Algorithm 3). Then it has one entry for the root and one for each node, None if no child was drawn there, and
    siblings are in the order in which they were first drawn.

    Raises:
        InvalidArgumentError: The arrays do not describe such a tree.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    candidates: tuple[DraftDistribution | None, ...] = ()

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
        siblings = Counter(self.parents)
        for node, drawn_from in enumerate(self.candidates, start=ROOT):
            if drawn_from and drawn_from.draws and max(drawn_from.draws) + 1 != siblings[node]:
                raise InvalidArgumentError(
                    f"draws below node {node} name {max(drawn_from.draws) + 1} children, the tree has {siblings[node]}"
                )

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
        """Map from (parent, token id) to the child node that carries the token."""
        return {edge: node for node, edge in enumerate(zip(self.parents, self.token_ids, strict=True))}

    def children_of(self, parent: int) -> tuple[int, ...]:
        """The children of a node, in order; `ROOT` stands for the root."""
        return tuple(node for node, above in enumerate(self.parents) if above == parent)

    def take(self, nodes: Sequence[int]) -> TokenTree:
        """The tree of the given nodes, in the given order, without a second validation.

        Args:
            nodes: Node indices, each after its parent. For a tree with `candidates`, all nodes must be given, and
                siblings must keep their order.
        """
        if list(nodes) == list(range(len(self))):
            return self
        place = {node: place for place, node in enumerate((ROOT, *nodes), start=ROOT)}
        taken = object.__new__(TokenTree)
        for name, value in (
            ("token_ids", tuple(self.token_ids[node] for node in nodes)),
            ("parents", tuple(place[self.parents[node]] for node in nodes)),
            ("log_probs", tuple(self.log_probs[node] for node in nodes) if self.log_probs else ()),
            ("candidates", tuple(self.candidates[node + 1] for node in (ROOT, *nodes)) if self.candidates else ()),
        ):
            object.__setattr__(taken, name, value)
        return taken

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to `node`, both included; empty for the root."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))


def check_token_ids(token_ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Refuse token ids without an embedding; on a GPU, one such id would make the CUDA context unusable.

    Raises:
        InvalidArgumentError: An id is not in [0, vocab_size).
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for index, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise InvalidArgumentError(f"{name}[{index}] is {token}, the model's vocabulary is [0, {vocab_size})")
