"""The proven worth of the probabilities in a session's trees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynatree.common.tree import TokenTree
from dynatree.verify.pass_plan import path_probs

FADE = 0.9  # factor applied to past trees, once per tree
PRIOR = 2.0  # pseudo-nodes that count as both promised and accepted


@dataclass(eq=False)
class AcceptanceRecord:
    """Ratio of the accepted nodes in a session's trees to the number that its path probabilities promised.

        worth = (PRIOR + accepted nodes) / (PRIOR + sum of p(u) over the verified nodes u),   with the past fading

    Some policies send calibrated probabilities, some the draft model's own, and a client may send any values. This
    factor converts them all to the same unit, expected tokens. The worth of a session without admitted nodes returns to
    1, so the session is tried again.
    """

    _accepted: float = 0.0
    _promised: float = 0.0

    @property
    def worth(self) -> float:
        """Accepted tokens per promised token."""
        return (PRIOR + self._accepted) / (PRIOR + self._promised)

    def observe(self, tree: TokenTree, verified: Iterable[int], accepted: int) -> None:
        """Record the verified nodes of a tree, and the number of those that were accepted."""
        probs = path_probs(tree)
        self._accepted = FADE * self._accepted + accepted
        self._promised = FADE * self._promised + sum(probs[node] for node in verified)
