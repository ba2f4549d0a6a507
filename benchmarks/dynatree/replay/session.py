"""Decode one recorded completion again with one policy: grow, verify and commit, as the services do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynatree.common.limits import MAX_TREE_NODES
from dynatree.common.pass_statistics import ALONE, PassStatistics
from dynatree.common.sampling import Sampling
from dynatree.common.tree import TokenTree
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies import Policy
from dynatree.replay.machines import Machine, seconds_on
from dynatree.replay.recording import RecordedRun
from dynatree.replay.table_model import Ask, TableModel
from dynatree.verify.accept import Verdict, accept, cut
from dynatree.verify.pass_plan import path_probs

Noise = Callable[[], float]
VOCAB_SIZE = 0  # a replay does not use the vocabulary's size


@dataclass(frozen=True)
class ReplayedRound:
    """The outcome of a round, as a policy observes it; implements `Outcome`. Nothing waits in a replay."""

    tree: TokenTree
    accepted: Sequence[int]
    next_token: int | None
    draft_forwards: int
    draft_seconds: float
    verify_seconds: float
    others_draft_seconds: float = 0.0
    waited_seconds: float = 0.0
    pass_statistics: PassStatistics = ALONE


@dataclass(frozen=True)
class Replayed:
    """Figures of a replayed completion. The first token comes from the prefill and belongs to no round.

    Attributes:
        tokens: Tokens committed by rounds.
        rounds: Trees verified, empty ones included.
        nodes: Nodes of all trees.
        accepted: Nodes on accepted paths.
        seconds: Seconds of all rounds.
        expanded: Nodes that the policy asked to expand.
        stood_in: Expanded nodes that were not recorded.
        promised: Sum of the path probabilities of all nodes, as their trees carry them.
    """

    tokens: int
    rounds: int
    nodes: int
    accepted: int
    seconds: float
    expanded: int
    stood_in: int
    promised: float = 0.0


def replay(
    run: RecordedRun, policy: Policy, machine: Machine, noise: Noise = lambda: 1.0, ask: Ask | None = None
) -> Replayed:
    """Run one policy on one run.

    Args:
        run: The recorded run.
        policy: A fresh policy.
        machine: Costs of forward passes and rounds.
        noise: Function that returns a factor for the next measured time.
        ask: As in `TableModel`.
    """
    model = TableModel(run, machine, ask)
    drafter = Drafter(model, MAX_TREE_NODES)
    session = drafter.open(run.prompt_ids, sampling_of(run), VOCAB_SIZE)
    drafter.prefill(session, policy)
    drafter.commit(session, run.completion[:1])
    done, rounds, nodes, accepted, seconds, promised = 1, 0, 0, 0, 0.0, 0.0
    while (remaining := len(run.completion) - done) > 0:
        growth = drafter.grow(session, policy, remaining - 1, MAX_TREE_NODES)
        verdict = verify(growth.tree, run.completion[done:])
        outcome = ReplayedRound(
            tree=growth.tree,
            accepted=verdict.accepted,
            next_token=verdict.bonus,
            draft_forwards=growth.draft_forwards,
            draft_seconds=noise() * (growth.forward_seconds + machine.level_seconds * growth.draft_forwards),
            verify_seconds=noise() * (seconds_on(machine.verify, len(growth.tree) + 1) + machine.round_seconds),
        )
        drafter.commit(session, verdict.token_ids)
        policy.observe(outcome)
        done += len(verdict.token_ids)
        rounds += 1
        nodes += len(growth.tree)
        accepted += len(verdict.accepted)
        seconds += outcome.draft_seconds + outcome.verify_seconds
        promised += sum(path_probs(growth.tree))
    policy.end()
    return Replayed(done - 1, rounds, nodes, accepted, seconds, model.expanded, model.stood_in, promised)


def sampling_of(run: RecordedRun) -> Sampling:
    """The options that a run was decoded with."""
    return Sampling(temperature=run.temperature, seed=run.seed or 0)


def verify(tree: TokenTree, coming: Sequence[int]) -> Verdict:
    """The verdict on a tree, given the tokens that plain decoding chooses next.

    The target's choice after a node off the true path is unknown, and acceptance never reads it.
    """
    choices = [coming[0], *(coming[depth] for depth in tree.depths)]
    return cut(accept(tree, choices), len(coming), frozenset())
