"""A recorded run in the draft model's place."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dynatree.bench.replay.machines import Machine, seconds_on
from dynatree.bench.replay.recording import RecordedRun
from dynatree.common.kv_range import KVRange
from dynatree.common.tree import ROOT
from dynatree.draft.draft_session import DraftSession
from dynatree.draft.drafter import Expansion
from dynatree.draft.growing_tree import GrowingTree, Proposal, TrieNode

FIRST_TAIL_TOKEN = 2**32  # no vocabulary has it

# The proposals after the first so many tokens of the completion and the tokens of a path.
Ask = Callable[[int, Sequence[int]], tuple[Proposal, ...]]


@dataclass(frozen=True)
class _Place:
    """A recorded node, and whether it is that of the context that was asked about; otherwise it stands in for it."""

    node: int
    recorded: bool


class TableModel:
    """A `DraftModel` for one session on one run: proposals are the recorded ones, forwards take the machine's time.

    A context off the true path that was not recorded gets the proposals of the recorded one off the path whose last
    token was as likely, as nearly as there is one. Nodes below those are looked up below them. Verification comes to
    neither, since the true path is recorded whole: they have a say in a tree's shape and in nothing else.

    A node off the true path has all proposals that were likely enough, and at least four. A policy that asks for more
    gets, of what they leave of the probability, a half, a quarter and so on, under tokens that no vocabulary has.

    Args:
        run: The recorded run.
        machine: What forwards take.
        ask: What to record of a context that was not; None: another stands in for it.

    Attributes:
        expanded: Nodes that the policy had expanded.
        stood_in: Those among them that another node stood in for.
    """

    context_length = 2**31  # no run is as long

    def __init__(self, run: RecordedRun, machine: Machine, ask: Ask | None = None) -> None:
        self._run = run
        self._machine = machine
        self._ask = ask
        self._places: dict[TrieNode, _Place] = {}
        self.expanded = 0
        self.stood_in = 0

    def reserve(self, slots: int, prompt_ids: Sequence[int], principal: str) -> tuple[KVRange | None, int]:
        """A range in which nothing is stored."""
        return KVRange(0, slots), 0

    def release(self, kv: KVRange, token_ids: Sequence[int], principal: str) -> None:
        """Nothing to do."""

    def move(self, kv: KVRange, slots: Sequence[int], start: int) -> None:
        """Nothing to do."""

    def expand(self, expansions: Sequence[Expansion]) -> float:
        """Look up the proposals of nodes, parents first; returns the seconds of a forward over them."""
        return seconds_on(self._machine.draft, sum(map(self.look_up, expansions)))

    def look_up(self, expansion: Expansion) -> int:
        """Set the proposals of nodes; returns the rows of a forward over them."""
        session, tree, nodes = expansion.session, expansion.tree, expansion.nodes
        for node in nodes:
            place = self._place(session, tree, node)
            self._places[tree.node(node)] = place
            tree.node(node).proposals = self._proposals(place.node, expansion.breadth)
            self.stood_in += not place.recorded
        self.expanded += len(nodes)
        return expansion.tokens

    def _place(self, session: DraftSession, tree: GrowingTree, node: int) -> _Place:
        position = len(session.committed) - len(self._run.prompt_ids)
        if node == ROOT:
            return _Place(position, recorded=True)
        above = self._places[tree.node(tree.parent(node))]
        token = tree.node(node).token
        found = self._run.child(above.node, token)
        if found is not None:
            return _Place(found, above.recorded)
        if self._ask is not None and above.recorded and token < FIRST_TAIL_TOKEN:
            path = [each.token for each in reversed(tree.path(node))]
            return _Place(self._run.add(above.node, token, self._ask(position, path)), recorded=True)
        return _Place(self._nearest(self._run.log_prob(above.node, token)), recorded=False)

    def _nearest(self, log_prob: float) -> int:
        """The node off the true path whose token has the nearest log-probability; of equals the first recorded."""
        known = self._off_path
        if not known:
            return 0
        after = bisect_left(known, (log_prob,))
        low, high = known[max(after - 1, 0)], known[min(after, len(known) - 1)]
        nearest = low if log_prob - low[0] < high[0] - log_prob else high
        return known[bisect_left(known, (nearest[0],))][1]

    @cached_property
    def _off_path(self) -> list[tuple[float, int]]:
        """The recorded log-probability of each node off the true path, least first, and the node; where it has one."""
        run = self._run
        nodes = range(len(run.completion), len(run.nodes))
        found = ((run.log_prob(run.nodes[place].parent, run.nodes[place].token), place) for place in nodes)
        return sorted(each for each in found if each[0] > -math.inf)

    def _proposals(self, node: int, breadth: int) -> tuple[Proposal, ...]:
        proposals = self._run.nodes[node].proposals
        if len(proposals) >= breadth:
            return proposals[:breadth]
        return (*proposals, *_tail(proposals, breadth - len(proposals)))


def _tail(proposals: Sequence[Proposal], count: int) -> list[Proposal]:
    """What may come after the recorded proposals: none likelier than the last of them."""
    rest = max(1.0 - sum(math.exp(proposal.log_prob) for proposal in proposals), 1e-7)
    most = proposals[-1].log_prob if proposals else 0.0
    return [Proposal(FIRST_TAIL_TOKEN + place, min(most, math.log(rest / 2 ** (place + 1)))) for place in range(count)]
