"""Decoding in this process as the two services do it: grow, verify, commit; of one session, or of many together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pair import TARGET_MEASURED_ROWS, Pair, Prompt

from dynatree.common.decoding import Decoding
from dynatree.common.limits import MAX_TREE_NODES
from dynatree.common.messages import Commit, VerifyTimings
from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.sampling import Sampling
from dynatree.draft.growth.drafter import Growing
from dynatree.draft.growth.round import Growth, Round
from dynatree.draft.growth.shared_growth import SharedGrowth
from dynatree.draft.policies import create_policy
from dynatree.engine.model_thread import ModelThread
from dynatree.verify.accept import Verdict
from dynatree.verify.pass_costs import PassCosts
from dynatree.verify.scheduler import Scheduler
from dynatree.verify.session import SessionRequest, VerifySession
from dynatree.verify.verifier import Part, verdicts_of

PROMPT_ROWS = 512  # of a pass, as the verify service reads prompts
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.7, seed=20_001)


@dataclass(frozen=True)
class Method:
    """A policy and its settings."""

    policy: str
    settings: Mapping[str, float] = field(default_factory=dict)


PLAIN = Method("autoregressive")
DEFAULT = Method("throughput")


@dataclass(frozen=True)
class Completion:
    """New tokens, and what they took.

    Attributes:
        token_ids: The new tokens.
        seconds: From opening the session to the last token, as a client sees it.
        first_seconds: To the first token.
        rounds: Of each round: nodes, seconds of the draft, seconds of the target.
    """

    token_ids: tuple[int, ...]
    seconds: float
    first_seconds: float
    rounds: tuple[tuple[int, float, float], ...] = ()

    @property
    def rate(self) -> float:
        """Tokens a second, the prompt's forward included."""
        return len(self.token_ids) / self.seconds

    @property
    def later_rate(self) -> float:
        """Tokens a second behind the first."""
        return (len(self.token_ids) - 1) / (self.seconds - self.first_seconds)

    @property
    def round_seconds(self) -> float:
        """The mean time of a round."""
        return sum(draft + target for _, draft, target in self.rounds) / max(len(self.rounds), 1)

    @property
    def tokens_per_round(self) -> float:
        """Tokens behind the first, over rounds."""
        return (len(self.token_ids) - 1) / max(len(self.rounds), 1)

    @property
    def nodes_per_round(self) -> float:
        """The mean size of a tree."""
        return sum(nodes for nodes, _, _ in self.rounds) / max(len(self.rounds), 1)


Watch = Callable[[str], None]  # told "prompt" when both read it, and "draft" or "target" when a round's work begins


def complete(
    pair: Pair,
    prompt: Prompt,
    new_tokens: int,
    method: Method,
    sampling: Sampling = GREEDY,
    watch: Watch = lambda model: None,
) -> Completion:
    """One session by itself; end-of-sequence tokens are ignored."""
    limit = len(prompt) + new_tokens
    policy = create_policy(method.policy, method.settings, pair.target.costs)
    began = time.perf_counter()
    drafting = pair.drafter.open(prompt, sampling, pair.target.vocab_size, limit)
    verifying = pair.verifier.open(SessionRequest(prompt, limit, frozenset(), Decoding(sampling)))
    try:
        watch("prompt")
        verdict = read(pair, verifying)
        first = time.perf_counter() - began
        pair.drafter.prefill(drafting, policy)
        last: Round | None = None
        rounds = []
        while True:
            watch("draft")
            started = time.perf_counter()
            pair.drafter.commit(drafting, verdict.token_ids)
            if last is not None:
                policy.observe(last)
            commit_seconds = time.perf_counter() - started
            if verdict.finish_reason is not None:
                policy.end()
                break
            growth = pair.drafter.grow(drafting, policy, verifying.remaining - 1, MAX_TREE_NODES)
            growth = replace(growth, commit_seconds=commit_seconds)
            watch("target")
            sent = time.perf_counter()
            results, timings = pair.verifier.run([Part(verifying, growth.tree)])
            answered = time.perf_counter()
            [answer] = verdicts_of(results)
            assert answer is not None, "a tree is always decided"
            verdict = answer
            last = _round(growth, verifying, verdict, timings, answered - sent)
            rounds.append((len(growth.tree), sent - started, answered - sent))
        seconds = time.perf_counter() - began
    finally:
        pair.drafter.close(drafting)
        pair.verifier.close(verifying)
    return Completion(tuple(verifying.committed[len(prompt) :]), seconds, first, tuple(rounds))


def read(pair: Pair, session: VerifySession) -> Verdict:
    """Read a session's prompt; what its last token's forward commits."""
    while True:
        [verdict] = verdicts_of(pair.verifier.run([Part(session, prompt_tokens=min(session.unread, PROMPT_ROWS))])[0])
        if verdict is not None:
            return verdict


def _round(
    growth: Growth,
    session: VerifySession,
    verdict: Verdict,
    timings: VerifyTimings,
    exchange: float,
) -> Round:
    """What the policy learns of a round alone, which took `exchange` seconds."""
    commit = Commit(
        next_round=session.round,
        base_length=session.length,
        token_ids=verdict.token_ids,
        accepted_nodes=verdict.accepted,
        timings=replace(timings, total=exchange),
        finish_reason=verdict.finish_reason,
        pass_statistics=PassStatistics(rows=1 + len(growth.tree)),
    )
    return Round(growth, commit, exchange)


@dataclass(frozen=True)
class Together:
    """Sessions that ran together.

    Attributes:
        token_ids: Of each the new tokens.
        seconds: Until the last had ended.
        passes: Forwards of the target with a tree in them.
        rows: Of those passes.
    """

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    passes: int
    rows: int

    @property
    def rate(self) -> float:
        """Tokens a second of all sessions."""
        return sum(map(len, self.token_ids)) / self.seconds


def complete_together(pair: Pair, prompts: Sequence[Prompt], new_tokens: int, method: Method) -> Together:
    """All sessions at once, greedily: the services' own scheduler and shared growth, a thread for each model."""
    return asyncio.run(_Together(pair).run(prompts, new_tokens, method))


class _Together:
    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._threads = ModelThread("verify-model"), ModelThread("draft-model")
        self._growth = SharedGrowth(pair.drafter, self._threads[1])
        self._passes = 0
        self._rows = 0
        self._scheduler = Scheduler(
            partial(self._threads[0].run, pair.verifier.run),
            PassCosts(pair.target.info.forward_costs),
            TARGET_MEASURED_ROWS,
            on_pass=self._passed,
        )

    async def run(self, prompts: Sequence[Prompt], new_tokens: int, method: Method) -> Together:
        began = time.perf_counter()
        try:
            outputs = await asyncio.gather(*(self._complete(prompt, new_tokens, method) for prompt in prompts))
            seconds = time.perf_counter() - began
        finally:
            for thread in self._threads:
                thread.shutdown()
        return Together(tuple(outputs), seconds, self._passes, self._rows)

    def _passed(self, pass_statistics: PassStatistics, seconds: float) -> None:
        self._passes += 1
        self._rows += pass_statistics.rows

    async def _complete(self, prompt: Prompt, new_tokens: int, method: Method) -> tuple[int, ...]:
        pair, (verify_thread, draft_thread) = self._pair, self._threads
        limit = len(prompt) + new_tokens
        policy = create_policy(method.policy, method.settings, pair.target.costs)
        opening = partial(pair.drafter.open, prompt, GREEDY, pair.target.vocab_size, limit)
        request = SessionRequest(prompt, limit, frozenset(), Decoding(GREEDY))
        async with (
            draft_thread.held(opening, pair.drafter.close) as drafting,
            verify_thread.held(partial(pair.verifier.open, request), pair.verifier.close) as verifying,
        ):
            commit = await self._scheduler.prefill(verifying)
            await self._growth.run(lambda: pair.drafter.prefilling(drafting, policy))
            last: Round | None = None

            def grow(tokens: tuple[int, ...], last: Round | None) -> Growing[Growth]:
                started = time.perf_counter()
                pair.drafter.commit(drafting, tokens)
                if last is not None:
                    policy.observe(last)
                commit_seconds = time.perf_counter() - started
                growth = yield from pair.drafter.growing(drafting, policy, verifying.remaining - 1, MAX_TREE_NODES)
                return replace(growth, commit_seconds=commit_seconds)

            while commit.finish_reason is None:
                growth = await self._growth.run(partial(grow, commit.token_ids, last))
                sent = time.perf_counter()
                commit = await self._scheduler.verify(verifying, growth.tree)
                exchange = time.perf_counter() - sent
                commit = replace(commit, timings=replace(commit.timings, total=exchange))
                last = Round(growth, commit, exchange)
            self._scheduler.forget(verifying)
            policy.end()
        return tuple(verifying.committed[len(prompt) :])
