"""The objective of `throughput`: the expected tokens of a tree minus the tokens that its time is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.pass_statistics import PassStatistics
from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.control.round_costs import Costs
from dynatree.draft.control.verify_cost import largest_tree
from dynatree.draft.policies.papers.child_mass import ChildMass


@dataclass(frozen=True)
class Plan:
    """A decision to expand, for an expected gain of `gain` tokens: leaves whose value is above `threshold` pay."""

    threshold: float
    gain: float


class Objective:
    """Sizes trees for the most tokens a second. A second is worth lambda tokens:

        G(n)   = sum of the n highest values - lambda V(n)       the tokens that a tree of n nodes gains
        send the n nodes of highest value,   n = argmax G
        expand a level iff, with the nodes expected from it and from k - 1 more levels for some k,

            max G(with them) - max G(without them) > lambda (k D + contention of the first)

    V(n) and D are the seconds of a verification and of a draft forward pass (`Costs`). While the session is alone,
    lambda is the best ratio among the nodes at hand (CaDDTree, arXiv:2606.01813):

        lambda = max over n of (1 + sum of the n highest values) / (seconds drafted + V(n))

    With this lambda a level is expanded if and only if it is expected to raise the round's tokens per second
    (Dinkelbach, 1967).

    If other sessions share the target's passes, each row delays all of them, and the verify service reports the price
    of a row in tokens. Then lambda (V(n) - V(0)) is n times the price, and lambda is the session's own rate. D is the
    full time of a draft forward pass that m sessions share: all m wait for it, which costs them m lambda D tokens
    together and lambda D tokens each. A session begins with the last price that any session learnt, if others are open.
    """

    def __init__(self, costs: Costs, control: ControlSettings) -> None:
        self._costs = costs
        self._control = control
        self._tokens = 0.0
        self._seconds = 0.0
        self._row_price: float | None = None  # tokens per row; None while the session is alone
        self._drafted = 0.0  # seconds of this round's draft forward passes
        self._ratio = 1.0 / costs.verify(0)

    def begin(self) -> None:
        """Begin a round, with nothing drafted yet."""
        self._drafted = 0.0
        if not self._seconds:
            self._row_price = self._costs.row_price if self._costs.open_sessions > 0 else None

    def end(self) -> None:
        """End the session."""
        if self._seconds:  # a pass has counted it
            self._costs.open_sessions = max(self._costs.open_sessions - 1, 0)

    def spend(self, seconds: float) -> None:
        """Count the seconds of one draft forward pass of this round."""
        self._drafted += seconds

    def settle(self, values: Sequence[float]) -> None:
        """Set lambda to the best ratio among the nodes at hand, whose values are in descending order."""
        size, tokens = 0, 1.0  # the target's own token
        self._ratio = tokens / (self._drafted + self._costs.verify(0))
        while size < len(values):
            larger = min(largest_tree(size + 1), len(values))
            tokens += sum(values[size:larger])
            size = larger
            self._ratio = max(self._ratio, tokens / (self._drafted + self._costs.verify(size)))

    def observe(self, tokens: int, seconds: float, pass_statistics: PassStatistics) -> None:
        """Take in one round: its committed tokens, its seconds, waiting included, and the pass that verified it."""
        if pass_statistics.open_sessions <= 1:
            self._row_price = None
        elif self._row_price is None:
            self._row_price = pass_statistics.row_price
        else:
            self._row_price += self._control.row_price_step * (pass_statistics.row_price - self._row_price)
        self._costs.row_price = self._row_price
        self._costs.open_sessions = pass_statistics.open_sessions
        self._tokens = self._control.rate_fade * self._tokens + tokens
        self._seconds = self._control.rate_fade * self._seconds + seconds

    @property
    def rate(self) -> float:
        """Lambda: the value of a second, in tokens."""
        if self._row_price is not None and self._seconds:
            return self._tokens / self._seconds
        return self._ratio

    def best_size(self, values: Sequence[float]) -> tuple[float, int]:
        """Return the maximum of G and its n, for node values in descending order.

        V is constant within a bucket of sizes, so G is highest at a bucket's largest tree or at all nodes.
        """
        if self._row_price is not None:
            worth = [value - self._row_price for value in values if value > self._row_price]
            return sum(worth), len(worth)
        rate, verify = self.rate, self._costs.verify
        total, size = 0.0, 0
        highest, best = total - rate * verify(size), size
        while size < len(values):
            larger = min(largest_tree(size + 1), len(values))
            total += sum(values[size:larger])
            size = larger
            gain = total - rate * verify(size)  # G(n)
            if gain > highest:
                highest, best = gain, size
        return highest, best

    def forward_seconds(self, *, from_root: bool) -> float:
        """D of one draft forward pass; a pass from the root also prolongs the verification."""
        contention = self._costs.draft_contention if from_root and self._row_price is None else 0.0
        return self._costs.draft_forward_seconds + contention

    def plan(
        self, known: Sequence[float], leaves: Sequence[float], seconds: float, mass: ChildMass, max_nodes: int
    ) -> Plan | None:
        """Plan the expansion; None if no number of further levels is expected to gain more than it costs.

        Each further level is expected to add below a leaf one best descendant and its siblings. A node's value times
        `mass` gives the values of its best child and of all its children.

        Args:
            known: The values of the nodes at hand, in descending order.
            leaves: The values of the nodes that may be expanded.
            seconds: D of the next forward pass.
            mass: Expected values of children.
            max_nodes: Size limit of the tree.
        """
        self.settle(known)
        now, _ = self.best_size(known)
        highest = now
        price, further = self.rate * seconds, self.rate * self.forward_seconds(from_root=False)
        others = max(mass.children - mass.best, 0.0)
        expected: list[float] = []
        plan = None
        for levels in range(1, self._control.foresight[-1] + 1):
            expected += [leaf * share for leaf in leaves for share in (mass.best, others)]
            leaves = [leaf * mass.best for leaf in leaves]
            if levels not in self._control.foresight:
                continue
            merged = sorted([*known, *expected], reverse=True)[:max_nodes]
            gain, size = self.best_size(merged)
            gain -= price + (levels - 1) * further
            if gain > highest:
                highest, plan = gain, Plan(self._threshold(merged, size), gain - now)
        return plan

    def _threshold(self, values: Sequence[float], size: int) -> float:
        """The value above which a node is sent, if a tree of `size` of these nodes is best."""
        if self._row_price is not None:
            return self._row_price
        room = largest_tree(size)
        return values[room] if room < len(values) else 0.0

    @property
    def row_price(self) -> float | None:
        """The price of a row for all sessions that share the target's passes, in tokens; None for a session alone."""
        return self._row_price
