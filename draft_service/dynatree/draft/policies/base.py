"""The interface of policies, and the outcome of a round that they learn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MAX_TEMPERATURE
from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.tree import MAX_CANDIDATES, ROOT, TokenTree
from dynatree.draft.control.round_costs import RoundCost
from dynatree.draft.policies.drawing import DEFAULT_DRAWING, Drawing
from dynatree.draft.policies.growing_tree import GrowingTree


class Outcome(Protocol):
    """The outcome of a round, from which a policy learns; `dynatree.draft.growth.round.Round` implements it."""

    @property
    def tree(self) -> TokenTree:
        """The tree that was sent."""

    @property
    def accepted(self) -> Sequence[int]:
        """The tree's nodes on the accepted path, from the root down."""

    @property
    def next_token(self) -> int | None:
        """The target's own token after the accepted path; None if the completion ended before it."""

    @property
    def draft_forwards(self) -> int:
        """Number of draft forward passes of the tree."""

    @property
    def draft_seconds(self) -> float:
        """Seconds of growing and committing on the draft side, with this session's share of shared forward passes."""

    @property
    def others_draft_seconds(self) -> float:
        """Seconds of the other sessions' shares of the same draft forward passes."""

    @property
    def verify_seconds(self) -> float:
        """Seconds of the verify service's work on the tree, and of the transport."""

    @property
    def pass_statistics(self) -> PassStatistics:
        """The target's pass that verified the tree."""

    @property
    def waited_seconds(self) -> float:
        """The other seconds of the round: waiting, mostly for the verifications of other sessions."""


def cost_of(outcome: Outcome, *, caught_up: bool = True) -> RoundCost:
    """The cost of a round; `caught_up` as in `RoundCost`."""
    return RoundCost(
        nodes=len(outcome.tree),
        verify_seconds=outcome.verify_seconds,
        draft_forwards=outcome.draft_forwards,
        draft_seconds=outcome.draft_seconds + outcome.others_draft_seconds,
        caught_up=caught_up,
        shared=outcome.pass_statistics.open_sessions > 1,
    )


class Policy(ABC):
    """Decides the shape of one session's trees. A policy may keep state between rounds, and belongs to one session.

    Attributes:
        breadth: Maximum number of children of a node, and so of proposals to request from the draft model. With 0 the
            draft model is not used.
        supports_residual: Whether the policy can grow a tree of random draws (residual sampling): it never keeps or
            drops a node because of the node's own token.
        drawing: Settings of the draft's distribution.
        learns_from_others: Whether the policy's trees depend on other requests. Under residual sampling the session
            then draws with a fresh seed, since the policy may have learnt from the noise of the request's seed.
    """

    breadth: int
    supports_residual: bool = False
    drawing: Drawing = DEFAULT_DRAWING
    learns_from_others: bool = False

    def reads_prompt(self, seconds: float, tokens: int) -> bool:
        """Decide whether the draft model reads the prompt now, or for the first tree that asks it.

        Args:
            seconds: Expected time of reading.
            tokens: Most tokens of the completion.
        """
        return True

    def start(self, tree: GrowingTree) -> list[int]:
        """Choose the nodes to expand first, given the empty tree. May add nodes that need no draft model.

        Returns:
            The nodes to expand, the root included; nothing to leave out the draft model.
        """
        return [ROOT]

    @abstractmethod
    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add children to the nodes `level`, all of which have proposals, and return the nodes to expand next.

        The first call gets the result of `start`, each later call the result of the call before, until that is empty.
        """

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """Choose the nodes to send: parents before children, and no node without its parent."""
        return range(len(tree))

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 - most policies have nothing to learn
        """Learn from a round."""

    def end(self) -> None:  # noqa: B027 - most policies learn from rounds alone
        """Learn from the whole completion, after its last round. Not called if the completion is cancelled."""

    def parameters(self) -> dict[str, float]:
        """The learnt quantities that steer the next tree, by name."""
        return {}


@dataclass(frozen=True, kw_only=True)
class DrawingSettings:
    """Settings of all policies that can draw: the draft's temperature (0: the request's), and the candidates of draws.

    Any draft distribution is allowed: residual acceptance is exact for all of them, and greedy decoding and shared
    noise are exact for every tree.
    """

    draft_temperature: float = 0.0
    candidates: int = 32

    def __post_init__(self) -> None:
        check_range("draft_temperature", self.draft_temperature, 0.0, MAX_TEMPERATURE)
        check_range("candidates", self.candidates, 1, MAX_CANDIDATES)

    @property
    def drawing(self) -> Drawing:
        """Settings of the draft's distribution."""
        return Drawing(self.draft_temperature or None, self.candidates)


MAX_NUMBERS = 64  # longest list that a setting accepts


def check_length(name: str, values: Sequence[float], high: int = MAX_NUMBERS) -> None:
    """Refuse a list without numbers, or with more than `high`.

    Raises:
        InvalidArgumentError: The message names the setting, its length and the limit.
    """
    if not 1 <= len(values) <= high:
        raise InvalidArgumentError(f"{name} has {len(values)} numbers, expected 1 to {high}")


def check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse a setting that is out of range.

    Raises:
        InvalidArgumentError: The message names the setting, the value and the range.
    """
    if not (low < value if open_low else low <= value) or not value <= high:
        raise InvalidArgumentError(
            f"{name} is {value:g}, expected a number in {'(' if open_low else '['}{low:g}, {high:g}]"
        )
