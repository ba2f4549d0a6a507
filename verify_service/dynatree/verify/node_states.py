"""The states of a session's grammar after the nodes of a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from dynatree.common.tree import ROOT, TokenTree
from dynatree.engine.grammar.masking import packed
from dynatree.engine.grammar.state import GrammarState


class NodeStates:
    """The grammar's states at the root and after each node, found when they are asked for, and kept for the commit.

    Args:
        tree: The tree.
        grammar: The grammar's state at the root.
    """

    def __init__(self, tree: TokenTree, grammar: GrammarState) -> None:
        self._tree = tree
        self._found: dict[int, GrammarState | None] = {ROOT: grammar}

    def after(self, node: int) -> GrammarState | None:
        """Return the state after a node; None if the grammar forbids a token on the path to it."""
        if node not in self._found:
            above = self.after(self._tree.parents[node])
            self._found[node] = above and above.after(self._tree.token_ids[node])
        return self._found[node]

    def masks(self, vocab_size: int, device: torch.device) -> Tensor:
        """Return the masks of the root and of all nodes; see `packed`. A forbidden node's mask is never read."""
        return packed([self.after(node) for node in range(ROOT, len(self._tree))], vocab_size, device)
