"""Tests sessions that grow trees together: who shares a draft forward pass and its failure."""

import asyncio
import time
from collections import Counter

import pytest

from dynatree.common.messages import Commit, VerifyTimings
from dynatree.common.sampling import Sampling
from dynatree.draft.control.round_costs import Costs
from dynatree.draft.growth.drafter import PIECE, Drafter
from dynatree.draft.growth.round import Round
from dynatree.draft.growth.shared_growth import SharedGrowth
from dynatree.draft.policies import create_policy
from dynatree.draft.policies.base import cost_of
from dynatree.draft.policies.growing_tree import Proposal
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.model_thread import ModelThread


class ScriptedModel:
    """Proposes the same tokens everywhere, records its forward passes, and fails for a given session."""

    context_length = 4096

    def __init__(self):
        self.forwards = []
        self.broken = set()
        self.seconds = 0.0  # of a forward pass

    def reserve(self, slots, prompt_ids, principal):
        return KVRange(0, slots), 0

    def release(self, kv, token_ids, principal):
        pass

    def move(self, kv, slots, start):
        pass

    def expand(self, expansions):
        self.forwards.append({each.session: each.tokens for each in expansions})
        if self.broken.intersection(each.session for each in expansions):
            raise RuntimeError("broken")
        for each in expansions:
            for node in each.nodes:
                each.tree.node(node).proposals = (Proposal(7, -0.1), Proposal(8, -2.4))
        time.sleep(self.seconds)
        return self.seconds


@pytest.fixture(name="growth")
def growth_fixture():
    thread = ModelThread("draft-model")
    drafter = Drafter(ScriptedModel(), 64)
    yield SharedGrowth(drafter, thread), drafter
    thread.shutdown()


def test_only_the_session_at_fault_fails(growth):
    shared, drafter = growth
    sessions = [drafter.open([5, 6], Sampling(), 100) for _ in range(3)]
    drafter._model.broken = {sessions[1]}

    async def scenario():
        policy = create_policy("linear", {"depth": 4})
        grown = [shared.run(lambda each=each: drafter.growing(each, policy, 10, 64)) for each in sessions]
        return await asyncio.gather(*grown, return_exceptions=True)

    first, second, third = asyncio.run(scenario())
    assert isinstance(second, RuntimeError)
    assert len(first.tree) == len(third.tree) == 4


@pytest.mark.parametrize("sessions", [1, 4, 16])
def test_a_draft_forward_is_as_dear_to_each_as_it_is_long_whoever_shares_it(growth, sessions):
    """Every session waits for the whole forward pass; a charge of 1/m would make drafting look nearly free."""
    shared, drafter = growth
    costs = Costs()
    open_ = [drafter.open([5, 6], Sampling(), 100) for _ in range(sessions)]

    async def scenario():
        growing = create_policy("linear", {"depth": 4})
        return await asyncio.gather(
            *(shared.run(lambda each=each: drafter.growing(each, growing, 10, 64)) for each in open_)
        )

    drafter._model.seconds = 0.005
    commit = Commit(1, 5, (7,), (), timings=VerifyTimings(0.1, 0.0, 0.0, 0.1))
    for each in asyncio.run(scenario()):
        costs.observe(cost_of(Round(each, commit, exchange_seconds=0.1)))
        assert each.forward_seconds == pytest.approx(each.draft_forwards * 0.005 / sessions)
    assert costs.draft_forward_seconds >= 0.005


def test_prompts_that_come_together_hold_no_tree_up_for_all_of_them(growth):
    shared, drafter = growth
    lengths = (100, 100, 100, 1000, 1000)
    prompts = [drafter.open([5] * length, Sampling(), 100) for length in lengths]
    streaming = drafter.open([5, 6], Sampling(), 100)

    async def scenario():
        policy = create_policy("linear", {"depth": 8})
        reading = [shared.run(lambda each=each: drafter.prefilling(each, policy)) for each in prompts]
        await shared.run(lambda: drafter.growing(streaming, policy, 10, 64))
        await asyncio.gather(*reading)

    asyncio.run(scenario())
    forwards = drafter._model.forwards
    assert max(sum(tokens.values()) for tokens in forwards) <= 256 + len(lengths) + 1
    assert sum(streaming in tokens for tokens in forwards[:8]) == 8, "every level of the tree is in the next forward"
    read = Counter()
    for tokens in forwards:
        read.update(tokens)
    assert [read[each] for each in prompts] == list(lengths)
    assert max(tokens.get(prompts[3], 0) for tokens in forwards) == PIECE
