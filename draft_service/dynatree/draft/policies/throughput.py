"""Control of speed: a tree grows and is sent as far as its expected gain exceeds its cost on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from dynatree.common.limits import MOST_TREE_NODES
from dynatree.common.tree import ROOT
from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.control.round_costs import Costs
from dynatree.draft.policies.base import Outcome, Policy, check_range, cost_of
from dynatree.draft.policies.best_first import BestFirst
from dynatree.draft.policies.calibrated import CalibratedValue
from dynatree.draft.policies.growing_tree import GrowingTree
from dynatree.draft.policies.merged import MergedNGrams, MergedSettings
from dynatree.draft.policies.objective import Objective, Plan
from dynatree.draft.policies.papers.child_mass import ChildMass, open_mass
from dynatree.draft.policies.pause import Pause

LEAST_NODES = 63
NEARLY_FREE = 1.5  # highest cost of a nearly free verification, in plain steps


@dataclass(frozen=True)
class ThroughputSettings(MergedSettings):
    """Upper limits of the control, and the n-gram settings of `ngram`.

    `max_nodes` of 0 means the largest size that startup measurements show to be nearly free, at least `LEAST_NODES`.
    `breadth` of 0 means that the draft model is not used: all candidates are n-grams.
    """

    LEAST_BREADTH: ClassVar[int] = 0

    max_nodes: int = 0
    max_depth: int = 16
    breadth: int = 4
    longest: int = 8
    shortest: int = 2
    ngram_depth: int = 63
    branches: int = 2

    def __post_init__(self) -> None:
        check_range("max_nodes", self.max_nodes, 0, MOST_TREE_NODES)
        if self.max_nodes:
            super().__post_init__()
        else:
            self.limited_to(LEAST_NODES)  # the copy checks the other settings

    def limited_to(self, nodes: int) -> ThroughputSettings:
        """The same settings, with `nodes` in place of a `max_nodes` of 0."""
        return self if self.max_nodes else replace(self, max_nodes=nodes)


class Throughput(Policy):
    """Maximises tokens per second (`Objective`) over trees of any size, the empty tree included.

    Candidates come from the session's n-grams and the draft model, if there is one. Their values are calibrated path
    probabilities. The draft model pauses while it is not expected to pay (`Pause`). A session begins with the track
    record of the sessions before it. The draft model reads a prompt if that is expected to pay within a completion of
    the usual length.
    """

    def __init__(self, settings: ThroughputSettings, costs: Costs, control: ControlSettings) -> None:
        nearly_free = min(costs.nodes_within(NEARLY_FREE), MOST_TREE_NODES)
        settings = settings.limited_to(max(nearly_free, LEAST_NODES))
        self.breadth = settings.breadth
        self._max_nodes = settings.max_nodes
        self._control = control
        self._costs = costs
        self._ngrams = MergedNGrams(settings.ngrams(), settings.max_depth, control)
        self._growth = BestFirst(settings.max_nodes, settings.max_depth)
        self._value = CalibratedValue(costs.track_record, control)
        self._mass = ChildMass(costs.track_record, control)
        self._objective = Objective(costs, control)
        self._pause = Pause(costs.track_record, control)
        self._levels = 0  # expanded levels of this round's tree
        self._is_first = True  # whether this is the session's first round, and the draft model has read the prompt
        self._caught_up = True  # whether only the last round's tokens were unread when this round began
        self._fruitless = False  # whether the last expanded tree was sent without a node of the draft model
        self._tree: GrowingTree | None = None  # the last tree
        self._tokens = 0  # committed so far
        self._is_full = True  # whether no more tokens can follow them, as far as the last tree tells

    def reads_prompt(self, seconds: float, tokens: int) -> bool:
        """Read it if that is expected to pay."""
        self._objective.begin()
        self._is_first = self._pays(seconds, tokens)
        return self._is_first

    def start(self, tree: GrowingTree) -> list[int]:
        """Expand the root, unless the n-gram continuations alone, or no tree at all, are expected to do as well."""
        self._caught_up = self._levels > 0 or self._is_first
        self._levels = 0
        self._value.start(tree)
        self._objective.begin()
        if self._costs.plain_is_due and self._objective.row_price is None:
            return []
        level = [ROOT, *self._ngrams.add_to(tree)]
        if not self.breadth:
            return []
        if tree.is_expanded(ROOT):  # expanding it is free, so nodes that cost a forward pass are left out
            level = [node for node in level if tree.is_expanded(node)]
        leaves = open_mass(tree, level)
        planned = self._plan(tree, level, leaves) is not None and not self._fruitless
        seconds = self._seconds(tree, level)
        hopeless = sum(leaves) <= self._objective.rate * seconds
        reading = tree.catch_up_seconds if 0.0 < seconds < tree.catch_up_seconds else 0.0
        if planned and (not reading or self._pays(reading, tree.max_depth + 1)):
            self._pause.reset()
        elif not self._tries(tree, seconds, reading, hopeless=hopeless):
            return []
        return self._expanding(tree, level)

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add candidates of both sources, and expand further where that pays."""
        if ROOT in level:
            self._ngrams.revalue(tree, level)
        candidates = self._growth.grow(tree, level)
        self._levels += 1
        self._mass.observe(tree, level)
        if not candidates:
            return []
        likeliest = sorted(open_mass(tree, candidates), reverse=True)[: self._control.foresight_leaves]
        plan = self._plan(tree, candidates, likeliest)
        if plan is None:
            return []
        return self._expanding(tree, [node for node in candidates if tree.value(node) > plan.threshold])

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """Choose the n nodes of highest value, n = argmax G."""
        self._tree = tree
        ranked = self._ranked(tree)
        price = self._objective.row_price
        if price is None:
            values = [tree.value(node) for node in ranked]
            self._objective.settle(values)
            _, size = self._objective.best_size(values)
        else:
            size = sum(tree.value(node) > self._control.offered_share * price for node in ranked)
        sent = ranked[:size]
        if self._levels:
            self._fruitless = all(tree.draft_log_prob(node) is None for node in sent)
        guess = _best_guess(tree, ranked) if self._pause.tries else None
        if guess is not None and guess not in sent:  # without it, the trial would show too little
            sent = [*sent[:-1], guess]
        return sorted(sent)

    def observe(self, outcome: Outcome) -> None:
        """Learn the costs, the rate, and the acceptance of the draft's nodes."""
        self._is_first = False
        self._costs.observe(cost_of(outcome, caught_up=self._caught_up))
        seconds = outcome.draft_seconds + outcome.waited_seconds + outcome.verify_seconds
        self._pause.observe(seconds, self._saved(outcome))
        tokens = len(outcome.accepted) + 1
        self._objective.observe(tokens, seconds, outcome.pass_statistics)
        self._tokens += tokens
        self._is_full = self._tree is None or tokens > self._tree.max_depth
        self._value.observe(outcome)
        self._ngrams.observe(outcome)

    def end(self) -> None:
        """Learn the completion's length; one that the limit ended might have been longer."""
        self._objective.end()
        if not self._is_full or self._tokens > self._costs.track_record.usual_tokens:
            self._costs.track_record.completed(self._tokens)

    def parameters(self) -> dict[str, float]:
        """The figures that decided the last tree."""
        return {
            "plain_ms": 1e3 * self._costs.verify(0),
            "draft_forward_ms": 1e3 * self._costs.draft_forward_seconds,
            "draft_contention_ms": 1e3 * self._costs.draft_contention,
            "rate": self._objective.rate,
            "row_price": self._objective.row_price or 0.0,
            "best_child_mass": self._mass.best,
            "child_mass": self._mass.children,
            "levels": float(self._levels),
            "paused": float(self._pause.passed),
            **self._ngrams.rates(),
        }

    def _plan(self, tree: GrowingTree, level: Sequence[int], leaves: Sequence[float]) -> Plan | None:
        """Plan the expansion of a level whose nodes have the open masses `leaves`."""
        known = [tree.value(node) for node in self._ranked(tree)]
        return self._objective.plan(known, leaves, self._seconds(tree, level), self._mass, self._max_nodes)

    def _pays(self, seconds: float, tokens: int) -> bool:
        """Whether the draft model is expected to save more than the `seconds` in which it reads the prompt.

        With a gain of g tokens a round over a plain step, T tokens take 1 / (1 + g) of the time of plain decoding.
        """
        forward = self._objective.forward_seconds(from_root=True)
        plan = self._objective.plan([], [1.0], forward, self._mass, self._max_nodes)
        if plan is None:
            return False
        saved = self._expected(tokens) / self._objective.rate * plan.gain / (1.0 + plan.gain)
        return saved > self._control.reading_margin * seconds

    def _tries(self, tree: GrowingTree, seconds: float, reading: float, *, hopeless: bool) -> bool:
        """Whether the draft model is tried, in a forward pass of `seconds`; the other arguments as in `Pause`."""
        if reading * self._objective.rate >= self._expected(tree.max_depth + 1):
            return False  # even a perfect draft would not make up for the reading
        catching_up = tree.catch_up_seconds - reading
        rows = self._costs.verify(1) - self._costs.verify(0)
        return self._pause.is_over(seconds + catching_up + rows, reading, hopeless=hopeless)

    def _expected(self, tokens: int) -> float:
        """Expected number of further tokens, at most `tokens`: a long completion goes on for as long again."""
        return min(tokens, max(self._costs.track_record.usual_tokens, self._tokens))

    def _saved(self, outcome: Outcome) -> float:
        """Seconds that the draft's accepted nodes of a trial are worth."""
        if self._tree is None or not self._pause.tries:
            return 0.0
        nodes = [self._tree.sent[node] for node in outcome.accepted]
        return sum(self._tree.draft_log_prob(node) is not None for node in nodes) / self._objective.rate

    def _seconds(self, tree: GrowingTree, level: Sequence[int]) -> float:
        """Seconds of the level's forward pass; 0 if all of the level has been expanded before."""
        if all(map(tree.is_expanded, level)):
            return 0.0
        return self._objective.forward_seconds(from_root=ROOT in level)

    def _expanding(self, tree: GrowingTree, level: list[int]) -> list[int]:
        """Count the level's forward pass, and return the level."""
        self._objective.spend(self._seconds(tree, level))
        return level

    def _ranked(self, tree: GrowingTree) -> list[int]:
        """The best nodes, in descending order of value."""
        return sorted(self._growth.best(tree), key=lambda node: (-tree.value(node), node))


def _best_guess(tree: GrowingTree, nodes: Sequence[int]) -> int | None:
    """The draft model's likeliest node among those below the root; None if it has none."""
    log_probs = ((tree.draft_log_prob(node), node) for node in nodes if tree.depth(node) == 1)
    return max(((log_prob, node) for log_prob, node in log_probs if log_prob is not None), default=(0.0, None))[1]
