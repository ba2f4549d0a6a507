"""The logits of one round under a grammar."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dynatree.common.tree import ROOT, TokenTree
from dynatree.engine.grammar.state import GrammarState


class MaskedLogits:
    """The logits after the root and after each node, masked by the grammar's state there.

    A row is masked when it is asked for, so a round masks the rows of the accepted path alone.

    Args:
        logits: One row for the root and one for each node, `[1 + nodes, vocabulary]`.
        tree: The tree.
        grammar: The grammar's state at the root; None leaves the logits as they are.
    """

    def __init__(self, logits: Tensor, tree: TokenTree, grammar: GrammarState | None) -> None:
        self._logits = logits
        self._tree = tree
        self._states: dict[int, GrammarState] = {} if grammar is None else {ROOT: grammar}
        self._rows: dict[int, Tensor] = {}

    def after(self, node: int) -> Tensor | None:
        """Return the row after a node, `[1, vocabulary]`; before it, those of the node's ancestors were asked for.

        None means that the grammar cannot be followed behind the node. The commit then ends with the node, since only
        the next round may need a token behind it.

        Raises:
            GrammarError: The grammar cannot be followed behind the root.
        """
        row = self._logits[node + 1 : node + 2]
        if not self._states:
            return row
        if node not in self._rows:
            state = self._state(node)
            if state.error is not None:
                if node == ROOT:
                    raise state.error
                return None
            allowed = torch.from_numpy(state.allowed(row.shape[-1])).to(row.device)
            self._rows[node] = row.masked_fill(~allowed, -math.inf)
        return self._rows[node]

    def rows(self, nodes: Sequence[int]) -> Tensor:
        """Return the rows after several nodes behind which a token was chosen, `[nodes, vocabulary]`."""
        if not self._states:
            return self._logits[[node + 1 for node in nodes]]
        return torch.cat([self._rows[node] for node in nodes])

    def _state(self, node: int) -> GrammarState:
        state = self._states.get(node)
        if state is None:
            state = self._state(self._tree.parents[node]).after(self._tree.token_ids[node])
            assert state is not None, "a token that the grammar forbids is never chosen"
            self._states[node] = state
        return state
