"""Decoding in this process by the services' scheduler, drafter and statistics; only their sockets are missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pair import TARGET_MEASURED_ROWS, Pair, Prompt

from dynatree.common.decoding import Decoding
from dynatree.common.limits import MAX_TREE_NODES
from dynatree.common.sampling import Sampling
from dynatree.draft.completion.statistics import Statistics, StatisticsRecorder
from dynatree.draft.growth.drafter import Growing
from dynatree.draft.growth.round import Growth, Round
from dynatree.draft.growth.shared_growth import SharedGrowth
from dynatree.draft.policies import create_policy
from dynatree.engine.model_thread import ModelThread
from dynatree.verify.pass_costs import PassCosts
from dynatree.verify.scheduler import Scheduler
from dynatree.verify.session import SessionRequest

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
    """New tokens, and the statistics that a client would get."""

    token_ids: tuple[int, ...]
    statistics: Statistics

    @property
    def rate(self) -> float:
        """Tokens a second, the reading of the prompt included."""
        return len(self.token_ids) / self.statistics.total_seconds


@dataclass(frozen=True)
class Together:
    """Completions that ran together, the seconds until the last ended, and the rows of each of the target's passes."""

    completions: tuple[Completion, ...]
    seconds: float
    rows: Sequence[int]

    @property
    def rate(self) -> float:
        """Tokens a second of all completions."""
        return sum(len(each.token_ids) for each in self.completions) / self.seconds


def complete(
    pair: Pair,
    prompt: Prompt,
    new_tokens: int,
    method: Method,
    sampling: Sampling = GREEDY,
    begun: Callable[[], object] = lambda: None,
) -> Completion:
    """One completion by itself; end-of-sequence tokens are ignored, and `begun` is called when the prompt was read."""
    done = asyncio.run(complete_together(pair, [prompt], new_tokens, method, sampling, begun))
    return done.completions[0]


async def complete_together(
    pair: Pair,
    prompts: Sequence[Prompt],
    new_tokens: int,
    method: Method,
    sampling: Sampling = GREEDY,
    begun: Callable[[], object] = lambda: None,
) -> Together:
    """All at once, with one thread for each model; see `complete`."""
    rows: list[int] = []
    verifier, drafter, target = pair.verifier, pair.drafter, pair.target
    verifying, drafting = ModelThread("verify-model"), ModelThread("draft-model")
    costs = PassCosts(target.info.forward_costs)
    scheduler = Scheduler(
        partial(verifying.run, verifier.run), costs, TARGET_MEASURED_ROWS, lambda told, _: rows.append(told.rows)
    )
    growth_of_all = SharedGrowth(drafter, drafting)

    async def completion(prompt: Prompt) -> Completion:
        limit = len(prompt) + new_tokens
        policy = create_policy(method.policy, method.settings, target.costs)
        request = SessionRequest(prompt, limit, frozenset(), Decoding(sampling))
        recorder = StatisticsRecorder(time.perf_counter())
        opening = partial(drafter.open, prompt, sampling, target.vocab_size, limit)
        async with (
            drafting.held(opening, drafter.close) as draft,
            verifying.held(partial(verifier.open, request), verifier.close) as session,
        ):

            def grow(tokens: tuple[int, ...], last: Round | None) -> Growing[Growth]:
                started = time.perf_counter()
                drafter.commit(draft, tokens)
                if last is not None:
                    policy.observe(last)
                commit_seconds = time.perf_counter() - started
                growth = yield from drafter.growing(draft, policy, session.remaining - 1, MAX_TREE_NODES)
                return replace(growth, commit_seconds=commit_seconds)

            commit = await scheduler.prefill(session)
            recorder.count(len(commit.token_ids))
            await growth_of_all.run(partial(drafter.prefilling, draft, policy))
            begun()
            last: Round | None = None
            while commit.finish_reason is None:
                growth = await growth_of_all.run(partial(grow, commit.token_ids, last))
                sent = time.perf_counter()
                commit = await scheduler.verify(session, growth.tree)
                exchange = time.perf_counter() - sent
                commit = replace(commit, timings=replace(commit.timings, total=exchange))
                last = Round(growth, commit, exchange)
                recorder.round(last, len(commit.token_ids))
                recorder.count(len(commit.token_ids))
            scheduler.forget(session)
            policy.end()
            return Completion(tuple(session.committed[len(prompt) :]), recorder.result(sampling.seed))

    began = time.perf_counter()
    try:
        completions = await asyncio.gather(*map(completion, prompts))
        return Together(tuple(completions), time.perf_counter() - began, rows)
    finally:
        for thread in (verifying, drafting):
            thread.shutdown()
