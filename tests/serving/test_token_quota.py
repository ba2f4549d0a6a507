"""Tests token quotas: the charge at entry, the use, and the refund, however requests come and end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatree.common.errors import QuotaError
from dynatree.serving.admission import Admission, Quota, Turn
from dynatree.serving.token_quota import LEAST_KEPT, Allowance, TokenNeed, TokenQuota

QUOTA = 120  # per minute; two per second
CONTEXT = 150
ENDS = {"end": None, "cancel": asyncio.CancelledError, "error": RuntimeError}

entries = st.tuples(
    st.just("enter"),
    st.sampled_from("ab"),
    st.integers(1, 70),  # tokens of the prompt
    st.integers(0, 40),  # tokens of a resumed completion
    st.one_of(st.none(), st.integers(1, 120)),  # new tokens; None means open-ended
    st.integers(1, 3),  # completions
)
moves = st.tuples(st.sampled_from(["prefill", "tokens", *ENDS]), st.integers(0, 5), st.integers(1, 60))
waits = st.tuples(st.just("wait"), st.integers(0, 40))


@dataclass
class Bucket:
    """The rule: at most a minute's tokens, refilled at the quota's rate, less the used tokens."""

    tokens: float = QUOTA

    def wait(self, seconds: float) -> None:
        self.tokens = min(QUOTA, self.tokens + QUOTA / 60 * seconds)


@dataclass
class Request:
    """An open request, as the draft service runs it."""

    principal: str
    begun: int  # tokens of a completion's prompt and of its resumed part
    most: int
    turn: Turn
    stack: AsyncExitStack
    used: int = 0
    overdrawn: int = 0

    def use(self, tokens: int) -> int:
        """Use as many of these tokens as the request may."""
        tokens = min(tokens, self.most - self.used) if self.turn.admitted else 0
        self.overdrawn += max(0, tokens - self.turn.charge.held)
        self.turn.charge.use(tokens)
        self.used += tokens
        return tokens


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(entries, moves, moves, waits), max_size=50))
def test_what_is_used_keeps_to_the_quota_however_requests_come_and_end(steps: list[tuple]) -> None:
    """The tokens left plus the tokens held equal a bucket that counts only used tokens.

    So a request's used tokens are never refunded, however it ends, and no unused token is lost.
    """

    async def scenario() -> None:
        now = [0.0]
        admission = Admission(4, 10**6, 100, Quota(tokens=QUOTA), clock=lambda: now[0])
        buckets: defaultdict[str, Bucket] = defaultdict(Bucket)
        requests: list[Request] = []
        uses: list[tuple[float, str, int]] = []  # except those beyond the held tokens
        for step in steps:
            match step:
                case ("wait", seconds):
                    now[0] += seconds
                    for bucket in buckets.values():
                        bucket.wait(seconds)
                case ("enter", principal, prompt, received, new, completions):
                    begun, limit = prompt + received, CONTEXT if new is None else prompt + received + new
                    need = TokenNeed(begun + (completions - 1) * prompt, completions * limit, open_ended=new is None)
                    open_ = [each for each in requests if each.principal == principal]
                    left = buckets[principal].tokens - sum(each.turn.charge.held for each in open_)
                    covered = need.most <= left
                    fits = min(need.least if new is None else need.most, QUOTA) <= left
                    alone = all(each.turn.charge.covered for each in open_)
                    stack = AsyncExitStack()
                    entering = stack.enter_async_context(admission.queued(principal, 1, tokens=need))
                    if covered or (fits and alone):
                        turn = await entering
                        assert turn.charge.covered == covered
                        assert turn.charge.held == min(need.most, int(left))
                        requests.append(Request(principal, begun, need.most, turn, stack))
                    else:
                        with pytest.raises(QuotaError) as refused:
                            await entering
                        assert refused.value.retry_after is not None
                case (end, index, _) if end in ENDS and index < len(requests):
                    request = requests.pop(index)
                    kind = ENDS[end]
                    await request.stack.__aexit__(kind, kind and kind(), None)
                    assert request.turn.charge.held == 0
                case (move, index, tokens) if index < len(requests):
                    request = requests[index]
                    before = request.overdrawn
                    used = request.use(request.begun if move == "prefill" else tokens)
                    buckets[request.principal].tokens -= used
                    uses.append((now[0], request.principal, used - (request.overdrawn - before)))
            for principal, bucket in buckets.items():
                open_ = [each for each in requests if each.principal == principal]
                assert sum(not each.turn.charge.covered for each in open_) <= 1
                assert all(each.turn.charge.held >= 0 for each in open_)
                assert not any(each.overdrawn for each in open_ if each.turn.charge.covered)
                held = sum(each.turn.charge.held for each in open_)
                allowance = admission._tokens._allowances.get(principal)
                assert (allowance.left if allowance else QUOTA) + held == bucket.tokens
        for index, (begin, principal, _) in enumerate(uses):
            total = 0
            for at, other, tokens in uses[index:]:
                total += tokens if other == principal else 0
                assert total <= QUOTA + QUOTA / 60 * (at - begin)
        for request in requests:
            await request.stack.aclose()

    asyncio.run(scenario())


def allowance_at(now: list[float]) -> Allowance:
    return Allowance(QUOTA, lambda: now[0])


def test_the_refusals_say_what_is_needed_and_when_to_come_again() -> None:
    now = [0.0]
    allowance = allowance_at(now)
    first = allowance.charge(TokenNeed(20, 100))
    with pytest.raises(QuotaError, match=r"at least 50 tokens, .* minute 20 are left, and 100 are reserved") as no:
        allowance.charge(TokenNeed(10, 50))
    assert no.value.retry_after == 1.0, "soon, since the first may give back enough"
    first.use(100)
    first.end()
    with pytest.raises(QuotaError, match=r"20 are left$") as no:
        allowance.charge(TokenNeed(10, 50))
    assert no.value.retry_after == pytest.approx(15.0)
    now[0] += 15.0
    assert allowance.charge(TokenNeed(10, 50)).held == 50


def test_one_that_leaves_its_length_open_needs_its_prompt_alone() -> None:
    """With a context longer than the quota, open-ended requests are served in turn."""
    now = [0.0]
    allowance = allowance_at(now)
    for _ in range(5):
        charge = allowance.charge(TokenNeed(10, 4096, open_ended=True))
        charge.use(20)
        now[0] += 10.0
        with pytest.raises(QuotaError, match="another open request may already use all"):
            allowance.charge(TokenNeed(5, 4096, open_ended=True))
        charge.end()
    charge = allowance.charge(TokenNeed(10, 4096, open_ended=True))
    charge.use(4096)
    charge.end()
    assert allowance.left < -3900.0


def test_one_that_may_use_more_than_a_minute_gives_waits_for_a_whole_minutes() -> None:
    now = [0.0]
    allowance = allowance_at(now)
    charge = allowance.charge(TokenNeed(10, 500))
    charge.use(30)
    charge.end()
    with pytest.raises(QuotaError) as refused:
        allowance.charge(TokenNeed(10, 500))
    assert refused.value.retry_after == pytest.approx(15.0)
    now[0] += 15.0
    assert allowance.charge(TokenNeed(10, 500)).held == QUOTA


def test_principals_who_have_all_of_theirs_are_forgotten_and_no_others() -> None:
    now = [0.0]
    quota = TokenQuota(QUOTA, lambda: now[0])
    spent = quota.charge("spent", TokenNeed(1, 100))
    spent.use(100)
    spent.end()
    kept = quota.charge("open", TokenNeed(1, 1000, open_ended=True))
    kept.use(QUOTA)
    for number in range(10 * LEAST_KEPT):
        quota.charge(f"p{number}", TokenNeed(1, 1)).end()
        assert len(quota._allowances) <= LEAST_KEPT
    with pytest.raises(QuotaError):
        quota.charge("spent", TokenNeed(1, 100))
    now[0] += 60.0
    for number in range(10 * LEAST_KEPT):
        quota.charge(f"p{number}", TokenNeed(1, 1)).end()
    kept.use(50)  # beyond its held tokens, from the tokens refilled since
    assert quota._allowances.keys() >= {"open"}
    assert quota._allowances["open"].left == QUOTA - 50
