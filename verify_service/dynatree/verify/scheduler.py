"""The scheduler: gather waiting trees and prompts, run one pass over them, and resolve the sessions' futures.

A session waits with a tree or with the unread rest of its prompt. A pass contains the root of every waiting tree, the
nodes that are worth their rows (`pass_plan`), and prompt pieces small enough not to delay the trees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean

from dynatree.common.messages import Commit, VerifyTimings
from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.tree import TokenTree
from dynatree.verify.accept import Verdict
from dynatree.verify.acceptance_record import AcceptanceRecord
from dynatree.verify.hold import Pace, Ready, worth_waiting
from dynatree.verify.pass_costs import PassCosts
from dynatree.verify.pass_plan import admit, is_whole
from dynatree.verify.prompt_budget import PromptBudget
from dynatree.verify.session import VerifySession
from dynatree.verify.verifier import NO_TREE, Part, Result

RATE_FADE = 0.9  # factor applied to past passes in the service rate, once per pass
PROMPT_ROWS = 512  # prompt rows in a pass while no session decodes, and most rows of one prompt in any pass
PROMPT_TURN = 256  # prompt tokens after which the next prompt gets its turn
RECENT_STEPS = 8  # time after an answer, in plain steps, during which a session counts as decoding
HOLD_SHARE = 0.5  # longest wait for trees about to arrive, in plain steps


# Runs a pass off the event loop: `Verifier.run` on the model thread.
PassRunner = Callable[[Sequence[Part]], Awaitable[tuple[Sequence[Result], VerifyTimings]]]


@dataclass(eq=False)
class _Job:
    """A waiting session: its tree is to be verified, or the rest of its prompt is to be read."""

    session: VerifySession
    tree: TokenTree | None
    future: asyncio.Future[Commit]
    turn: int = 0  # prompt tokens read since the prompt's turn began

    @property
    def rows(self) -> int:
        return 1 if self.tree is None else 1 + len(self.tree)

    def fail(self, error: Exception) -> None:
        """Set `error` on the future, unless it is already done."""
        if not self.future.done():
            self.future.set_exception(error)

    def settle(self, commit: Commit) -> None:
        """Set the commit on the future, unless it is already done."""
        if not self.future.done():
            self.future.set_result(commit)


@dataclass
class ServiceRate:
    """Lambda: the value of one second, in tokens of all sessions together."""

    tokens: float = 0.0
    seconds: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Record the tokens that one pass committed, and its seconds including the gap before it."""
        self.tokens = RATE_FADE * self.tokens + tokens
        self.seconds = RATE_FADE * self.seconds + seconds

    def value(self, sessions: int, costs: PassCosts) -> float:
        """Tokens per second; at least the rate of plain decoding for the sessions of the pass."""
        plain = sessions / costs.seconds(sessions, sessions)
        return max(plain, self.tokens / self.seconds) if self.seconds else plain


@dataclass
class Scheduler:
    """Gathers the trees and prompts of sessions into passes; runs on the event loop, one pass at a time.

    It does not know when requests arrived, so `timings.total` of its commits is 0.

    Attributes:
        run_pass: Function that runs a pass.
        costs: Cost model c(rows, sessions).
        max_rows: Most rows of a pass; a prompt may exceed it while no session decodes.
        on_pass: Callback after each pass, with its statistics and the seconds of its forward pass.
    """

    run_pass: PassRunner
    costs: PassCosts
    max_rows: int
    on_pass: Callable[[PassStatistics, float], None] = lambda pass_statistics, seconds: None
    rate: ServiceRate = field(default_factory=ServiceRate)
    _budget: PromptBudget = field(init=False)
    _trees: list[_Job] = field(default_factory=list)  # in order of arrival
    _prompts: list[_Job] = field(default_factory=list)  # in order of their turns
    _paces: dict[VerifySession, Pace] = field(default_factory=dict)
    _records: dict[VerifySession, AcceptanceRecord] = field(default_factory=dict)
    _loop: asyncio.Task[None] | None = None
    _came: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: float = 0.0  # when the last pass ended

    def __post_init__(self) -> None:
        self._budget = PromptBudget(self.costs, self.max_rows)

    async def prefill(self, session: VerifySession) -> Commit:
        """Prefill the rest of a session's prompt, and commit its first token."""
        self._paces[session] = Pace()
        self._records[session] = AcceptanceRecord()
        return await self._wait(self._prompts, _Job(session, None, _future()))

    async def verify(self, session: VerifySession, tree: TokenTree) -> Commit:
        """Verify a session's tree, or those of its nodes that are worth their rows."""
        self._paces[session].came(_now())
        return await self._wait(self._trees, _Job(session, tree, _future()))

    def forget(self, session: VerifySession) -> None:
        """Drop the state of a session that has ended or is about to end."""
        self._paces.pop(session, None)
        self._records.pop(session, None)

    async def _wait(self, queue: list[_Job], job: _Job) -> Commit:
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
                if isinstance(error, Exception):  # no session may wait for a loop that has ended
                    job.fail(error)
                else:
                    job.future.cancel()
            raise
        finally:
            self._loop = None

    def _drop_cancelled(self) -> bool:
        """Drop the jobs whose futures are done; whether any jobs remain."""
        for queue in (self._trees, self._prompts):
            queue[:] = [job for job in queue if not job.future.done()]
        return bool(self._trees or self._prompts)

    # Hold

    async def _hold(self) -> float:
        """Wait for trees about to arrive, if this helps all sessions together; the seconds waited."""
        began = _now()
        latest = began + HOLD_SHARE * self.costs.seconds(1)
        while (delay := self._worth_waiting(_now(), latest)) is not None:
            self._came.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), delay)
        return _now() - began

    def _worth_waiting(self, now: float, latest: float) -> float | None:
        """Seconds to wait for trees expected within that time; None if running the pass now is better."""
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
        return None if delay is None else min(delay + 0.001, latest - now)  # 1 ms of tolerance

    # Take

    def _take(self) -> tuple[list[_Job], list[Part], float]:
        """The jobs of the next pass, the part of each in it, and the price of a row."""
        jobs = self._next_jobs()
        trees = [job.tree or NO_TREE for job in jobs]
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
        parts = [Part(job.session, tree, nodes) for job, tree, nodes in zip(jobs, trees, kept, strict=True)]
        pieces = self._pieces(sum(part.rows for part in parts), longest, len(parts))
        del self._prompts[: len(pieces)]
        for job, tokens in pieces:
            job.turn += tokens
            jobs.append(job)
            parts.append(Part(job.session, prompt_tokens=tokens))
        return jobs, parts, price

    def _next_jobs(self) -> list[_Job]:
        """Take the trees that waited longest, up to `max_rows` rows.

        A tree counts as one row, its root, unless it is verified whole.
        """
        rows, count = 0, 0
        for job in self._trees:
            rows += job.rows if job.tree is not None and is_whole(job.tree) else 1
            if count and rows > self.max_rows:
                break
            count += 1
        jobs, self._trees = self._trees[:count], self._trees[count:]
        return jobs

    def _pieces(self, rows: int, longest: float, sessions: int) -> list[tuple[_Job, int]]:
        """The prompts whose turn it is, each with the number of tokens that the pass reads of it.

        A pass reads several prompts if all rows fit into the largest pass.

        Args:
            rows: Rows of the trees in the pass.
            longest: Time limit of the pass, seconds.
            sessions: Number of sessions with a tree in the pass.
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
        if not rows and not self._decoding():
            return PROMPT_ROWS
        return self._budget.prompt_rows(longest, rows, sessions)

    def _longest(self, rows: int, sessions: int) -> float:
        """Time limit of a pass that also reads prompts, given the rows and sessions of its trees."""
        waiting = len(self._prompts)
        return self._budget.longest(rows, sessions, waiting, decoding=len(self._paces) - waiting)

    def _decoding(self) -> bool:
        """Whether a session was answered recently, so that a long pass would delay its next tree."""
        since = _now() - RECENT_STEPS * self.costs.seconds(1)
        return any(pace.answered is not None and pace.answered > since for pace in self._paces.values())

    # Run and resolve

    async def _pass(self, jobs: list[_Job], parts: list[Part], price: float, held: float) -> None:
        """Run one pass, and give each session its result."""
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
        pass_statistics = PassStatistics(len(parts), rows, price, held, open_sessions=max(len(self._paces), 1))
        self.on_pass(pass_statistics, timings.forward)
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
                        self._records[job.session].observe(part.tree, part.nodes, len(result.accepted))
                    if result.finish_reason is not None:
                        self.forget(job.session)
                job.settle(_commit(part, result, replace(timings, attributed=timings.forward * share), pass_statistics))
        self._put_back(unread)
        self._observe(parts, results, rows, timings, began, now)
        self._ended = now

    def _shares(self, parts: Sequence[Part], rows: int) -> list[float]:
        """Each session's share of the pass's cost, summing to 1: proportional to the saving without the session."""
        whole = self.costs.seconds(rows, len(parts))
        marginal = [whole - self.costs.seconds(rows - part.rows, len(parts) - 1) for part in parts]
        total = sum(marginal)
        if total <= 0:  # no session adds to the cost
            return [1 / len(parts)] * len(parts)
        return [each / total for each in marginal]

    def _put_back(self, unread: Iterable[_Job]) -> None:
        """Queue the prompts that are not fully read: first while their turn lasts, else behind the other prompts."""
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
        timings: VerifyTimings,
        began: float,
        now: float,
    ) -> None:
        plain = self.costs.seconds(1)
        if any(part.prompt_tokens for part in parts):  # prompts would distort the costs and the rate of tree rounds
            self._budget.observe_prompts(rows, len(parts), timings.forward)
            return
        self.costs.observe(rows, len(parts), timings.forward)
        cycle = now - max(self._ended, began - plain)  # a longer gap means that the service was idle, not slow
        self.rate.observe(sum(len(each.token_ids) for each in results if isinstance(each, Verdict)), cycle)
        self._budget.observe(cycle)

    async def _failed(self, jobs: list[_Job], parts: list[Part], error: Exception) -> None:
        """Run each session of a failed pass alone, so that only the session at fault fails."""
        if len(jobs) == 1:
            jobs[0].fail(error)
            return
        for job, part in zip(jobs, parts, strict=True):
            if not job.future.done():
                await self._pass([job], [part], 0.0, 0.0)


def _commit(part: Part, verdict: Verdict, timings: VerifyTimings, pass_statistics: PassStatistics) -> Commit:
    return Commit(
        next_round=part.session.round,
        base_length=part.session.length,
        token_ids=verdict.token_ids,
        accepted_nodes=verdict.accepted,
        timings=timings,
        finish_reason=verdict.finish_reason,
        log_probs=verdict.log_probs,
        top_log_probs=verdict.top_log_probs,
        trimmed=part.trimmed,
        pass_statistics=pass_statistics,
    )


def _future() -> asyncio.Future[Commit]:
    return asyncio.get_running_loop().create_future()


def _now() -> float:
    return asyncio.get_running_loop().time()
