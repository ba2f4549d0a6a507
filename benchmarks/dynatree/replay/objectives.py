"""`dynatree bench replay --objectives`: each objective's loss against hindsight, and the accuracy of its promises.

Two oracles know plain decoding's completion and every cost. Both choose each round so that the whole completion takes
the least time, which is a shortest path over its positions:

    best(p) = min over a of seconds(p, a) + best(p + a + 1),   a accepted tokens and the target's own

    size oracle   drafts and ranks nodes as best-first growth does: by the draft's path probabilities, with
                  `throughput`'s breadth and node limit. It knows how many levels to draft and how many nodes to send.
                  For a accepted tokens it drafts a levels and sends every node up to the rank of the true path's a-th.
    path oracle   sends the true path alone, as long as each token is among the draft's `BREADTH` likeliest.

Both oracles pay a draft forward pass over one row for each level, and use no n-grams. So the size oracle bounds every
rule that sizes drafted trees of that ranking, and the path oracle bounds every rule without n-grams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dynatree.bench.figures import by
from dynatree.bench.table import NONE, Table
from dynatree.common.limits import MAX_TREE_NODES
from dynatree.common.tree import ROOT
from dynatree.draft.control.constants import DEFAULT_CONTROL
from dynatree.draft.control.round_costs import Costs
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies import Policy, create_policy
from dynatree.draft.policies.base import Outcome, cost_of
from dynatree.draft.policies.best_first import BestFirst
from dynatree.draft.policies.growing_tree import GrowingTree
from dynatree.draft.policies.merged import MergedNGrams
from dynatree.draft.policies.objective import Objective, Plan
from dynatree.draft.policies.papers.child_mass import ChildMass
from dynatree.draft.policies.throughput import LEAST_NODES, NEARLY_FREE, Throughput, ThroughputSettings
from dynatree.replay.machines import Machine, seconds_on
from dynatree.replay.recording import RecordedRun
from dynatree.replay.runs import starting_costs
from dynatree.replay.session import VOCAB_SIZE, Replayed, replay, sampling_of
from dynatree.replay.table_model import TableModel

BREADTH = 16  # proposals that the path oracle considers, and that are recorded at each node of the true path
DEPTH = 16  # depth limit of `throughput` and the size oracle
CHAIN = 8  # tokens of a drafted chain
GOODPUT_STEP = 0.1  # weight of one round in goodput's moving mean of acceptance


class LambdaObjective(Objective):
    """An objective whose lambda is the session's rate so far, or plain decoding's if that is higher.

    By the renewal-reward argument, this rule is optimal if rounds are independent and identically distributed. A
    round's own ratio would stop too early in easy rounds and too late in hard ones.
    """

    @property
    def rate(self) -> float:
        """Tokens / seconds, both discounted by `rate_fade` each round; at least plain decoding's rate."""
        plain = 1.0 / self._costs.verify(0)
        return max(plain, self._tokens / self._seconds) if self._seconds else plain


class PrefixObjective(Objective):
    """vLLM's adaptive rule: always draft the whole chain, and send its prefix of the highest ratio."""

    def plan(
        self, known: Sequence[float], leaves: Sequence[float], seconds: float, mass: ChildMass, max_nodes: int
    ) -> Plan | None:
        """Continue drafting in any case."""
        self.settle(known)
        return Plan(0.0, gain=1.0)


class _NoNGrams(MergedNGrams):
    """No continuations: every node of the tree comes from the draft model."""

    def __init__(self) -> None:
        super().__init__(ThroughputSettings().limited_to(LEAST_NODES).ngrams(), DEPTH, DEFAULT_CONTROL)

    def add_to(self, tree: GrowingTree) -> list[int]:
        """Add nothing."""
        return []


class Variant(Throughput):
    """`throughput` with another objective, with n-grams or with the draft model's nodes only."""

    def __init__(self, settings: ThroughputSettings, costs: Costs, objective: type[Objective], *, ngrams: bool) -> None:
        super().__init__(settings, costs, DEFAULT_CONTROL)
        self._objective = objective(costs, DEFAULT_CONTROL)
        if not ngrams:
            self._ngrams = _NoNGrams()


class Goodput(Policy):
    """Draft the chain whose length k has the highest goodput (TurboSpec, arXiv:2406.14066, for a batch of one):

        k = argmax (1 - alpha^(k + 1)) / (1 - alpha) / (k D + V(k))

    alpha is the acceptance rate of a token, a moving mean over rounds.
    """

    breadth = 1

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._alpha = DEFAULT_CONTROL.prior_best_child
        self._length = 0

    def start(self, tree: GrowingTree) -> list[int]:
        """Choose the length."""
        self._length = max(range(DEPTH + 1), key=self._goodput)
        return [ROOT] if self._length else []

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add the likeliest token."""
        node = tree.add(level[0], tree.proposals(level[0])[0])
        return [node] if tree.depth(node) < self._length else []

    def observe(self, outcome: Outcome) -> None:
        """Update alpha, and the costs as `throughput` does."""
        self._costs.observe(cost_of(outcome))
        accepted = len(outcome.accepted)
        tried = min(accepted + 1, len(outcome.tree))
        if tried:
            self._alpha += GOODPUT_STEP * (accepted / tried - self._alpha)

    def _goodput(self, length: int) -> float:
        tokens = sum(self._alpha**place for place in range(length + 1))
        return tokens / (length * self._costs.draft_forward_seconds + self._costs.verify(length))


@dataclass(frozen=True)
class Rule:
    """A rule that sizes trees: its name in tables, and a function that creates a session's policy."""

    name: str
    create: Callable[[Costs], Policy]


def _named(policy: str, **settings: float) -> Callable[[Costs], Policy]:
    return lambda costs: create_policy(policy, settings, costs)


def _variant(objective: type[Objective], *, ngrams: bool, **settings: int) -> Callable[[Costs], Policy]:
    return lambda costs: Variant(ThroughputSettings(**settings), costs, objective, ngrams=ngrams)


RULES = (
    Rule("ratio, n-grams", _named("throughput")),
    Rule("lambda, n-grams", _variant(LambdaObjective, ngrams=True)),
    Rule("ratio", _variant(Objective, ngrams=False)),
    Rule("lambda", _variant(LambdaObjective, ngrams=False)),
    Rule("prefix", _variant(PrefixObjective, ngrams=False, breadth=1, max_depth=CHAIN)),
    Rule("goodput", Goodput),
    Rule("sequoia", _named("sequoia", max_nodes=0)),
    Rule("opt-tree", _named("opt-tree")),
)


@dataclass(frozen=True)
class Judged:
    """Results of one rule on one text and machine, over all runs of the text.

    Attributes:
        rule: Name of the rule.
        text: Name of the text.
        machine: The machine.
        tokens: Tokens of all rounds.
        seconds: Seconds of all rounds.
        nodes: Mean nodes sent per round.
        promised: Sum of the sent nodes' path probabilities / number of accepted nodes; None if none was accepted.
        size_oracle: Seconds of the size oracle for the same tokens.
        path_oracle: Seconds of the path oracle for the same tokens.
    """

    rule: str
    text: str
    machine: Machine
    tokens: int
    seconds: float
    nodes: float
    promised: float | None
    size_oracle: float
    path_oracle: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def regret(self) -> float:
        """Share of the size oracle's tokens per second that the rule loses."""
        return 1.0 - self.size_oracle / self.seconds


def study(runs: Iterable[tuple[str, RecordedRun]], machines: Sequence[Machine]) -> Iterator[list[Judged]]:
    """Judge every rule; yield one list per machine and text, whose runs share the costs that they learn."""
    for machine in machines:
        for text, same in by(runs, lambda each: each[0]).items():
            group = [run for _, run in same]
            size, path = (sum(oracle(run, machine) for run in group) for oracle in (size_oracle, path_oracle))
            yield [_judged(rule, text, group, machine, size, path) for rule in RULES]


def _judged(
    rule: Rule, text: str, runs: Sequence[RecordedRun], machine: Machine, size_oracle: float, path_oracle: float
) -> Judged:
    costs = starting_costs(machine, DEFAULT_CONTROL)
    done: list[Replayed] = [replay(run, rule.create(costs), machine) for run in runs]
    accepted = sum(each.accepted for each in done)
    return Judged(
        rule.name,
        text,
        machine,
        sum(each.tokens for each in done),
        sum(each.seconds for each in done),
        sum(each.nodes for each in done) / sum(each.rounds for each in done),
        sum(each.promised for each in done) / accepted if accepted else None,
        size_oracle,
        path_oracle,
    )


def size_oracle(run: RecordedRun, machine: Machine) -> float:
    """Least seconds of the run with best-first trees whose levels and sizes are chosen in hindsight."""
    costs = starting_costs(machine, DEFAULT_CONTROL)
    drafter = Drafter(TableModel(run, machine), MAX_TREE_NODES)
    session = drafter.open(run.prompt_ids, sampling_of(run), VOCAB_SIZE)
    ranking = _Ranking(run, max(costs.nodes_within(NEARLY_FREE), LEAST_NODES))
    ranks = []
    for place, token in enumerate(run.completion):
        ranking.position = place
        drafter.grow(session, ranking, DEPTH, MAX_TREE_NODES)
        ranks.append(ranking.ranks)
        drafter.commit(session, [token])
    return _shortest(ranks, machine)


def path_oracle(run: RecordedRun, machine: Machine) -> float:
    """Least seconds of the run with chains that hold only the true path."""
    proposed = [
        any(each.token == token for each in node.proposals[:BREADTH])
        for node, token in zip(run.nodes, run.completion, strict=False)
    ]
    ranks = []
    for place in range(len(run.completion)):
        misses = (after for after, is_proposed in enumerate(proposed[place:]) if not is_proposed)
        ranks.append(list(range(1, next(misses, len(proposed) - place) + 1)))
    return _shortest(ranks, machine)


def _shortest(ranks: Sequence[Sequence[int]], machine: Machine) -> float:
    """Seconds of the fastest rounds after the first token; accepting a tokens at a place sends `ranks[place][a - 1]`.

    A level costs a draft forward pass; a round costs the target's forward pass over its nodes and root.
    """
    level = seconds_on(machine.draft, 1) + machine.level_seconds
    best = [0.0] * (len(ranks) + 1)
    for place in reversed(range(1, len(ranks))):
        best[place] = min(
            accepted * level
            + seconds_on(machine.verify, 1 + nodes)
            + machine.round_seconds
            + best[place + accepted + 1]
            for accepted, nodes in enumerate((0, *ranks[place]))
            if place + accepted < len(ranks)
        )
    return best[1]


class _Ranking(Policy):
    """Grows best-first trees along a completion, and records the rank of each true node among the nodes known so far.

    Attributes:
        position: Number of committed tokens of the completion.
        ranks: By depth, from 1: rank of the true node, the number of nodes valued at least as high, itself included.
    """

    breadth = ThroughputSettings.breadth

    def __init__(self, run: RecordedRun, max_nodes: int) -> None:
        self.position = 0
        self.ranks: list[int] = []
        self._run = run
        self._growth = BestFirst(max_nodes, DEPTH)
        self._true = ROOT

    def start(self, tree: GrowingTree) -> list[int]:
        """Begin the tree of the next position."""
        self.ranks, self._true = [], ROOT
        return [ROOT]

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Grow the tree as long as it holds the true path."""
        further = self._growth.grow(tree, level)
        coming = self._run.completion[self.position + len(self.ranks)]
        below = [node for node in range(len(tree)) if tree.parent(node) == self._true]
        found = [node for node in below if tree.node(node).token == coming]
        if not found:
            return []
        self._true = found[0]
        value = tree.value(self._true)
        self.ranks.append(sum((-tree.value(node), node) <= (-value, self._true) for node in range(len(tree))))
        at_end = self.position + len(self.ranks) >= len(self._run.completion)
        return further if self._true in further and not at_end else []


def table(judged: Sequence[Judged]) -> Table:
    """A table of the rules on one text and machine, fastest first, and of the oracles."""
    first = judged[0]
    kind = "" if first.machine.measured else " (expected, not measured)"
    rows = [
        {
            "objective": each.rule,
            "tokens/s": f"{each.rate:.1f}",
            "x plain": f"{each.rate * first.machine.plain_seconds:.2f}",
            "regret": f"{100 * each.regret:.1f} %",
            "promised / accepted": NONE if each.promised is None else f"{each.promised:.2f}",
            "nodes per round": f"{each.nodes:.1f}",
        }
        for each in sorted(judged, key=lambda each: each.seconds)
    ]
    for name, seconds in (("size oracle", first.size_oracle), ("path oracle", first.path_oracle)):
        rate = first.tokens / seconds
        rows.append(
            {
                "objective": name,
                "tokens/s": f"{rate:.1f}",
                "x plain": f"{rate * first.machine.plain_seconds:.2f}",
                "regret": NONE,
                "promised / accepted": NONE,
                "nodes per round": NONE,
            }
        )
    return Table.of(f"{first.text}, {first.machine.name}{kind}", rows)


def to_dict(each: Judged) -> dict[str, Any]:
    """A rule's figures as a JSON object."""
    figures = {name: value for name, value in vars(each).items() if name != "machine"}
    return {**figures, "machine": each.machine.name, "measured": each.machine.measured, "regret": each.regret}
