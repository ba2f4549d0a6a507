"""What a policy is, and what it learns of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MAX_TEMPERATURE
from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.tree import MAX_CANDIDATES, ROOT, TokenTree
from dynatree.draft.drawing import DEFAULT_DRAWING, Drawing
from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.round_costs import RoundCost


class Outcome(Protocol):
    """What a policy learns of a round: `dynatree.draft.round.Round` is one."""

    @property
    def tree(self) -> TokenTree:
        """The tree that was sent."""

    @property
    def accepted(self) -> Sequence[int]:
        """Its nodes on the accepted path, from the root down."""

    @property
    def next_token(self) -> int | None:
        """The target's own token below the last of them; None where the completion ended before it."""

    @property
    def draft_forwards(self) -> int:
        """Draft forwards that growing it took."""

    @property
    def draft_seconds(self) -> float:
        """Seconds of growing and committing, on the draft side; of a shared draft forward, this session's share."""

    @property
    def others_draft_seconds(self) -> float:
        """Seconds of the same draft forwards that were other sessions' shares."""

    @property
    def verify_seconds(self) -> float:
        """Seconds of the verify service's own work on it, and of the wire."""

    @property
    def shared(self) -> PassStatistics:
        """The target's pass that verified it."""

    @property
    def waited_seconds(self) -> float:
        """Seconds between sending it and going on that neither covers: above all other sessions' verifications."""


def cost_of(outcome: Outcome, *, caught_up: bool = True) -> RoundCost:
    """What a round took; `caught_up` as in `RoundCost`."""
    return RoundCost(
        nodes=len(outcome.tree),
        verify_seconds=outcome.verify_seconds,
        draft_forwards=outcome.draft_forwards,
        draft_seconds=outcome.draft_seconds + outcome.others_draft_seconds,
        caught_up=caught_up,
        shared=outcome.shared.open_sessions > 1,
    )


class Policy(ABC):
    """Decides the shape of one session's trees. It may carry state from round to round; no two sessions share one.

    Attributes:
        breadth: The most children that it ever gives a node: how many proposals the draft model is asked for. 0: the
            draft model is not asked.
        supports_residual: Whether it can grow a tree of random draws (residual sampling): it never keeps a node, or
            leaves one out, for the token that the node carries.
        drawing: How the draft's distribution is made.
        learns_from_others: Whether its trees depend on other requests. Under residual sampling such a session draws
            with a seed of its own, since what it has learnt may have come of the noise of the request's seed.
    """

    breadth: int
    supports_residual: bool = False
    drawing: Drawing = DEFAULT_DRAWING
    learns_from_others: bool = False

    def start(self, tree: GrowingTree) -> list[int]:
        """The nodes to expand first, given the empty tree: the root or nothing. May add nodes that need no model."""
        return [ROOT]

    @abstractmethod
    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add nodes below the nodes `level`, all of which have proposals, and name the nodes to expand next.

        Called first with what `start` returned, then with what it returned itself, until that is nothing.
        """

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """The nodes to send of those that were added: parents before children, and no node without its parent."""
        return range(len(tree))

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 - most policies have nothing to learn
        """Learn from a round."""

    def end(self) -> None:  # noqa: B027 - most policies learn from rounds alone
        """Learn from the completion, which has ended after its last round; not of one that was cancelled."""

    def parameters(self) -> dict[str, float]:
        """The learnt quantities that steer the next tree, by name."""
        return {}


@dataclass(frozen=True, kw_only=True)
class DrawingSettings:
    """What all policies that can draw have: the draft's temperature (0: the request's), and the candidates of draws.

    The draft's distribution may be any: residual acceptance is exact for all of them, and greedy decoding and shared
    noise are exact for every tree.
    """

    draft_temperature: float = 0.0
    candidates: int = 32

    def __post_init__(self) -> None:
        check_range("draft_temperature", self.draft_temperature, 0.0, MAX_TEMPERATURE)
        check_range("candidates", self.candidates, 1, MAX_CANDIDATES)

    @property
    def drawing(self) -> Drawing:
        """How the draft's distribution is made."""
        return Drawing(self.draft_temperature or None, self.candidates)


MAX_NUMBERS = 64  # of a setting that is a list


def check_length(name: str, values: Sequence[float], high: int = MAX_NUMBERS) -> None:
    """Refuse a list without numbers, or with more than `high`.

    Raises:
        InvalidArgumentError: The message names the setting, its length and the limit.
    """
    if not 1 <= len(values) <= high:
        raise InvalidArgumentError(f"{name} has {len(values)} numbers, expected 1 to {high}")


def check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse a setting out of its range.

    Raises:
        InvalidArgumentError: The message names the setting, the value and the range.
    """
    if not (low < value if open_low else low <= value) or not value <= high:
        raise InvalidArgumentError(
            f"{name} is {value:g}, expected a number in {'(' if open_low else '['}{low:g}, {high:g}]"
        )
