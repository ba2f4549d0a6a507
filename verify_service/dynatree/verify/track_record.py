"""What the probabilities of a session's trees have proved to be worth."""

from __future__ import annotations

from dataclasses import dataclass

from dynatree.common.tree import TokenTree
from dynatree.verify.pass_plan import path_probs

FADE = 0.9  # weight of the past at each tree
PRIOR = 2.0  # nodes, of which as many as promised count as accepted


@dataclass(eq=False)
class TrackRecord:
    """Accepted nodes of a session's trees, over the nodes that its path probabilities promised.

        worth = (PRIOR + accepted nodes) / (PRIOR + sum of p(u) over the verified nodes u),   the past fading

    Some policies send calibrated probabilities, others the draft's own, and any client may send what it likes. By this
    factor all bid in one currency, tokens. A session none of whose nodes are admitted comes back to 1, and is tried
    again.
    """

    _accepted: float = 0.0
    _promised: float = 0.0

    @property
    def worth(self) -> float:
        """Tokens for each token promised."""
        return (PRIOR + self._accepted) / (PRIOR + self._promised)

    def observe(self, verified: TokenTree, accepted: int) -> None:
        """Take in what was verified of a tree, and how many of its nodes were accepted."""
        self._accepted = FADE * self._accepted + accepted
        self._promised = FADE * self._promised + sum(path_probs(verified))
