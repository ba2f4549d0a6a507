"""Tests passes: admission, waiting, pieces of prompts and failures, in virtual time without a model."""

import asyncio
import random
from collections import Counter
from itertools import groupby, pairwise

import pytest

from dynatree.common.decoding import Decoding
from dynatree.common.errors import DeviceFailedError, NotFiniteError
from dynatree.common.messages import VerifyTimings
from dynatree.common.model_info import ForwardCost
from dynatree.common.sampling import Sampling
from dynatree.common.tree import ROOT, DraftDistribution, TokenTree
from dynatree.engine.kv.kv_range import KVRange
from dynatree.replay.virtual_time import run_in_virtual_time
from dynatree.verify.accept import Verdict
from dynatree.verify.fault_watch import MOST_FAULTS, FaultWatch
from dynatree.verify.hold import Ready, worth_waiting
from dynatree.verify.pass_costs import PassCosts
from dynatree.verify.pass_plan import admit, path_probs
from dynatree.verify.prompt_budget import STRETCH
from dynatree.verify.scheduler import Scheduler
from dynatree.verify.session import SessionRequest, VerifySession

STEEP = PassCosts([ForwardCost(1, 0.1), ForwardCost(8, 0.1), ForwardCost(256, 2.58)])  # 10 ms a row from the ninth on


FLAT = PassCosts([ForwardCost(1, 0.1), ForwardCost(256, 0.11)])


def random_tree(generator, nodes):
    parents = tuple(generator.randrange(ROOT, node) for node in range(nodes))
    log_probs = tuple(-generator.expovariate(1.5) for _ in range(nodes))
    return TokenTree(tuple(generator.sample(range(1000), nodes)), parents, log_probs)


def test_the_nodes_that_are_admitted_bring_the_most():
    generator = random.Random(4)
    for _ in range(60):
        trees = [random_tree(generator, generator.randrange(12)) for _ in range(generator.randint(1, 9))]
        rate, most = generator.uniform(1.0, 80.0), generator.randint(10, 40)
        worths = [generator.choice([0.2, 1.0, 1.7]) for _ in trees]
        admitted = admit(trees, worths, rate, STEEP, most)
        values = [
            [min(worth * prob, 1.0) for prob in path_probs(tree)] for tree, worth in zip(trees, worths, strict=True)
        ]
        probs = sorted((value for of_tree in values for value in of_tree), reverse=True)

        def gain(count):
            return sum(probs[:count]) - rate * STEEP.seconds(len(trees) + count)  # noqa: B023 - called at once

        kept = sorted(
            (of_tree[node] for of_tree, nodes in zip(values, admitted.nodes, strict=True) for node in nodes),
            reverse=True,
        )
        assert kept == probs[: len(kept)]
        assert gain(len(kept)) == pytest.approx(max(gain(n) for n in range(min(len(probs), most - len(trees)) + 1)))
        for tree, nodes in zip(trees, admitted.nodes, strict=True):
            assert all(tree.parents[node] in (ROOT, *nodes) for node in nodes), "a tree remains"
            assert tree.take(nodes).token_ids == tuple(tree.token_ids[node] for node in nodes)


def test_draws_are_verified_whole():
    draws = DraftDistribution((3, 4), (0.5, 0.5))
    drawn = TokenTree((3, 4), (ROOT, ROOT), (-0.7, -0.7), candidates=(draws, None, None))
    admitted = admit([drawn, random_tree(random.Random(1), 10)], [0.1, 1.0], 1e6, STEEP, 4)
    assert admitted.nodes == ((0, 1), ())


def test_the_curve_is_corrected_by_what_passes_take():
    costs = PassCosts([ForwardCost(rows, 0.1) for rows in (1, 2, 4, 8, 16, 32)])
    for _ in range(40):
        costs.observe(8, 1, 0.3)
    assert costs.seconds(8) == pytest.approx(0.3, rel=0.05)
    assert 0.2 < costs.seconds(16) <= 0.31
    assert costs.seconds(1) < 0.2
    assert costs.most_rows(0.2, 32) < 8


def test_a_curve_that_falls_by_noise_costs_nobody_an_answer():
    costs = PassCosts([ForwardCost(1, 3.0), ForwardCost(2, 2.95), ForwardCost(4, 2.9)])
    for rows in (121, 119):  # extrapolated from the last two points, these would take almost no time
        costs.observe(rows, 1, 3.5)
    assert 3.0 <= costs.seconds(119) <= costs.seconds(121) < 3.5


def test_what_further_sessions_cost_makes_no_row_dearer():
    costs = PassCosts([ForwardCost(1, 0.1), ForwardCost(16, 0.1), ForwardCost(32, 0.2)])
    for _ in range(40):
        costs.observe(8, 8, 0.17)
    assert costs.seconds(8, 8) == pytest.approx(0.17, rel=0.01)
    assert costs.seconds(9, 2) == costs.seconds(2, 2) == pytest.approx(0.11, rel=0.01)
    assert costs.most_rows(0.17, 32, 8) == 16


@pytest.mark.parametrize(
    ("ready", "coming", "waits"),
    [
        (Ready(4, 4, 0.05), [(0.05, 1.0)] * 4, True),  # two halves that would alternate for ever
        (Ready(7, 7, 0.005), [(0.09, 1.0)], False),  # seven lose more than one gains
        (Ready(7, 7, 0.005), [(0.01, 1.0)], True),
        (Ready(1, 1, 0.005), [(0.09, 1.0)] * 7, True),
        (Ready(1, 30, 0.0), [(0.03, 1.0)] * 3, True),  # a prompt: the streams would wait for its whole forward pass
        (Ready(1, 1, 0.005), [(0.2, 1.0)] * 7, False),  # no pass is delayed for so long
    ],
)
def test_a_pass_waits_where_all_together_gain(ready, coming, waits):
    delay = worth_waiting(ready, coming, FLAT, 0.1)
    assert delay == (max(seconds for seconds, _ in coming) if waits else None)


class Target:
    """Takes the time of a cost curve, accepts the whole tree, which must be a chain, and records its passes."""

    def __init__(self, costs):
        self.costs = costs
        self.passes = []
        self.breaking = set()
        self.failing = set()
        self.wrong = set()  # sessions whose trees are rejected
        self.error = RuntimeError("no commit")  # of the failing sessions

    async def __call__(self, parts):
        await asyncio.sleep(self.costs.seconds(sum(part.rows for part in parts)))
        if self.breaking.intersection(part.session for part in parts):
            raise RuntimeError("broken")
        self.passes.append(parts)
        verdicts = []
        for part in parts:
            part.session.read += part.prompt_tokens
            if part.session in self.failing:
                verdicts.append(self.error)
                continue
            if part.session.unread:
                verdicts.append(None)
                continue
            accepted = () if part.session in self.wrong else tuple(part.nodes)
            verdict = Verdict(accepted, (*(part.tree.token_ids[node] for node in accepted), 7))
            part.session.commit(verdict.token_ids, finished=False)
            verdicts.append(verdict)
        return verdicts, VerifyTimings(0.1, 0.0, 0.0)


def session_of(prompt_tokens):
    request = SessionRequest((5,) * prompt_tokens, 10_000, frozenset(), Decoding(Sampling()))
    return VerifySession(KVRange(0, 0), request, list(request.prompt_ids))


def scheduler_of(target, max_rows=64):
    return Scheduler(target, target.costs, max_rows)


async def stream(scheduler, session, rounds, pause, times=None):
    """Run a client that returns `pause` seconds after each answer."""
    await scheduler.prefill(session)
    for _ in range(rounds):
        await asyncio.sleep(pause)
        await scheduler.verify(session, TokenTree((1, 2), (ROOT, 0), (-0.1, -0.2)))
        if times is not None:
            times.append(asyncio.get_running_loop().time())
    scheduler.forget(session)


def test_sessions_that_come_back_together_share_passes():
    target = Target(FLAT)

    async def scenario():
        scheduler = scheduler_of(target)
        pauses = [0.001, 0.004, 0.012, 0.02]
        await asyncio.gather(*(stream(scheduler, session_of(4), 50, pause) for pause in pauses))

    run_in_virtual_time(scenario())
    sizes = Counter(len(parts) for parts in target.passes[10:])
    assert sizes[4] >= 40


@pytest.mark.parametrize("wrong_from", [0, 20])
def test_a_draft_that_is_sure_and_wrong_outbids_nobody(wrong_from):
    """One session promises 10 tokens per round and keeps none; the other promises 6 and has all 10; 9 rows are free."""
    target = Target(STEEP)
    sure, modest = session_of(4), session_of(4)
    trimmed = {sure: [], modest: []}

    async def scenario():
        scheduler = scheduler_of(target, max_rows=12)
        await asyncio.gather(scheduler.prefill(sure), scheduler.prefill(modest))
        for round_ in range(80):
            target.wrong = {sure} if round_ >= wrong_from else set()
            trees = [TokenTree(tuple(range(10)), (ROOT, *range(9)), (each,) * 10) for each in (-0.001, -0.1)]
            answers = await asyncio.gather(*map(scheduler.verify, (sure, modest), trees))
            for session, answer in zip((sure, modest), answers, strict=True):
                trimmed[session].append(answer.trimmed)

    run_in_virtual_time(scenario())
    assert sum(trimmed[modest][-40:]) < 5 * 40 < 9 * 40 < sum(trimmed[sure][-40:])
    assert min(trimmed[sure][-40:]) < 10, "it is tried again"


def test_nobody_waits_for_those_who_take_long():
    target, times = Target(STEEP), []

    async def scenario():
        scheduler = scheduler_of(target)
        slow = asyncio.ensure_future(stream(scheduler, session_of(4), 3, 5.0))
        await stream(scheduler, session_of(4), 60, 0.001, times)
        await slow

    run_in_virtual_time(scenario())
    gaps = [after - before for before, after in pairwise(times[5:])]
    assert sorted(gaps)[len(gaps) // 2] < 0.11


def test_a_long_prompt_holds_no_stream_up_for_longer_than_promised():
    target, times = Target(STEEP), []

    async def scenario():
        scheduler = scheduler_of(target)
        streams = [asyncio.ensure_future(stream(scheduler, session_of(4), 80, 0.002, times)) for _ in range(3)]
        await asyncio.sleep(2.0)
        reading = [asyncio.ensure_future(scheduler.prefill(session_of(900))) for _ in range(2)]
        await asyncio.gather(*streams)
        await asyncio.gather(*reading)

    run_in_virtual_time(scenario())
    with_prompt = [
        STEEP.seconds(sum(part.rows for part in parts))
        for parts in target.passes
        if len(parts) > 1 and any(part.prompt_tokens for part in parts) and not all(p.prompt_tokens for p in parts)
    ]
    assert len(with_prompt) > 20
    assert max(with_prompt) <= max(STRETCH * 0.2, STEEP.seconds(3 * 3 + 16))
    pieces = [part for parts in target.passes for part in parts if part.prompt_tokens and part.session.length > 800]
    turns = [sum(part.rows for part in turn) for _, turn in groupby(pieces, lambda part: part.session)]
    assert len(turns) == 8
    assert max(turns[:-2]) == 256, "prompts take turns"


def test_prompts_ride_in_the_passes_of_streams():
    """A pass with only a piece of a prompt would make streams wait that return a little later."""
    target = Target(STEEP)

    async def scenario():
        scheduler = scheduler_of(target)
        streams = [asyncio.ensure_future(stream(scheduler, session_of(4), 100, 0.02)) for _ in range(3)]
        await asyncio.sleep(2.0)
        await scheduler.prefill(session_of(900))
        await asyncio.gather(*streams)

    run_in_virtual_time(scenario())
    sizes = Counter(len(parts) for parts in target.passes if any(part.session.length > 800 for part in parts))
    assert sizes[4] > 0.9 * sizes.total()


def test_prompts_that_come_together_are_read_in_few_passes_while_few_stream():
    """Six wait beside two streams, which may be delayed for longer: 22 passes instead of 28."""
    target = Target(STEEP)

    async def scenario():
        scheduler = scheduler_of(target, max_rows=256)
        await asyncio.gather(*(stream(scheduler, session_of(96), 20, 0.002) for _ in range(8)))

    run_in_virtual_time(scenario())
    assert sum(any(part.prompt_tokens for part in parts) for parts in target.passes) <= 24


def test_prompts_that_come_together_share_a_pass_that_holds_them():
    target = Target(STEEP)

    async def scenario():
        scheduler = scheduler_of(target, max_rows=256)
        await asyncio.gather(*(scheduler.prefill(session_of(32)) for _ in range(8)))

    run_in_virtual_time(scenario())
    assert [[part.prompt_tokens for part in parts] for parts in target.passes] == [[32] * 8]


def test_a_prompt_alone_is_read_in_few_passes():
    target = Target(STEEP)
    run_in_virtual_time(read_alone(scheduler_of(target)))
    assert [part.prompt_tokens for (part,) in target.passes] == [512, 388]


async def read_alone(scheduler):
    await scheduler.prefill(session_of(900))


def test_what_was_cancelled_is_in_no_pass():
    target = Target(STEEP)

    async def scenario():
        scheduler = scheduler_of(target)
        first, second, third = (session_of(4) for _ in range(3))
        await asyncio.gather(*(scheduler.prefill(session) for session in (first, second, third)))
        running = asyncio.ensure_future(scheduler.verify(first, TokenTree()))
        await asyncio.sleep(0.01)
        left = asyncio.ensure_future(scheduler.verify(second, TokenTree()))
        await asyncio.sleep(0.01)
        left.cancel()
        await scheduler.verify(third, TokenTree())
        await running
        assert second not in [part.session for parts in target.passes[3:] for part in parts]

    run_in_virtual_time(scenario())


def test_only_the_session_at_fault_fails():
    target = Target(STEEP)

    async def scenario():
        scheduler = scheduler_of(target)
        sessions = [session_of(4) for _ in range(3)]
        await asyncio.gather(*(scheduler.prefill(session) for session in sessions))
        target.breaking = {sessions[1]}
        answers = await asyncio.gather(
            *(scheduler.verify(session, TokenTree()) for session in sessions), return_exceptions=True
        )
        assert [isinstance(answer, RuntimeError) for answer in answers] == [False, True, False]
        target.breaking = set()
        await scheduler.verify(sessions[0], TokenTree())

    run_in_virtual_time(scenario())


def test_a_commit_that_fails_is_its_sessions_own_and_nobodys_round_runs_twice():
    target = Target(STEEP)

    async def scenario():
        scheduler = scheduler_of(target)
        sessions = [session_of(4) for _ in range(3)]
        await asyncio.gather(*(scheduler.prefill(session) for session in sessions))
        target.failing = {sessions[1]}
        before = len(target.passes)
        answers = await asyncio.gather(
            *(scheduler.verify(session, TokenTree()) for session in sessions), return_exceptions=True
        )
        assert [isinstance(answer, RuntimeError) for answer in answers] == [False, True, False]
        assert [len(parts) for parts in target.passes[before:]] == [3]
        assert [session.length for session in sessions] == [6, 5, 6]

    run_in_virtual_time(scenario())


def test_no_part_runs_twice_because_a_trial_of_the_device_fails():
    """The pass has committed when the trial begins: another session has read a piece of its prompt."""
    target = Target(STEEP)
    target.error = NotFiniteError()

    async def trial():
        raise MemoryError("no room for a trial")

    async def scenario():
        watch = FaultWatch(lambda faults: None, trial)
        scheduler = Scheduler(watch.over(target), STEEP, 64)
        sessions = [session_of(4) for _ in range(MOST_FAULTS)]
        await asyncio.gather(*(scheduler.prefill(session) for session in sessions))
        target.failing = set(sessions)
        trees = [scheduler.verify(session, TokenTree()) for session in sessions]
        *failed, commit = await asyncio.gather(*trees, scheduler.prefill(session_of(900)), return_exceptions=True)
        assert all(isinstance(error, DeviceFailedError) for error in failed)
        assert commit.token_ids == (7,)

    run_in_virtual_time(scenario())
    assert max(len(parts) for parts in target.passes) == MOST_FAULTS + 1
    run = Counter(id(part) for parts in target.passes for part in parts)
    assert set(run.values()) == {1}


def test_each_pays_for_what_the_pass_took_longer_because_of_it():
    target = Target(STEEP)

    async def scenario():
        scheduler = scheduler_of(target)
        sessions = [session_of(4) for _ in range(3)]
        await asyncio.gather(*(scheduler.prefill(session) for session in sessions))
        chain = TokenTree(tuple(range(20)), (ROOT, *range(19)), (-0.001,) * 20)
        trees = [chain, TokenTree(), TokenTree()]
        answers = await asyncio.gather(*map(scheduler.verify, sessions, trees))
        paid = [answer.timings.attributed for answer in answers]
        assert sum(paid) == pytest.approx(answers[0].timings.forward)
        assert paid[1] == paid[2] > 0
        # 23 rows: without the chain, two would be as cheap as eight; without a root there would be one row less
        marginal = STEEP.seconds(23, 3) - STEEP.seconds(2, 2), STEEP.seconds(23, 3) - STEEP.seconds(22, 2)
        assert paid[0] / paid[1] == pytest.approx(marginal[0] / marginal[1], rel=1e-3)

    run_in_virtual_time(scenario())


def test_more_sessions_than_rows_take_turns():
    target = Target(STEEP)

    async def scenario():
        scheduler = scheduler_of(target, max_rows=4)
        await asyncio.gather(*(stream(scheduler, session_of(1), 30, 0.001) for _ in range(10)))

    run_in_virtual_time(scenario())
    rounds = Counter(part.session for parts in target.passes for part in parts if not part.prompt_tokens)
    assert set(rounds.values()) == {30}
    assert max(sum(part.rows for part in parts) for parts in target.passes) <= 4 + 1
