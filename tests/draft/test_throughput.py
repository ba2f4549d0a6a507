"""Tests the decisions of the policy `throughput`."""

import math
import random
import statistics
from dataclasses import dataclass, replace

import pytest

from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.tree import ROOT
from dynatree.draft.control.round_costs import Costs, RoundCost
from dynatree.draft.policies import create_policy
from dynatree.draft.policies.growing_tree import GrowingTree, TrieNode
from tests.support.growing import LOOP, along, constant, frozen, grow, measured, outcome_of, read


def expensive_nodes():
    costs = Costs()
    for nodes in (0, 4, 8, 16) * 16:
        costs.observe(RoundCost(nodes, 0.01 * (1 + nodes), 2 if nodes else 0, 0.002))
    return costs


def free_nodes():
    costs = Costs()
    for nodes in (0, 4, 8, 16, 32, 64) * 16:
        costs.observe(RoundCost(nodes, 0.2, 2 if nodes else 0, 0.0002))
    return costs


def test_throughput_sends_more_where_nodes_are_cheaper():
    model = constant(0.7, 0.2, 0.1)
    few = frozen(create_policy("throughput", {}, expensive_nodes()), model)
    many = frozen(create_policy("throughput", {}, free_nodes()), model)
    assert len(few) < len(many)
    assert len(many) > 20


def test_throughput_fills_the_rows_that_cost_nothing_and_stops_before_those_that_do():
    costs = Costs()
    for nodes, seconds in ((0, 0.2), (15, 0.21), (31, 0.4)) * 16:
        costs.observe(RoundCost(nodes, seconds, 2 if nodes else 0, 0.0002))
    assert len(frozen(create_policy("throughput", {}, costs), constant(0.5, 0.2, 0.1))) == 15


def test_throughput_leaves_the_model_out_where_a_loop_goes_on():
    policy = create_policy("throughput", {}, free_nodes())
    model = constant(*[0.1] * 10)
    forwards, text, length = [], LOOP * 100, len(LOOP)
    for _ in range(12):
        tree, selected, levels = grow(policy, model, context=text[:length])
        sent = tree.freeze(selected)
        accepted = along(sent, text[length:])
        length += len(accepted) + 1
        policy.observe(outcome_of(sent, accepted, levels=levels, draft=0.05 * levels, verify=0.2))
        forwards.append(levels)
    assert forwards[0] > 0, "a continuation has to prove itself"
    assert sum(forwards[-4:]) <= 1, "it is tried again now and then"
    assert len(accepted) > 40


def test_throughput_takes_a_root_that_is_known_with_a_continuation_that_is_not():
    """The cost of a level may rule out reading it, but re-rooting or drafting ahead may have read it already."""
    model = constant(0.04, *[0.0001] * 4, 0.24, 0.24, 0.24, 0.24)
    levels = {}
    for known in (False, True):
        policy = create_policy("throughput", {}, dear_draft())
        tree = GrowingTree(TrieNode(LOOP[-1]), LOOP)
        if known:
            read(tree, ROOT, model, policy.breadth)
        levels[known] = policy.start(tree)
    assert levels == {False: [], True: [ROOT]}


def test_throughput_gives_up_a_hostile_draft_and_tries_it_again():
    costs = free_nodes()
    for _ in range(200):
        costs.observe(RoundCost(0, 0.01, 0, 0.0))
        costs.observe(RoundCost(8, 0.02, 4, 0.02))  # a level costs half a plain step
    policy = create_policy("throughput", {}, costs)
    drafted = []
    for _ in range(300):
        tree, selected, forwards = grow(policy, constant(0.4, 0.3, 0.3))
        sent = tree.freeze(selected)
        policy.observe(outcome_of(sent, (), verify=0.01 + 0.00125 * len(sent), draft=0.005 * forwards, levels=forwards))
        drafted.append(forwards > 0)
    assert drafted[0]
    late = drafted[100:]
    assert sum(late) <= len(late) / 20, "it pauses for longer each time"
    assert any(late), "and tries again"


def dear_draft():
    """A draft forward pass takes twice as long as a plain step."""
    costs = Costs()
    for _ in range(20):
        costs.observe(RoundCost(0, 0.01, 0, 0.0))
        costs.observe(RoundCost(3, 0.01, 1, 0.02))
    return costs


def rounds_with_forwards(policy, rounds, level):
    """Return which of `rounds` rounds asked the draft, when each of them misses."""
    asked = []
    for number in range(rounds):
        tree, selected, forwards = grow(policy, constant(0.4, 0.3, 0.3))
        policy.observe(outcome_of(tree.freeze(selected), (), verify=0.01, draft=level * forwards, levels=forwards))
        if forwards:
            asked.append(number)
    return asked


def test_throughput_hardly_tries_a_draft_that_could_not_pay_were_it_perfect():
    """A trial takes as long as two plain steps, so the next one has to wait for 64 times that."""
    assert rounds_with_forwards(create_policy("throughput", {}, dear_draft()), 200, level=0.02) == [63, 189]


def test_a_session_begins_with_a_pause_where_those_before_it_had_no_use_for_the_draft():
    costs = Costs(measured((1, 0.01), (16, 0.011)), measured((4, 0.002)))
    policies = (create_policy("throughput", {}, costs) for _ in range(3))
    first, second, third = (rounds_with_forwards(policy, 100, level=0.002) for policy in policies)
    assert (first[0], second[0], third[0]) == (0, 3, 7)
    assert len(second) < len(first) / 4


def test_what_a_forward_takes_to_catch_up_after_a_pause_is_not_its_usual_cost():
    costs = Costs(measured((1, 0.01), (16, 0.011)), measured((4, 0.009)))
    policy = create_policy("throughput", {}, costs)
    for _ in range(100):
        paused = policy.parameters()["paused"]
        tree, selected, forwards = grow(policy, constant(0.4, 0.3, 0.3))
        seconds = forwards * (0.009 if not paused else 0.05)
        policy.observe(outcome_of(tree.freeze(selected), (), verify=0.01, draft=seconds, levels=forwards))
    assert costs.draft_forward_seconds == pytest.approx(0.009)


def ten_ms(_, forwards):
    return 0.01 * forwards


def path_of(sent, share, generator):
    """The accepted path of a tree whose first guesses are right at the given share of positions."""
    accepted, node = [], ROOT
    while (node := sent.children.get((node, 0))) is not None and generator.random() < share:
        accepted.append(node)
    return tuple(accepted)


def text_of(share, seconds, level, costs=None, max_depth=4):
    """Run 300 rounds of a session; the first of the draft's three guesses is right at the given share of positions.

    `seconds(nodes, forwards)` is the time of a verification, and `level(number, forwards)` that of a round's forward
    passes. Return which rounds asked the draft, and the tokens per second.
    """
    policy = create_policy("throughput", {}, costs or Costs())
    generator = random.Random(1)
    asked, tokens, spent = [], 0, 0.0
    for number in range(300):
        tree, selected, forwards = grow(policy, constant(0.8, 0.1, 0.1), context=(1000 + number,), max_depth=max_depth)
        sent = tree.freeze(selected)
        accepted = path_of(sent, share, generator)
        verify, draft = seconds(len(sent), forwards), level(number, forwards)
        policy.observe(outcome_of(sent, accepted, verify=verify, draft=draft, levels=forwards))
        tokens += len(accepted) + 1
        spent += verify + draft
        if forwards:
            asked.append(number)
    return asked, tokens / spent


@pytest.mark.parametrize("stalled", ["level", "verify"])
def test_one_stall_at_the_start_does_not_switch_a_good_draft_off(stalled):
    costs = Costs()
    first = iter([1.9])

    def verify(nodes, _):
        return 0.2 + 0.001 * nodes + (next(first, 0.0) if stalled == "verify" else 0.0)

    def level(number, forwards):
        return 0.01 * forwards + (next(first, 0.0) if stalled == "level" else 0.0)

    text_of(0.8, verify, level, costs)
    asked, _ = text_of(0.8, verify, level, costs)
    assert len(asked) > 290


def test_a_draft_that_makes_verification_dearer_than_it_is_worth_is_left_out():
    _, rate = text_of(0.5, lambda _, forwards: 0.002 + 0.0025 * (forwards > 0), lambda _, forwards: 0.0005 * forwards)
    assert rate > 0.9 * 500


def test_rows_that_cost_more_than_they_add_are_noticed_though_no_plain_step_was_chosen():
    """Each tile of rows costs more plain steps than a chain of the draft's tokens gains."""
    _, rate = text_of(0.5, lambda nodes, _: 0.3 if not nodes else 0.9, lambda _, forwards: 0.001 * forwards)
    assert rate > 0.9 / 0.3


def test_a_session_begins_with_what_those_before_it_found_the_draft_to_be_worth():
    """A cheap draft is never right: the first session asks it until its bins show that, the second hardly at all."""
    costs = Costs()
    sessions = [text_of(0.0, lambda nodes, _: 0.2 + 0.001 * nodes, ten_ms, costs) for _ in range(3)]
    first, *later = [len(asked) for asked, _ in sessions]
    assert max(later) < first / 4


def test_waiting_for_other_sessions_is_no_cost_of_a_trees_size():
    costs = Costs()
    policy = create_policy("throughput", {}, costs)
    for _ in range(20):
        tree, selected, forwards = grow(policy, constant(0.8, 0.1, 0.1))
        outcome = outcome_of(tree.freeze(selected), (), verify=0.2, draft=0.01, levels=forwards)
        policy.observe(replace(outcome, waited_seconds=0.9))
    assert costs.verify(0) == 0.2
    assert policy.parameters()["rate"] >= 5.0, "never less than plain decoding's"


def gpu(step):
    """Rows are nearly free, and a draft forward pass takes a fiftieth of a plain step of `step` seconds."""
    return lambda nodes, _: step * (1 + nodes / 1000), lambda _, forwards: step / 50 * forwards


def test_a_stall_after_a_forward_is_forgotten_though_no_other_round_can_be_compared():
    costs = Costs()
    for _ in range(4):
        costs.observe(RoundCost(0, 0.02, 0, 0.0))
    costs.observe(RoundCost(0, 1.0, 1, 0.0004))
    asked, _ = text_of(0.8, *gpu(0.02), costs)
    assert len(asked) > 290


@pytest.mark.parametrize(
    ("times", "loops"),
    [(2.0, False), (3.0, True), *(pytest.param(*each, marks=pytest.mark.long) for each in ((2.0, True), (3.0, False)))],
)
def test_a_machine_that_becomes_slower_does_not_leave_a_good_draft_off(times, loops):
    """The draft is used again even if sizes were known without it, from n-grams in a looping text."""
    costs = Costs()
    _, before = text_of(0.6, *gpu(0.02), costs)
    for _ in range(40 if loops else 0):
        costs.observe(RoundCost(63, 0.0212, 0, 0.0))
        costs.observe(RoundCost(0, 0.02, 0, 0.0))
    for _ in range(3):
        _, after = text_of(0.6, *gpu(0.02 * times), costs)
    assert after > 0.9 * before / times


AVX2 = ((1, 0.31), (2, 0.33), (4, 0.75), (8, 0.87), (16, 1.1), (32, 2.0), (64, 3.7))
H200 = ((1, 0.0085), (2, 0.0085), (4, 0.0086), (8, 0.0086), (16, 0.0087), (32, 0.009), (64, 0.0095))


def seconds_of(points):
    """Each number of rows costs as much as the next number that is given."""
    return lambda nodes, _: next(seconds for rows, seconds in points if rows > nodes)


def test_a_services_first_tree_fits_its_machine():
    model = constant(0.7, 0.2, 0.05, 0.02)
    level = measured((4, 0.0005))
    assert len(frozen(create_policy("throughput", {}, Costs(measured(*AVX2), level)), model)) == 1
    assert len(frozen(create_policy("throughput", {}, Costs(measured(*H200), level)), model)) > 15


def test_a_long_chain_is_found_where_the_first_rows_are_the_dear_ones():
    """A chain of 15 gives 2.6 tokens in the time of a plain step; shorter chains give at most 1.9."""
    _, rate = text_of(0.97, seconds_of(AVX2), lambda _, forwards: 0.03 * forwards, Costs(measured(*AVX2)), max_depth=63)
    assert rate > 2.2 / 0.31


@pytest.mark.parametrize("points", [AVX2, H200])
def test_a_draft_that_is_sure_and_always_wrong_costs_little(points):
    plain = points[0][1]
    _, rate = text_of(0.0, seconds_of(points), lambda _, forwards: plain / 10 * forwards, Costs(measured(*points)))
    assert rate > 0.95 / plain


STEEP = ((1, 0.1), (2, 0.102), (4, 0.108), (8, 0.12), (16, 0.2), (32, 0.4), (64, 0.8))
DEAR = ((1, 0.1), (2, 0.15), (4, 0.2), (8, 0.3), (16, 0.5), (32, 1.0), (64, 2.0))


@dataclass(frozen=True)
class Session:
    """A simulated session.

    Attributes:
        share: Share of positions at which the draft's first guess is right.
        reading: Seconds of the draft's prefill.
        tokens: Tokens after which the target ends the completion.
        most: Most tokens that the request allows.
    """

    share: float
    reading: float = 0.05
    tokens: int = 60
    most: int = 1000


def speeds_of_sessions(sessions, forward, costs=None, points=STEEP):
    """Run sessions one after the other, and return each one's tokens per plain step.

    A plain step takes 0.1 s, and a forward pass of the draft `forward` seconds.
    """
    seconds = seconds_of(points)
    costs = costs or Costs(measured(*points), measured((4, forward)))
    generator, speeds = random.Random(2), []
    for number, session in enumerate(sessions):
        policy = create_policy("throughput", {}, costs)
        unread, tokens, spent = session.reading, 0, 0.0
        if policy.reads_prompt(unread, session.most):
            unread, spent = 0.0, unread
        while tokens < session.tokens:
            context, room = (1000 + tokens + 1000 * number,), session.most - tokens - 1
            tree, selected, forwards = grow(
                policy, constant(0.8, 0.1, 0.1), context=context, max_depth=room, unread=unread
            )
            sent = tree.freeze(selected)
            accepted = path_of(sent, session.share, generator)[: session.tokens - tokens - 1]
            verify, draft = seconds(len(sent), forwards), forward * forwards
            if forwards:
                draft, unread = draft + unread, 0.0
            policy.observe(outcome_of(sent, accepted, verify=verify, draft=draft, levels=forwards))
            tokens += len(accepted) + 1
            spent += verify + draft
        policy.end()
        speeds.append(tokens / spent * 0.1)
    return speeds


@pytest.mark.parametrize("reading", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("forward", [0.005, 0.05, 0.2])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_useless_draft_costs_sessions_no_more_than_its_trials(share, forward, reading):
    speeds = speeds_of_sessions([Session(share, reading)] * 30, forward)
    assert statistics.harmonic_mean(speeds[5:]) > 0.97


@pytest.mark.parametrize(
    ("tokens", "forward", "points"),
    [
        *((3, 0.02, STEEP), (10, 0.01, DEAR)),
        *(
            pytest.param(*each, STEEP, marks=pytest.mark.long)
            for each in ((3, 0.05), (6, 0.01), (10, 0.05), (20, 0.02))
        ),
    ],
)
def test_a_useless_draft_costs_short_sessions_no_more(tokens, forward, points):
    """Each of these sessions ends before its pauses become long."""
    speeds = speeds_of_sessions([Session(0.0, 0.0, tokens)] * (1200 // tokens), forward, points=points)
    assert statistics.harmonic_mean(speeds[len(speeds) // 2 :]) > 0.98


def test_a_draft_that_suits_every_other_session_costs_short_sessions_no_more():
    speeds = speeds_of_sessions([Session(0.0, tokens=3), Session(0.8, tokens=3)] * 150, 0.02)
    assert statistics.harmonic_mean(speeds[100:]) > 0.98


def test_a_draft_that_paid_for_long_has_no_time_for_more_trials_once_it_does_not():
    speeds = speeds_of_sessions([Session(0.8, tokens=200)] * 40 + [Session(0.0, reading=1.0)] * 10, 0.02)
    assert statistics.harmonic_mean(speeds[40:]) > 0.92


@pytest.mark.parametrize(("forward", "tokens", "sessions"), [(0.005, 60, 4), (0.03, 60, 30), (0.02, 10, 20)])
def test_a_draft_that_becomes_good_is_used_again(forward, tokens, sessions):
    useless, good = Session(0.0, 0.0, tokens), Session(0.8, 0.0, tokens)
    speeds = speeds_of_sessions([useless] * (720 // tokens) + [good] * (sessions + 5), forward)
    found = statistics.harmonic_mean(speeds[-5:])
    assert found > 0.9 * statistics.harmonic_mean(speeds_of_sessions([good] * 10, forward)) > 1.1


@pytest.mark.parametrize(("forward", "sessions"), [(0.005, 4), (0.03, 30)])
def test_a_draft_that_becomes_good_and_first_has_to_read_is_used_again(forward, sessions):
    useless, good = Session(0.0, 0.3, 60), Session(0.8, 0.3, 150)
    *_, last = speeds_of_sessions([useless] * 12 + [good] * sessions, forward)
    assert last > 0.9 * min(speeds_of_sessions([good] * 6, forward)) > 1.2


def test_a_draft_that_was_never_right_is_still_tried_with_nodes():
    costs = Costs(measured(*STEEP), measured((4, 0.01)))
    speeds_of_sessions([Session(0.0)] * 5, 0.01, costs)
    for _ in range(1000):
        costs.track_record.calibration.observe(math.log(0.8), accepted=False)
    assert statistics.harmonic_mean(speeds_of_sessions([Session(0.8)] * 10, 0.01, costs)[5:]) > 1.5


def test_a_good_draft_reads_each_prompt_that_is_worth_it():
    """The draft makes 100 tokens at least 4 seconds faster."""
    costs = Costs(measured(*STEEP), measured((4, 0.005)))
    speeds_of_sessions([Session(0.8, 0.3, 200)] * 10, 0.005, costs)
    assert create_policy("throughput", {}, costs).reads_prompt(2.0, 100)
    assert not create_policy("throughput", {}, costs).reads_prompt(2.0, 5)
    assert not create_policy("throughput", {}, costs).reads_prompt(10.0, 100)
    assert create_policy("fixed", {}, costs).reads_prompt(10.0, 100)


@pytest.mark.parametrize(("reading", "tokens"), [(3.0, 20), (1.0, 5)])
def test_a_good_draft_reads_no_long_prompts_of_short_completions(reading, tokens):
    speeds = speeds_of_sessions([Session(0.8, reading, tokens)] * 10, 0.02)
    assert min(speeds[2:]) > 0.97


def test_a_prompt_is_read_later_if_its_completion_is_longer_than_usual():
    short, long = Session(0.8, 1.0, 5), Session(0.8, 1.0, 300)
    *_, last = speeds_of_sessions([short] * 10 + [long], 0.02)
    assert last > 0.9 * speeds_of_sessions([long], 0.02)[0] > 1.2


def complete(costs, *, tokens, most):
    """Run one completion without accepted nodes."""
    policy = create_policy("throughput", {}, costs)
    for done in range(tokens):
        tree, selected, _ = grow(policy, constant(0.4, 0.3, 0.3), max_depth=most - done - 1)
        policy.observe(outcome_of(tree.freeze(selected), ()))
    policy.end()
    return costs.track_record.usual_tokens


def test_the_usual_length_is_learnt_from_completions_that_their_limit_did_not_end():
    costs = Costs()
    assert [complete(costs, tokens=0, most=1), *(complete(costs, tokens=5, most=5) for _ in range(3))] == [256] * 4
    assert [complete(costs, tokens=5, most=100) for _ in range(3)] == [256, 5, 5]
    assert [complete(costs, tokens=9, most=9) for _ in range(4)] == [5, 9, 9, 9]


def test_a_session_begins_with_the_price_of_a_row_if_others_are_open():
    def price(policy):
        tree, selected, forwards = grow(policy, constant(0.6, 0.2, 0.2))
        learnt = policy.parameters()["row_price"]
        outcome = outcome_of(tree.freeze(selected), (), levels=forwards)
        policy.observe(replace(outcome, pass_statistics=PassStatistics(sessions=2, row_price=0.3, open_sessions=2)))
        return learnt

    costs = free_nodes()
    sessions = [create_policy("throughput", {}, costs) for _ in range(3)]
    assert [price(policy) for policy in sessions] == [0.0, 0.3, 0.3]
    for policy in sessions[:2]:
        policy.end()
    assert price(create_policy("throughput", {}, costs)) == 0.0
