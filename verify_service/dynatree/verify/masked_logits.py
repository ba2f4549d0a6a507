"""The logits of one round under a grammar."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynatree.common.tree import ROOT
from dynatree.engine.grammar.masking import masked, packed
from dynatree.verify.node_states import NodeStates


class MaskedLogits:
    """The logits after the root and after each node, masked by the grammar's state there.

    Args:
        logits: One row for the root and one for each node, `[1 + nodes, vocabulary]`.
        states: The grammar's states there; None leaves the logits as they are.
        masks: The masks of all rows, by which all are masked at once. None masks a row when it is asked for, so that a
            round masks the rows of the accepted path alone.

    Attributes:
        rows_at_once: All rows, masked, `[1 + nodes, vocabulary]`; None if each is masked when it is asked for.
    """

    def __init__(self, logits: Tensor, states: NodeStates | None, masks: Tensor | None = None) -> None:
        self._logits = logits
        self._states = states
        self._rows: dict[int, Tensor] = {}
        self.rows_at_once = logits if states is None else None if masks is None else masked(logits, masks)

    def after(self, node: int) -> Tensor | None:
        """Return the row after a node, `[1, vocabulary]`.

        None means that the grammar cannot be followed after the node. The commit then ends with the node, since only
        the next round may need a token after it.

        Raises:
            GrammarError: The grammar cannot be followed after the root.
        """
        if self._states is not None:
            state = self._states.after(node)
            assert state is not None, "a token that the grammar forbids is never chosen"
            if state.error is not None:
                if node == ROOT:
                    raise state.error
                return None
            if self.rows_at_once is None:
                if node not in self._rows:
                    row = self._logits[node + 1 : node + 2]
                    self._rows[node] = masked(row, packed([state], row.shape[-1], row.device))
                return self._rows[node]
        assert self.rows_at_once is not None
        return self.rows_at_once[node + 1 : node + 2]

    def rows(self, nodes: Sequence[int]) -> Tensor:
        """Return the rows of several nodes after which a token was chosen, `[nodes, vocabulary]`."""
        if self.rows_at_once is not None:
            return self.rows_at_once[[node + 1 for node in nodes]]
        return torch.cat([self._rows[node] for node in nodes])
