"""One round: the tree that was sent, the commit that answered it, and what both took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.messages import Commit
from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.tree import TokenTree


@dataclass(frozen=True)
class Growth:
    """A grown tree, and what it took; times are seconds.

    Attributes:
        tree: What is sent.
        seconds: Growing it, its draft forwards included.
        forward_seconds: The draft forwards.
        draft_forwards: Their number.
        commit_seconds: What went before: taking in the last commit, and learning from its round.
        waited_seconds: Other sessions' shares of the draft forwards, and their trees.
        others_seconds: Other sessions' shares of the draft forwards.
    """

    tree: TokenTree
    seconds: float
    forward_seconds: float
    draft_forwards: int
    commit_seconds: float = 0.0
    waited_seconds: float = 0.0
    others_seconds: float = 0.0


@dataclass(frozen=True)
class Round:
    """A tree and its commit; times are seconds.

    Attributes:
        growth: The tree, and what it took to grow.
        commit: What the target made of it.
        exchange_seconds: From sending the tree to having its commit.
        ahead_seconds: How long a draft forward that read ahead went on after that.
    """

    growth: Growth
    commit: Commit
    exchange_seconds: float
    ahead_seconds: float = 0.0

    @property
    def tree(self) -> TokenTree:
        """What was sent."""
        return self.growth.tree

    @property
    def accepted(self) -> Sequence[int]:
        """The tree's nodes on the accepted path, from the root down."""
        return self.commit.accepted_nodes

    @property
    def next_token(self) -> int | None:
        """The target's own token below the last of them; None where the completion ended before it."""
        own = self.commit.token_ids[len(self.accepted) :]
        return own[0] if own else None

    @property
    def shared(self) -> PassStatistics:
        """The target's pass that verified the tree."""
        return self.commit.shared

    @property
    def draft_forwards(self) -> int:
        """Draft forwards that growing the tree took."""
        return self.growth.draft_forwards

    @property
    def draft_seconds(self) -> float:
        """Growing the tree, and taking in the commit before it."""
        return self.growth.seconds + self.growth.commit_seconds

    @property
    def others_draft_seconds(self) -> float:
        """Of the draft forwards, what was other sessions' share; the session waited for it."""
        return self.growth.others_seconds

    @property
    def wire_seconds(self) -> float:
        """Of the exchange, what the stream took to carry both messages: all but the verify service's own time."""
        return self.exchange_seconds - self.commit.timings.total

    @property
    def verify_seconds(self) -> float:
        """The verify service's own work on the tree, and the wire."""
        return self.exchange_seconds - self._queued_seconds

    @property
    def waited_seconds(self) -> float:
        """What else the round took: other sessions' forwards, of either model, and a forward that read ahead."""
        return self._queued_seconds + self.ahead_seconds + self.growth.waited_seconds

    @property
    def _queued_seconds(self) -> float:
        """Of the verify service's time, what was no work on the tree."""
        timings = self.commit.timings
        worked = timings.forward + timings.accept + timings.commit
        return min(max(timings.total - worked, 0.0), self.exchange_seconds)
