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
from dynatree.common.pass_statistics import PassStatistics
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
    return complete_together(pair, [prompt], new_tokens, method, sampling, begun).completions[0]


def complete_together(
    pair: Pair,
    prompts: Sequence[Prompt],
    new_tokens: int,
    method: Method,
    sampling: Sampling = GREEDY,
    begun: Callable[[], object] = lambda: None,
) -> Together:
    """All at once, with one thread for each model; see `complete`."""

    async def run() -> Together:
        threads = ModelThread("verify-model"), ModelThread("draft-model")
        rows: list[int] = []

        def passed(pass_statistics: PassStatistics, seconds: float) -> None:
            rows.append(pass_statistics.rows)

        costs = PassCosts(pair.target.info.forward_costs)
        scheduler = Scheduler(partial(threads[0].run, pair.verifier.run), costs, TARGET_MEASURED_ROWS, passed)
        decoder = _Decoder(pair, threads, scheduler, SharedGrowth(pair.drafter, threads[1]), begun)
        began = time.perf_counter()
        try:
            each = (decoder.complete(prompt, new_tokens, method, sampling) for prompt in prompts)
            return Together(tuple(await asyncio.gather(*each)), time.perf_counter() - began, rows)
        finally:
            for thread in threads:
                thread.shutdown()

    return asyncio.run(run())


@dataclass(frozen=True)
class _Decoder:
    pair: Pair
    threads: tuple[ModelThread, ModelThread]
    scheduler: Scheduler
    growth: SharedGrowth
    begun: Callable[[], object]

    async def complete(self, prompt: Prompt, new_tokens: int, method: Method, sampling: Sampling) -> Completion:
        pair, drafter = self.pair, self.pair.drafter
        limit = len(prompt) + new_tokens
        policy = create_policy(method.policy, method.settings, pair.target.costs)
        request = SessionRequest(prompt, limit, frozenset(), Decoding(sampling))
        recorder = StatisticsRecorder(time.perf_counter())
        opening = partial(drafter.open, prompt, sampling, pair.target.vocab_size, limit)
        async with (
            self.threads[1].held(opening, drafter.close) as drafting,
            self.threads[0].held(partial(pair.verifier.open, request), pair.verifier.close) as verifying,
        ):

            def grow(tokens: tuple[int, ...], last: Round | None) -> Growing[Growth]:
                started = time.perf_counter()
                drafter.commit(drafting, tokens)
                if last is not None:
                    policy.observe(last)
                commit_seconds = time.perf_counter() - started
                growth = yield from drafter.growing(drafting, policy, verifying.remaining - 1, MAX_TREE_NODES)
                return replace(growth, commit_seconds=commit_seconds)

            commit = await self.scheduler.prefill(verifying)
            recorder.count(len(commit.token_ids))
            await self.growth.run(partial(drafter.prefilling, drafting, policy))
            self.begun()
            last: Round | None = None
            while commit.finish_reason is None:
                growth = await self.growth.run(partial(grow, commit.token_ids, last))
                sent = time.perf_counter()
                commit = await self.scheduler.verify(verifying, growth.tree)
                exchange = time.perf_counter() - sent
                commit = replace(commit, timings=replace(commit.timings, total=exchange))
                last = Round(growth, commit, exchange)
                recorder.round(last, len(commit.token_ids))
                recorder.count(len(commit.token_ids))
            self.scheduler.forget(verifying)
            policy.end()
            return Completion(tuple(verifying.committed[len(prompt) :]), recorder.result(sampling.seed))
