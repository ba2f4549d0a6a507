"""`dynatree bench replay --objectives`: what each objective loses against hindsight on recorded rounds, and promises.

Two oracles know plain decoding's completion and every cost. Both choose each round so that the whole completion takes
the least time, which is a shortest path over its positions:

    best(p) = min over a of seconds(p, a) + best(p + a + 1),   a accepted tokens and the target's own

    size oracle   drafts and ranks as best-first growth does, by the draft's path probabilities, `throughput`'s breadth
                  and limit of nodes; it knows how many levels to draft and how many nodes to send. To have a tokens
                  accepted it drafts a levels and sends as many nodes as the rank of the true path's a-th.
    path oracle   sends the true path alone, as far as each token is among the draft's `BREADTH` likeliest there.

A level costs them a draft forward over one row, and n-grams are unknown to them. So the size oracle bounds every rule
for drafted trees of that ranking, and the path oracle every rule without n-grams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dynatree.bench.figures import by
from dynatree.bench.replay.machines import Machine, seconds_on
from dynatree.bench.replay.recording import RecordedRun
from dynatree.bench.replay.runs import starting_costs
from dynatree.bench.replay.session import VOCAB_SIZE, Replayed, replay, sampling_of
from dynatree.bench.replay.table_model import TableModel
from dynatree.bench.table import NONE, Table
from dynatree.common.limits import MAX_TREE_NODES
from dynatree.common.tree import ROOT
from dynatree.draft.control import DEFAULT_CONTROL
from dynatree.draft.drafter import Drafter
from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies import Policy, create_policy
from dynatree.draft.policies.base import Outcome, cost_of
from dynatree.draft.policies.best_first import BestFirst
from dynatree.draft.policies.child_mass import ChildMass
from dynatree.draft.policies.merged import MergedNGrams
from dynatree.draft.policies.objective import Objective, Plan
from dynatree.draft.policies.throughput import LEAST_NODES, NEARLY_FREE, Throughput, ThroughputSettings
from dynatree.draft.round_costs import Costs

BREADTH = 16  # of the path oracle: as many proposals as are recorded on the true path
DEPTH = 16  # of `throughput` and the size oracle
CHAIN = 8  # tokens of a drafted chain
GOODPUT_STEP = 0.1  # weight of one round in the acceptance that goodput goes by


class LambdaObjective(Objective):
    """The session's rate so far for lambda, or plain decoding's if that is higher.

    Were rounds independent and alike, none would be better, by the renewal-reward argument: a round's own ratio would
    stop too early in easy rounds and too late in hard ones.
    """

    @property
    def rate(self) -> float:
        """Tokens over seconds, both faded by `rate_fade` a round."""
        plain = 1.0 / self._costs.verify(0)
        return max(plain, self._tokens / self._seconds) if self._seconds else plain


class PrefixObjective(Objective):
    """A chain that is drafted in any case, of which the prefix of the highest ratio is sent: vLLM's adaptive rule."""

    def plan(
        self, known: Sequence[float], leaves: Sequence[float], seconds: float, mass: ChildMass, max_nodes: int
    ) -> Plan | None:
        """Go on."""
        self.settle(known)
        return Plan(0.0)


class _NoNGrams(MergedNGrams):
    """No continuations: what is drafted is the draft model's."""

    def __init__(self) -> None:
        super().__init__(ThroughputSettings().limited_to(LEAST_NODES).ngrams(), DEPTH, DEFAULT_CONTROL)

    def add_to(self, tree: GrowingTree) -> list[int]:
        """Nothing."""
        return []


class Variant(Throughput):
    """`throughput` by another objective, with n-grams or with the draft model's nodes only."""

    def __init__(self, settings: ThroughputSettings, costs: Costs, objective: type[Objective], *, ngrams: bool) -> None:
        super().__init__(settings, costs, DEFAULT_CONTROL)
        self._objective = objective(costs, DEFAULT_CONTROL)
        if not ngrams:
            self._ngrams = _NoNGrams()


class Goodput(Policy):
    """A chain of k tokens of the highest goodput (TurboSpec, arXiv:2406.14066, for a batch of one):

        k = argmax (1 - alpha^(k + 1)) / (1 - alpha) / (k D + V(k))

    with alpha the acceptance of a token, a moving mean over rounds.
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
        """Learn alpha, and the costs, as `throughput` does."""
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
    """A way to size trees: its name in tables, and how a session's policy is made."""

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
    """One rule on one text and machine, over all of the text's runs.

    Attributes:
        rule: Its name.
        text: The text's.
        machine: The machine.
        tokens: Of all rounds.
        seconds: Of all rounds.
        nodes: Sent a round.
        promised: The sum of the path probabilities of what was sent, over the nodes accepted of it; None for none.
        size_oracle: Seconds of the size oracle for the same tokens.
        path_oracle: Seconds of the path oracle.
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
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def regret(self) -> float:
        """The share of the size oracle's tokens a second that the rule loses."""
        return 1.0 - self.size_oracle / self.seconds


def study(runs: Iterable[tuple[str, RecordedRun]], machines: Sequence[Machine]) -> Iterator[list[Judged]]:
    """Every rule on every text and machine; a list for each machine and text. What a text's runs learn is shared."""
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
    """The least seconds for the run with best-first trees, their levels and sizes known in hindsight."""
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
    """The least seconds for the run with chains of nothing but the true path."""
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
    """Seconds of the fastest rounds, the first token given; to accept a tokens at a place takes `ranks[place][a - 1]`.

    A level takes a draft forward, a round the target's forward over its nodes and root.
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
    """Grows best-first trees along a completion, and notes the rank of each true node among what is known by then.

    Attributes:
        position: Tokens of the completion that are committed.
        ranks: By depth, from 1: how many nodes are worth as much as the true one or more, itself with them.
    """

    breadth = ThroughputSettings.breadth

    def __init__(self, run: RecordedRun, max_nodes: int) -> None:
        self.position = 0
        self.ranks: list[int] = []
        self._run = run
        self._growth = BestFirst(max_nodes, DEPTH)
        self._true = ROOT

    def start(self, tree: GrowingTree) -> list[int]:
        """Begin at another position."""
        self.ranks, self._true = [], ROOT
        return [ROOT]

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Go on as long as the true path does."""
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
    """The rules on one text and machine, the fastest first, and the oracles."""
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
    """A rule's figures in JSON."""
    figures = {name: value for name, value in vars(each).items() if name != "machine"}
    return {**figures, "machine": each.machine.name, "measured": each.machine.measured, "regret": each.regret}
