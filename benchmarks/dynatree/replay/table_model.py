"""A recorded run that stands in for the draft model."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dynatree.common.tree import ROOT
from dynatree.draft.growth.draft_session import DraftSession
from dynatree.draft.growth.drafter import Expansion
from dynatree.draft.policies.growing_tree import GrowingTree, Proposal, TrieNode
from dynatree.engine.kv.kv_range import KVRange
from dynatree.replay.machines import Machine, seconds_on
from dynatree.replay.recording import RecordedRun

FIRST_TAIL_TOKEN = 2**32  # no vocabulary has it

# Takes a number of tokens of the completion and a path below them; returns the proposals after both.
Ask = Callable[[int, Sequence[int]], tuple[Proposal, ...]]


@dataclass(frozen=True)
class _Place:
    """A recorded node, and whether it is the context's own node; if not, it stands in for the context."""

    node: int
    recorded: bool


class TableModel:
    """A `DraftModel` for one session on one run: it returns recorded proposals at the machine's cost.

    A context off the true path that was not recorded gets the proposals of a stand-in: the recorded node off the path
    whose last token has the nearest log-probability. The nodes below that context are looked up below the stand-in.
    Verification never reaches such nodes, because the true path is recorded whole: they affect the tree's shape only.

    A node off the true path has all proposals that were likely enough, and at least four. If a policy asks for more,
    each further proposal gets half of the remaining probability, under a token id that no vocabulary has.

    Args:
        run: The recorded run.
        machine: Costs of forward passes.
        ask: Function that gives the proposals to record for a context that was not recorded; None uses a stand-in.

    Attributes:
        expanded: Nodes that the policy asked to expand.
        stood_in: Expanded nodes that another node stood in for.
    """

    context_length = 2**31  # longer than any run

    def __init__(self, run: RecordedRun, machine: Machine, ask: Ask | None = None) -> None:
        self._run = run
        self._machine = machine
        self._ask = ask
        self._places: dict[TrieNode, _Place] = {}
        self.expanded = 0
        self.stood_in = 0

    def reserve(self, slots: int, prompt_ids: Sequence[int], principal: str) -> tuple[KVRange | None, int]:
        """Return a new KV range, in which nothing is cached."""
        return KVRange(0, slots), 0

    def release(self, kv: KVRange, token_ids: Sequence[int], principal: str) -> None:
        """Do nothing: there is no KV cache."""

    def move(self, kv: KVRange, slots: Sequence[int], start: int) -> None:
        """Do nothing: there is no KV cache."""

    def expand(self, expansions: Sequence[Expansion]) -> float:
        """Look up the proposals of nodes, parents first; return the seconds of a forward pass over them."""
        return seconds_on(self._machine.draft, sum(map(self.look_up, expansions)))

    def look_up(self, expansion: Expansion) -> int:
        """Set the proposals of nodes; return the rows of a forward pass over them."""
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
        """The node off the true path whose token has the nearest log-probability; ties go to the first recorded."""
        known = self._off_path
        if not known:
            return 0
        after = bisect_left(known, (log_prob,))
        low, high = known[max(after - 1, 0)], known[min(after, len(known) - 1)]
        nearest = low if log_prob - low[0] < high[0] - log_prob else high
        return known[bisect_left(known, (nearest[0],))][1]

    @cached_property
    def _off_path(self) -> list[tuple[float, int]]:
        """Log-probability and place of each node off the true path, lowest first; nodes without one are left out."""
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
    """Made-up proposals after the recorded ones, none likelier than the last of those."""
    rest = max(1.0 - sum(math.exp(proposal.log_prob) for proposal in proposals), 1e-7)
    most = proposals[-1].log_prob if proposals else 0.0
    return [Proposal(FIRST_TAIL_TOKEN + place, min(most, math.log(rest / 2 ** (place + 1)))) for place in range(count)]
