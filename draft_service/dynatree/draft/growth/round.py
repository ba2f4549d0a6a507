"""One round: the tree that was sent, the commit that answered it, and the time of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.messages import Commit
from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.tree import TokenTree


@dataclass(frozen=True)
class Growth:
    """A grown tree and its costs; times are seconds.

    Attributes:
        tree: The tree to send.
        seconds: Time to grow the tree, this session's share of the draft forward passes included.
        forward_seconds: This session's share of the draft forward passes.
        draft_forwards: Number of draft forward passes.
        commit_seconds: Time before growth to take in the last commit and learn from its round.
        waited_seconds: Time waiting for other sessions: their shares of the draft forward passes, and their growth.
        others_seconds: Other sessions' shares of the draft forward passes.
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
        growth: The tree, and the costs of growing it.
        commit: The target's answer.
        exchange_seconds: Time from sending the tree to receiving its commit.
        ahead_seconds: Time after that until a running forward pass of drafting ahead ended.
    """

    growth: Growth
    commit: Commit
    exchange_seconds: float
    ahead_seconds: float = 0.0

    @property
    def tree(self) -> TokenTree:
        """The tree that was sent."""
        return self.growth.tree

    @property
    def accepted(self) -> Sequence[int]:
        """The tree's nodes on the accepted path, from the root down."""
        return self.commit.accepted_nodes

    @property
    def next_token(self) -> int | None:
        """The target's own token after the accepted path; None if the completion ended before it."""
        own = self.commit.token_ids[len(self.accepted) :]
        return own[0] if own else None

    @property
    def pass_statistics(self) -> PassStatistics:
        """The target's pass that verified the tree."""
        return self.commit.pass_statistics

    @property
    def draft_forwards(self) -> int:
        """Number of draft forward passes of the tree."""
        return self.growth.draft_forwards

    @property
    def draft_seconds(self) -> float:
        """Time to grow the tree and to take in the commit before it."""
        return self.growth.seconds + self.growth.commit_seconds

    @property
    def others_draft_seconds(self) -> float:
        """Other sessions' shares of the draft forward passes, which this session waited for."""
        return self.growth.others_seconds

    @property
    def wire_seconds(self) -> float:
        """Time of the exchange without the verify service's own time: the transport of both messages."""
        return self.exchange_seconds - self.commit.timings.total

    @property
    def verify_seconds(self) -> float:
        """Time of the verify service's work on the tree, and of the transport."""
        return self.exchange_seconds - self._queued_seconds

    @property
    def waited_seconds(self) -> float:
        """The rest of the round: waiting for other sessions on either model, and for drafting ahead to stop."""
        return self._queued_seconds + self.ahead_seconds + self.growth.waited_seconds

    @property
    def _queued_seconds(self) -> float:
        """Time in the verify service without work on the tree."""
        timings = self.commit.timings
        worked = timings.forward + timings.accept + timings.commit
        return min(max(timings.total - worked, 0.0), self.exchange_seconds)
