"""The scheduler: take what waits, run one pass over it, resolve what waited for it.

A session waits with its tree, or with the unread rest of its prompt. A pass takes every waiting tree's root, the nodes
that are worth their rows (`pass_plan`), and pieces of prompts as far as they do not hold the others up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean

from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.tree import TokenTree
from dynatree.verify.accept import Verdict
from dynatree.verify.hold import Pace, Ready, worth_waiting
from dynatree.verify.pass_costs import PassCosts
from dynatree.verify.pass_plan import admit, is_whole, subtree
from dynatree.verify.prompt_budget import PromptBudget
from dynatree.verify.session import Session
from dynatree.verify.track_record import TrackRecord
from dynatree.verify.verifier import Part, Result, Timings

RATE_FADE = 0.9  # weight of the past at each pass in the rate of the service
PROMPT_ROWS = 512  # of prompts in a pass at most: what others may have to wait for
PROMPT_TURN = 256  # tokens of a prompt after which it is the next one's turn
RECENT_STEPS = 8  # plain steps after an answer in which a session still streams
HOLD_SHARE = 0.5  # longest wait for trees about to come, in plain steps


# Runs a pass elsewhere than on the event loop: `Verifier.run` on the model thread.
PassRunner = Callable[[Sequence[Part]], Awaitable[tuple[Sequence[Result], Timings]]]


@dataclass(frozen=True)
class Done:
    """What a session gets of a pass."""

    verdict: Verdict
    timings: Timings
    attributed_seconds: float
    trimmed: int
    shared: PassStatistics


@dataclass(eq=False)
class _Job:
    """A session that waits: for its tree, or for the rest of its prompt."""

    session: Session
    tree: TokenTree | None
    future: asyncio.Future[Done]
    kept: Sequence[int] = ()  # the tree's nodes that are in the pass
    turn: int = 0  # tokens of the prompt that were read since its turn came

    @property
    def rows(self) -> int:
        return 1 if self.tree is None else 1 + len(self.tree)

    @property
    def trimmed(self) -> int:
        return 0 if self.tree is None else len(self.tree) - len(self.kept)

    def fail(self, error: Exception) -> None:
        """Tell whoever still waits."""
        if not self.future.done():
            self.future.set_exception(error)

    def settle(self, verdict: Verdict, timings: Timings, share: float, shared: PassStatistics) -> None:
        """Hand on what the session gets, its nodes named as in the tree that came."""
        if not self.future.done():
            accepted = tuple(self.kept[node] for node in verdict.accepted)
            self.future.set_result(Done(replace(verdict, accepted=accepted), timings, share, self.trimmed, shared))


@dataclass
class ServiceRate:
    """Lambda: the tokens that a second is worth to all sessions together."""

    tokens: float = 0.0
    seconds: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in what one pass committed, and its seconds, the gap before it included."""
        self.tokens = RATE_FADE * self.tokens + tokens
        self.seconds = RATE_FADE * self.seconds + seconds

    def value(self, sessions: int, costs: PassCosts) -> float:
        """At least what plain decoding of the pass's sessions would bring."""
        plain = sessions / costs.seconds(sessions, sessions)
        return max(plain, self.tokens / self.seconds) if self.seconds else plain


@dataclass
class Scheduler:
    """Gathers what sessions wait for into passes; runs on the event loop, one pass at a time.

    Attributes:
        run_pass: Runs a pass.
        costs: c(rows, sessions).
        max_rows: Of a pass, but for a prompt that nobody streams beside.
        on_pass: Told of each pass that has ended, and of the seconds of its forward.
    """

    run_pass: PassRunner
    costs: PassCosts
    max_rows: int
    on_pass: Callable[[PassStatistics, float], None] = lambda shared, seconds: None
    rate: ServiceRate = field(default_factory=ServiceRate)
    _budget: PromptBudget = field(init=False)
    _trees: list[_Job] = field(default_factory=list)  # in the order in which they came
    _prompts: list[_Job] = field(default_factory=list)  # the next to be read first
    _paces: dict[Session, Pace] = field(default_factory=dict)
    _records: dict[Session, TrackRecord] = field(default_factory=dict)
    _loop: asyncio.Task[None] | None = None
    _came: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: float = 0.0  # when the last pass ended

    def __post_init__(self) -> None:
        self._budget = PromptBudget(self.costs, self.max_rows)

    async def read(self, session: Session) -> Done:
        """Read the rest of a session's prompt, and commit its first token."""
        self._paces[session] = Pace()
        self._records[session] = TrackRecord()
        return await self._wait(self._prompts, _Job(session, None, _future()))

    async def verify(self, session: Session, tree: TokenTree) -> Done:
        """Verify a session's tree, or of it what is worth its rows."""
        self._paces[session].came(_now())
        return await self._wait(self._trees, _Job(session, tree, _future()))

    def forget(self, session: Session) -> None:
        """A session has ended, or is about to; nobody waits for it."""
        self._paces.pop(session, None)
        self._records.pop(session, None)

    async def _wait(self, queue: list[_Job], job: _Job) -> Done:
        queue.append(job)
        self._came.set()
        if self._loop is None:
            self._loop = asyncio.ensure_future(self._run())
        return await job.future

    async def _run(self) -> None:
        jobs: list[_Job] = []
        try:
            while self._drop_cancelled():
                held = await self._hold()
                if self._drop_cancelled():
                    jobs, parts, price = self._take()
                    await self._pass(jobs, parts, price, held)
        except BaseException as error:
            for job in (*jobs, *self._trees, *self._prompts):
                if isinstance(error, Exception):  # nobody must wait for a loop that has ended
                    job.fail(error)
                else:
                    job.future.cancel()
            raise
        finally:
            self._loop = None

    def _drop_cancelled(self) -> bool:
        """Forget those that nobody waits for any more; whether others wait."""
        for queue in (self._trees, self._prompts):
            queue[:] = [job for job in queue if not job.future.done()]
        return bool(self._trees or self._prompts)

    # Hold

    async def _hold(self) -> float:
        """Wait for trees about to come, where all sessions together gain by it; the seconds waited."""
        began = _now()
        latest = began + HOLD_SHARE * self.costs.seconds(1)
        while (delay := self._worth_waiting(_now(), latest)) is not None:
            self._came.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), delay)
        return _now() - began

    def _worth_waiting(self, now: float, latest: float) -> float | None:
        """For how many seconds to wait for those who are expected till then; None if running now is better."""
        coming = [(delay, pace.rows) for pace in self._paces.values() if (delay := pace.expected(now)) is not None]
        if not coming:
            return None
        rows = min(sum(job.rows for job in self._trees), self.max_rows)
        sessions = len(self._trees)
        pieces = self._pieces(rows, self._longest(rows, sessions), sessions)
        gaps = [pace.gap for job in self._trees if (pace := self._paces.get(job.session)) and pace.gap is not None]
        ready = Ready(
            sessions=sessions + len(pieces),
            rows=rows + sum(tokens for _, tokens in pieces),
            gap=fmean(gaps) if gaps else 0.0,
        )
        delay = worth_waiting(ready, coming, self.costs, latest - now)
        return None if delay is None else min(delay + 0.001, latest - now)  # a little late is still in time

    # Take

    def _take(self) -> tuple[list[_Job], list[Part], float]:
        """The jobs of the next pass, what each puts into it, and the price of a row."""
        jobs = self._next_jobs()
        trees = [job.tree or TokenTree() for job in jobs]
        alone = len(self._paces) == 1
        if alone or not jobs:
            kept, price = [tuple(range(len(tree))) for tree in trees], 0.0
            longest = self._longest(sum(map(len, kept)) + len(jobs), len(jobs))
        else:
            rate = self.rate.value(len(jobs), self.costs)
            worths = [record.worth if (record := self._records.get(job.session)) else 1.0 for job in jobs]
            admitted = admit(trees, worths, rate, self.costs, self.max_rows)
            longest = self._longest(sum(map(len, admitted.nodes)) + len(jobs), len(jobs))
            if self._prompts:
                admitted = admit(trees, worths, rate, self.costs, self._budget.tree_rows(longest, len(jobs)))
            kept, price = list(admitted.nodes), admitted.price
        parts = []
        for job, tree, nodes in zip(jobs, trees, kept, strict=True):
            job.kept = nodes
            parts.append(Part(job.session, subtree(tree, nodes)))
        pieces = self._pieces(sum(part.rows for part in parts), longest, len(parts))
        del self._prompts[: len(pieces)]
        for job, tokens in pieces:
            job.turn += tokens
            jobs.append(job)
            parts.append(Part(job.session, prompt_tokens=tokens))
        return jobs, parts, price

    def _next_jobs(self) -> list[_Job]:
        """Take the trees that waited longest, as many as have room with their roots, or with all of a whole tree."""
        rows, count = 0, 0
        for job in self._trees:
            rows += job.rows if job.tree is not None and is_whole(job.tree) else 1
            if count and rows > self.max_rows:
                break
            count += 1
        jobs, self._trees = self._trees[:count], self._trees[count:]
        return jobs

    def _pieces(self, rows: int, longest: float, sessions: int) -> list[tuple[_Job, int]]:
        """The prompts whose turn it is, and how many tokens of each a pass reads beside the trees of some sessions.

        Several are read where all rows fit into the largest pass.

        Args:
            rows: Of the trees.
            longest: Seconds that the pass may take.
            sessions: Whose trees they are.
        """
        room = self._prompt_rows(rows, longest, sessions)
        turn = PROMPT_TURN if len(self._prompts) > 1 else PROMPT_ROWS
        pieces = []
        for job in self._prompts:
            tokens = min(job.session.unread, max(turn - job.turn, 0), room)
            if tokens <= 0:
                break
            rows += tokens
            room = min(room - tokens, self.max_rows - rows)
            pieces.append((job, tokens))
        return pieces

    def _prompt_rows(self, rows: int, longest: float, sessions: int) -> int:
        if not self._prompts:
            return 0
        if not rows and not self._streaming():
            return PROMPT_ROWS
        return self._budget.prompt_rows(longest, rows, sessions)

    def _longest(self, rows: int, sessions: int) -> float:
        """Seconds that a pass may take that reads prompts; without them it would have so many rows and sessions."""
        waiting = len(self._prompts)
        return self._budget.longest(rows, sessions, waiting, streaming=len(self._paces) - waiting)

    def _streaming(self) -> bool:
        """Whether a session was answered lately, so that its next tree should not find the model busy for long."""
        since = _now() - RECENT_STEPS * self.costs.seconds(1)
        return any(pace.answered is not None and pace.answered > since for pace in self._paces.values())

    # Run and resolve

    async def _pass(self, jobs: list[_Job], parts: list[Part], price: float, held: float) -> None:
        """Run one pass, and hand each session what is its own of it."""
        began = _now()
        for each in self._paces.values():
            each.missed(began)
        try:
            results, timings = await self.run_pass(parts)
        except Exception as error:
            await self._failed(jobs, parts, error)
            return
        now = _now()
        rows = sum(part.rows for part in parts)
        shared = PassStatistics(len(parts), rows, price, held, open_sessions=max(len(self._paces), 1))
        self.on_pass(shared, timings.forward)
        shares = self._shares(parts, rows)
        unread: list[_Job] = []
        for job, part, result, share in zip(jobs, parts, results, shares, strict=True):
            if result is None:
                unread.append(job)
            elif isinstance(result, Exception):
                job.fail(result)
            else:
                pace = self._paces.get(job.session)
                if pace is not None:
                    pace.answer(now, 1 if part.prompt_tokens else part.rows)
                    if job.tree is not None and not is_whole(job.tree):
                        self._records[job.session].observe(part.tree, len(result.accepted))
                    if result.finish_reason is not None:
                        self.forget(job.session)
                job.settle(result, timings, timings.forward * share, shared)
        self._put_back(unread)
        self._observe(parts, results, rows, timings, began, now)
        self._ended = now

    def _shares(self, parts: Sequence[Part], rows: int) -> list[float]:
        """Each session's part of the pass's cost, of 1: in proportion to what the pass would cost less without it."""
        whole = self.costs.seconds(rows, len(parts))
        marginal = [whole - self.costs.seconds(rows - part.rows, len(parts) - 1) for part in parts]
        total = sum(marginal)
        if total <= 0:  # rows are free here
            return [1 / len(parts)] * len(parts)
        return [each / total for each in marginal]

    def _put_back(self, unread: Iterable[_Job]) -> None:
        """Prompts that were not read to their ends go on, but behind the others once their turn is over."""
        going_on = []
        for job in unread:
            if job.turn < PROMPT_TURN:
                going_on.append(job)
            else:
                job.turn = 0
                self._prompts.append(job)
        self._prompts[:0] = going_on

    def _observe(
        self,
        parts: Sequence[Part],
        results: Sequence[Result],
        rows: int,
        timings: Timings,
        began: float,
        now: float,
    ) -> None:
        plain = self.costs.seconds(1)
        if any(part.prompt_tokens for part in parts):  # its rows are no trees, and its tokens no rounds
            self._budget.observe_prompts(rows, len(parts), timings.forward)
            return
        self.costs.observe(rows, len(parts), timings.forward)
        cycle = now - max(self._ended, began - plain)  # after a pause the service was idle, not slow
        self.rate.observe(sum(len(each.token_ids) for each in results if isinstance(each, Verdict)), cycle)
        self._budget.observe(cycle)

    async def _failed(self, jobs: list[_Job], parts: list[Part], error: Exception) -> None:
        """The forward of several sessions has failed: run each by itself, so that only the one at fault fails."""
        if len(jobs) == 1:
            jobs[0].fail(error)
            return
        for job, part in zip(jobs, parts, strict=True):
            if not job.future.done():
                await self._pass([job], [part], 0.0, 0.0)


def _future() -> asyncio.Future[Done]:
    return asyncio.get_running_loop().create_future()


def _now() -> float:
    return asyncio.get_running_loop().time()
