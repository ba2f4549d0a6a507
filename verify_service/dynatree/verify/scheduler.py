"""The scheduler: take what waits, run one pass over it, resolve what waited for it.

A session waits with its tree, or with the unread rest of its prompt. A pass takes every waiting tree's root, the nodes
that are worth their rows (`pass_plan`), and pieces of prompts as far as they do not hold the others up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from dynatree.common.pass_statistics import PassStatistics
from dynatree.common.tree import TokenTree
from dynatree.verify.accept import Verdict
from dynatree.verify.pass_costs import PassCosts
from dynatree.verify.pass_plan import admit, is_whole, subtree
from dynatree.verify.session import Session
from dynatree.verify.verifier import Part, Timings

RATE_FADE = 0.9  # weight of the past at each pass in the rate of the service
GAP_STEP = 0.3  # weight of one gap in a session's usual gap
LATE_SPREADS = 2.0  # mean deviations from its usual gap after which a silent session is not waited for
PROMPT_STRETCH = 1.7  # a pass that reads a prompt may take so many times as long as those before it
PROMPT_ROWS = 512  # of a prompt in a pass where no session streams: what others may have to wait for
LEAST_PROMPT_ROWS = 16  # of a pass that reads a prompt: less would take for ever
HOLD_SHARE = 0.5  # longest wait for trees about to come, in plain steps


# Runs a pass elsewhere than on the event loop: `Verifier.run` on the model thread.
PassRunner = Callable[[Sequence[Part]], Awaitable[tuple[list[Verdict | None], Timings]]]


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

    @property
    def rows(self) -> int:
        return 1 if self.tree is None else 1 + len(self.tree)

    @property
    def trimmed(self) -> int:
        return 0 if self.tree is None else len(self.tree) - len(self.kept)

    def settle(self, verdict: Verdict, timings: Timings, share: float, shared: PassStatistics) -> None:
        """Hand on what the session gets, its nodes named as in the tree that came."""
        if not self.future.done():
            accepted = tuple(self.kept[node] for node in verdict.accepted)
            self.future.set_result(Done(replace(verdict, accepted=accepted), timings, share, self.trimmed, shared))


@dataclass(eq=False)
class _Pace:
    """When a session's last answer went out, how long it usually takes to come back, and with how many rows."""

    answered: float | None = None  # None while it waits for a pass
    gap: float | None = None
    spread: float = 0.0  # mean absolute deviation of the gap
    rows: float = 1.0

    def came(self, now: float) -> None:
        """Its next tree is here."""
        if self.answered is not None:
            gap = now - self.answered
            if self.gap is None:
                self.gap, self.spread = gap, gap / 2
            else:
                self.spread += GAP_STEP * (abs(gap - self.gap) - self.spread)
                self.gap += GAP_STEP * (gap - self.gap)
        self.answered = None

    def expected(self, now: float) -> float | None:
        """When its next tree should come; None where that cannot be said, or it should have come long since."""
        if self.answered is None or self.gap is None:
            return None
        usual = self.answered + self.gap
        if now < usual:
            return usual
        late = usual + LATE_SPREADS * self.spread
        return late if now < late else None


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
        plain = sessions / costs.seconds(sessions)
        return max(plain, self.tokens / self.seconds) if self.seconds else plain


@dataclass
class Scheduler:
    """Gathers what sessions wait for into passes; runs on the event loop, one pass at a time.

    Attributes:
        run_pass: Runs a pass.
        costs: c(rows).
        max_rows: Of a pass.
    """

    run_pass: PassRunner
    costs: PassCosts
    max_rows: int
    rate: ServiceRate = field(default_factory=ServiceRate)
    _trees: list[_Job] = field(default_factory=list)  # in the order in which they came
    _prompts: list[_Job] = field(default_factory=list)  # the next to be read first
    _paces: dict[Session, _Pace] = field(default_factory=dict)
    _loop: asyncio.Task[None] | None = None
    _came: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: float = 0.0  # when the last pass ended
    _usual: float = 0.0  # seconds of passes of late that read no prompt, with the gap before each

    async def read(self, session: Session) -> Done:
        """Read the rest of a session's prompt, and commit its first token."""
        self._paces[session] = _Pace()
        return await self._wait(self._prompts, _Job(session, None, _future()))

    async def verify(self, session: Session, tree: TokenTree) -> Done:
        """Verify a session's tree, or of it what is worth its rows."""
        self._paces[session].came(_now())
        return await self._wait(self._trees, _Job(session, tree, _future()))

    def forget(self, session: Session) -> None:
        """A session has ended, or is about to; nobody waits for it."""
        self._paces.pop(session, None)

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
                if not job.future.done():  # nobody must wait for a loop that has ended
                    job.future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
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
        while (until := self._worth_waiting(_now(), latest)) is not None:
            self._came.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), until - _now())
        return _now() - began

    def _worth_waiting(self, now: float, latest: float) -> float | None:
        """Until when to wait for the sessions that are expected till then; None if running now is better.

        Let A be the rows that are ready and B those that are late by d. Running A now makes the late wait for it and
        then for their own pass; waiting makes those that are ready wait for d and for the larger pass. So wait iff

            n_late (c(A) - d + c(B) - c(A + B)) > n_ready (d + c(A + B) - c(A)).
        """
        if not self._trees:
            return None
        seconds = self.costs.seconds
        ready, rows = len(self._trees), min(sum(job.rows for job in self._trees), self.max_rows)
        coming = sorted(
            (expected, pace.rows) for pace in self._paces.values() if (expected := pace.expected(now)) is not None
        )
        best, until, late_rows = 0.0, None, 0.0
        for late, (expected, of_one) in enumerate(coming, start=1):
            delay = expected - now
            if expected >= latest:
                break
            late_rows += of_one
            both, behind = seconds(int(rows + late_rows)), seconds(int(late_rows))
            gain = late * (seconds(rows) - delay + behind - both) - ready * (delay + both - seconds(rows))
            if gain > best:
                best, until = gain, expected
        if until is None:
            return None
        return min(until + 0.001, latest)  # a little late is still in time

    # Take

    def _take(self) -> tuple[list[_Job], list[Part], float]:
        """The jobs of the next pass, what each puts into it, and the price of a row."""
        jobs = self._next_jobs()
        trees = [job.tree or TokenTree() for job in jobs]
        alone = len(self._paces) == 1
        if alone or not jobs:
            kept, price = [tuple(range(len(tree))) for tree in trees], 0.0
        else:
            admitted = admit(trees, self.rate.value(len(jobs), self.costs), self.costs, self.max_rows)
            kept, price = list(admitted.nodes), admitted.price
        parts = []
        for job, tree, nodes in zip(jobs, trees, kept, strict=True):
            job.kept = nodes
            parts.append(Part(job.session, subtree(tree, nodes)))
        prompts, pieces = self._take_prompts(sum(part.rows for part in parts), alone)
        return [*jobs, *prompts], [*parts, *pieces], price

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

    def _take_prompts(self, rows: int, alone: bool) -> tuple[list[_Job], list[Part]]:
        """A piece of the prompt whose turn it is; a large one where no other session streams."""
        if not self._prompts:
            return [], []
        job = self._prompts.pop(0)
        unread = job.session.unread
        if not rows and (alone or not self._streaming()):
            return [job], [Part(job.session, prompt_tokens=min(unread, PROMPT_ROWS))]
        most = PROMPT_STRETCH * max(self._usual, self.costs.seconds(max(rows, 1)))
        room = self.costs.most_rows(most, rows + unread) - rows
        tokens = min(max(room, LEAST_PROMPT_ROWS), unread, PROMPT_ROWS)
        return [job], [Part(job.session, prompt_tokens=tokens)]

    def _streaming(self) -> bool:
        """Whether a session's next tree is about to come."""
        now = _now()
        return any(pace.expected(now) is not None for pace in self._paces.values())

    # Run and resolve

    async def _pass(self, jobs: list[_Job], parts: list[Part], price: float, held: float) -> None:
        """Run one pass, and hand each session what is its own of it."""
        began = _now()
        try:
            verdicts, timings = await self.run_pass(parts)
        except Exception as error:
            await self._failed(jobs, parts, error)
            return
        now = _now()
        rows = sum(part.rows for part in parts)
        shared = PassStatistics(len(parts), rows, price, held, open_sessions=max(len(self._paces), 1))
        self._observe(parts, verdicts, rows, timings, began, now)
        self._ended = now
        for job, part, verdict in zip(jobs, parts, verdicts, strict=True):
            if verdict is None:
                self._prompts.append(job)
                continue
            pace = self._paces.get(job.session)
            if pace is not None:
                pace.answered, pace.rows = now, float(part.rows if not part.prompt_tokens else 1)
                if verdict.finish_reason is not None:
                    self.forget(job.session)
            job.settle(verdict, timings, timings.forward * part.rows / rows, shared)

    def _observe(
        self,
        parts: Sequence[Part],
        verdicts: Sequence[Verdict | None],
        rows: int,
        timings: Timings,
        began: float,
        now: float,
    ) -> None:
        plain = self.costs.seconds(1)
        if any(part.prompt_tokens for part in parts):
            return  # its rows are no trees, and its tokens no rounds
        self.costs.observe(rows, timings.forward)
        cycle = now - max(self._ended, began - plain)  # after a pause the service was idle, not slow
        self.rate.observe(sum(len(verdict.token_ids) for verdict in verdicts if verdict is not None), cycle)
        self._usual = cycle if not self._usual else self._usual + GAP_STEP * (cycle - self._usual)

    async def _failed(self, jobs: list[_Job], parts: list[Part], error: Exception) -> None:
        """A pass over several sessions has failed: run each by itself, so that only the one at fault fails."""
        if len(jobs) == 1:
            if not jobs[0].future.done():
                jobs[0].future.set_exception(error)
            return
        for job, part in zip(jobs, parts, strict=True):
            if not job.future.done():
                await self._pass([job], [part], 0.0, 0.0)


def _future() -> asyncio.Future[Done]:
    return asyncio.get_running_loop().create_future()


def _now() -> float:
    return asyncio.get_running_loop().time()
