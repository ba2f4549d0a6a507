"""Tests the queue: order, turns of principals, room, refusals, and requests that leave."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatree.common.errors import OutOfRangeError, ServiceBusyError
from dynatree.serving.admission import Admission, Quota


class Visitor:
    """A request that stays until it is told to leave."""

    def __init__(self, admission, name, order, principal="", slots=1, seconds=None):
        self.name, self.principal = name, principal
        self.leave = asyncio.Event()
        self.positions = []
        self.task = asyncio.ensure_future(self._run(admission, name, order, principal, slots, seconds))

    async def _run(self, admission, name, order, principal, slots, seconds):
        async with admission.queued(principal, slots, seconds) as turn:
            async for ahead in turn.positions():
                self.positions.append(ahead)
            order.append(name)
            await self.leave.wait()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_first_come_first_served_and_the_positions_say_so():
    async def scenario():
        admission, order = Admission(sessions=1, slots=10, queue=10), []
        visitors = [Visitor(admission, number, order) for number in range(4)]
        await settle()
        assert (admission.running, admission.waiting) == (1, 3)
        for visitor in visitors:
            visitor.leave.set()
            await settle()
        assert order == [0, 1, 2, 3]
        assert [visitor.positions for visitor in visitors] == [[], [0], [1, 0], [2, 1, 0]]
        assert (admission.running, admission.waiting, admission.slots_held) == (0, 0, 0)

    run(scenario())


def test_principals_take_turns():
    async def scenario():
        admission, order = Admission(sessions=1, slots=10, queue=10), []
        names = [("first", "a"), ("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c"), ("b2", "b")]
        visitors = {name: Visitor(admission, name, order, principal) for name, principal in names}
        await settle()
        assert visitors["a3"].positions[-1] == 5  # after a1, a2, b1, b2, c1
        assert visitors["b2"].positions[-1] == 4  # after a1, a2, b1, c1
        while len(order) < len(names):
            visitors[order[-1]].leave.set()
            await settle()
        assert order == ["first", "a1", "b1", "c1", "a2", "b2", "a3"]

    run(scenario())


def test_a_large_request_is_not_overtaken():
    async def scenario():
        admission, order = Admission(sessions=9, slots=10, queue=10), []
        running = Visitor(admission, "running", order, slots=5)
        await settle()
        large, small = (Visitor(admission, name, order, slots=slots) for name, slots in (("large", 8), ("small", 1)))
        await settle()
        assert order == ["running"]
        running.leave.set()
        await settle()
        assert order == ["running", "large", "small"]
        assert admission.slots_held == 9
        for visitor in (large, small):
            visitor.leave.set()
        await settle()

    run(scenario())


def test_who_leaves_the_queue_leaves_nothing_behind():
    async def scenario():
        admission, order = Admission(sessions=1, slots=10, queue=10), []
        visitors = [Visitor(admission, number, order) for number in range(4)]
        await settle()
        visitors[1].task.cancel()
        await settle()
        assert visitors[3].positions[-1] == 1
        visitors[0].task.cancel()
        visitors[2].leave.set()
        visitors[3].leave.set()
        await settle()
        assert order == [0, 2, 3]
        assert (admission.running, admission.waiting, admission.slots_held) == (0, 0, 0)

    run(scenario())


def test_what_cannot_be_served_is_refused_at_once():
    async def scenario():
        admission, order = Admission(sessions=1, slots=10, queue=2), []
        with pytest.raises(OutOfRangeError, match="11 tokens"):
            await Visitor(admission, "too large", order, slots=11).task
        visitors = [Visitor(admission, number, order) for number in range(3)]
        await settle()
        with pytest.raises(ServiceBusyError, match="2 requests are waiting") as refused:
            await Visitor(admission, "one more", order).task
        assert refused.value.retry_after is not None
        for visitor in visitors:
            visitor.leave.set()
        await settle()
        assert order == [0, 1, 2]

    run(scenario())


def test_a_deadline_before_the_turn_is_refused_with_the_time_to_wait():
    async def scenario():
        admission, order = Admission(sessions=1, slots=10, queue=9), []
        admission._usual = 10.0  # seconds that a completion takes
        visitors = [Visitor(admission, number, order) for number in range(2)]
        await settle()
        with pytest.raises(ServiceBusyError, match="exceeds the deadline") as refused:
            await Visitor(admission, "hurried", order, seconds=5.0).task
        assert refused.value.retry_after == pytest.approx(15.0)
        patient = Visitor(admission, "patient", order, seconds=60.0)
        for visitor in (*visitors, patient):
            visitor.leave.set()
        await settle()
        assert order == [0, 1, "patient"]

    run(scenario())


def test_who_has_no_room_in_the_kv_cache_waits_like_others():
    """With a free session and an empty queue, the queue's length and the deadline still apply."""

    async def scenario():
        admission, order = Admission(sessions=9, slots=10, queue=0), []
        admission._usual = 10.0
        running = [Visitor(admission, number, order, slots=5) for number in range(2)]
        await settle()
        with pytest.raises(ServiceBusyError, match=r"100% of the KV cache .* 0 requests are waiting") as refused:
            await Visitor(admission, "one more", order).task
        assert refused.value.retry_after == pytest.approx(5.0), "two at a time, whatever sessions would allow"
        for visitor in running:
            visitor.leave.set()
        await settle()
        admission = Admission(sessions=9, slots=10, queue=1)
        admission._usual = 10.0
        running = [Visitor(admission, number, order, slots=5) for number in (2, 3)]
        await settle()
        with pytest.raises(ServiceBusyError, match="exceeds the deadline"):
            await Visitor(admission, "hurried", order, seconds=2.0).task
        for visitor in running:
            visitor.leave.set()
        await settle()
        assert order == [0, 1, 2, 3]

    run(scenario())


def test_whoever_is_refused_is_told_to_wait_before_anybody_has_ended():
    async def scenario():
        admission, order = Admission(sessions=1, slots=10, queue=0), []
        running = Visitor(admission, "running", order)
        await settle()
        with pytest.raises(ServiceBusyError) as refused:
            await Visitor(admission, "one more", order).task
        assert refused.value.retry_after >= 0.1
        running.leave.set()
        await settle()

    run(scenario())


def test_who_waits_for_his_own_session_holds_up_nobody():
    async def scenario():
        admission, order = Admission(sessions=3, slots=100, queue=4, quota=Quota(sessions=1, queue=4)), []
        kept = [Visitor(admission, number, order, "a") for number in range(5)]
        await settle()
        assert (admission.running, admission.waiting) == (1, 4)
        other = Visitor(admission, "b", order, "b", seconds=5.0)
        await settle()
        assert order == [0, "b"]
        with pytest.raises(ServiceBusyError, match="4 requests of this principal are waiting"):
            async with admission.queued("a", 1):
                pass
        for each in (*kept, other):
            each.leave.set()
            await settle()

    run(scenario())


def test_a_quota_of_waiting_requests_alone():
    async def scenario():
        admission, order = Admission(sessions=1, slots=100, queue=9, quota=Quota(queue=2)), []
        kept = [Visitor(admission, number, order, "a") for number in range(3)]
        await settle()
        with pytest.raises(ServiceBusyError, match="2 requests of this principal are waiting"):
            async with admission.queued("a", 1):
                pass
        kept.append(Visitor(admission, "b", order, "b"))
        await settle()
        assert admission.waiting == 3
        for each in kept:
            each.leave.set()
            await settle()

    run(scenario())


def test_a_full_queue_has_a_place_for_whoever_has_fewer():
    """One principal's five requests must not make the queue refuse another principal's request."""

    async def scenario():
        admission, order = Admission(sessions=1, slots=100, queue=4), []
        kept = [Visitor(admission, number, order, "a") for number in range(5)]
        await settle()
        kept += [Visitor(admission, name, order, "b") for name in ("b0", "b1", "b2")]
        await settle()
        assert [each.task.done() for each in kept] == [False, False, False, True, True, False, False, True]
        assert admission.waiting == 4
        for each in (kept[3], kept[4]):
            with pytest.raises(ServiceBusyError, match="made room for a principal with fewer") as refused:
                await each.task
            assert refused.value.retry_after is not None
        with pytest.raises(ServiceBusyError, match="4 requests are waiting, which is the limit"):
            await kept[7].task
        for each in kept:
            each.leave.set()
            await settle()
        assert order == [0, 1, "b0", 2, "b1"]
        assert (admission.running, admission.waiting, admission.slots_held) == (0, 0, 0)

    run(scenario())


def test_a_deadline_counts_the_principals_that_are_ahead_and_not_all_of_their_requests():
    async def scenario():
        admission, order = Admission(sessions=1, slots=100, queue=9), []
        admission._usual = 10.0
        kept = [Visitor(admission, number, order, "a") for number in range(6)]
        await settle()
        with pytest.raises(ServiceBusyError, match="5 requests are ahead"):
            await Visitor(admission, "a", order, "a", seconds=25.0).task
        kept.append(Visitor(admission, "b", order, "b", seconds=25.0))
        for each in kept:
            each.leave.set()
            await settle()
        assert order == [0, 1, "b", 2, 3, 4, 5]

    run(scenario())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 3),
    st.lists(st.one_of(st.sampled_from("aaabcd"), st.integers(0, 20)), max_size=60),
)
def test_nobody_with_less_than_its_share_is_refused(queue, sessions, steps):
    """Requests come (letters) and leave (numbers). A share is the queue's size divided by the waiting principals."""

    async def scenario():
        admission, order, visitors = Admission(sessions, 100, queue), [], []
        for step in steps:
            if isinstance(step, int):
                present = [each for each in visitors if not each.task.done()]
                for each in present[step : step + 1]:
                    each.leave.set()
                    if step % 2:
                        each.task.cancel()
                await settle()
                continue
            waiting = [each for each in visitors if not each.task.done() and each.name not in order]
            share = queue // len({each.principal for each in waiting} | {step})
            visitor = Visitor(admission, len(visitors), order, step)
            visitors.append(visitor)
            await settle()
            left = [each for each in waiting if each.task.done()]
            assert len(left) + visitor.task.done() <= 1, "nobody more is refused than there is no room for"
            if sum(each.principal == step for each in waiting) < share:
                assert not visitor.task.done()
            for each in left:
                others = [other for other in waiting if other.principal == each.principal]
                assert each is others[-1], "the newest"
                assert len(others) > sum(other.principal == step for other in waiting) + 1, "of those who have more"
            assert admission.waiting <= queue
        for each in visitors:
            each.leave.set()
        await asyncio.gather(*(each.task for each in visitors), return_exceptions=True)
        for principal in "abcd":
            names = [each.name for each in visitors if each.principal == principal]
            assert [name for name in order if name in names] == sorted(set(order) & set(names)), "first come"
        assert (admission.running, admission.waiting, admission.slots_held) == (0, 0, 0)

    run(scenario())


def test_nobody_is_remembered_who_has_nothing():
    async def scenario():
        admission = Admission(sessions=1, slots=100, queue=9, quota=Quota(sessions=1))
        for number in range(100):
            async with admission.queued(f"p{number}", 1) as turn:
                await turn.come()
        assert len(admission._running_of) == 0

    run(scenario())
