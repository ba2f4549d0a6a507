"""One completion: grow, verify, commit, until the target says that it is over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from dynatree.common.engine import Engine
from dynatree.common.grpc_options import REQUEST_ID
from dynatree.common.limits import RESUME_SECONDS
from dynatree.common.log_probs import TopLogProbs
from dynatree.common.messages import Commit, FinishReason, OpenSession, SessionOpened
from dynatree.common.model_info import ModelInfo
from dynatree.common.model_thread import ModelThread
from dynatree.common.sampling import Sampling
from dynatree.common.shared_cores import SharedCores
from dynatree.common.tracing import NOTHING as NO_SPAN
from dynatree.common.tracing import Span
from dynatree.draft.ahead import DraftingAhead
from dynatree.draft.best_guesses import BestGuesses
from dynatree.draft.detokenizer import Detokenizer
from dynatree.draft.draft_session import DraftSession
from dynatree.draft.drafter import Drafter, Growing
from dynatree.draft.policies import Policy
from dynatree.draft.replica import Replica
from dynatree.draft.replicas import Replicas
from dynatree.draft.round import Growth, Round
from dynatree.draft.shared_growth import SharedGrowth
from dynatree.draft.statistics import Statistics, StatisticsRecorder
from dynatree.draft.stop_strings import StopStrings
from dynatree.draft.target import Target
from dynatree.draft.target_session import TargetSession
from dynatree.draft.text_stream import TextStream
from dynatree.draft.vocabulary import vocabulary_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """What completions run on: the draft model, its thread and cores, what all grow on and count, the verify services.

    `resume_seconds`: how long a completion whose verify service was lost waits for another one.
    """

    engine: Engine
    drafter: Drafter
    thread: ModelThread
    growth: SharedGrowth
    replicas: Replicas
    cores: SharedCores
    guesses: BestGuesses
    resume_seconds: float = RESUME_SECONDS


@dataclass(frozen=True)
class Received:
    """What a client has of a completion whose draft service was lost: tokens, characters of text, rounds."""

    token_ids: tuple[int, ...] = ()
    characters: int = 0
    rounds: int = 0


NOTHING = Received()


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one completion, checked as far as the draft side can; `policy` is this completion's own.

    `seed` is the request's, which `sampling` has as well unless the policy learns from other requests.

    `received` is what the client has of it from a draft service that was lost. `request_id` names it in logs; `span` is
    its time.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    log_probs: bool
    trace: bool
    policy: Policy
    target: Target
    seed: int
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    principal: str = ""
    received: Received = NOTHING
    request_id: str = ""
    span: Span = NO_SPAN

    @property
    def begun_ids(self) -> tuple[int, ...]:
        """The prompt, and the tokens that the client has."""
        return self.prompt_ids + self.received.token_ids

    @property
    def limit(self) -> int:
        """Most tokens of the sequence, prompt included."""
        if self.max_new_tokens is None:
            return self.target.info.context_length
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def least_context(self) -> int:
        """Tokens that the target's context must have for it."""
        return max(len(self.prompt_ids) + (self.max_new_tokens or 1), len(self.begun_ids))


@dataclass(frozen=True)
class Chunk:
    """Text and tokens that were committed, and where each begins; the text of a token may come in a later chunk."""

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    top_log_probs: TopLogProbs
    text_offsets: tuple[int, ...]


@dataclass(frozen=True)
class TracedRound:
    """A round, what the policy's parameters were after it, and the text of each node and each committed token."""

    round: Round
    parameters: dict[str, float]
    node_texts: tuple[str, ...]
    committed_texts: tuple[str, ...]


@dataclass(frozen=True)
class Completion:
    """The end of a completion: the last of its text, why it ended, and what it cost."""

    text: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    statistics: Statistics


class Generation:
    """Runs one completion; `Generation.open`, then `rounds`.

    Invariant: the tokens handed on are those of the verify service's commits, in order and nothing else; the draft
    decides how many come in one round, never which.
    """

    def __init__(
        self,
        request: GenerationRequest,
        backend: Backend,
        session: DraftSession,
        target_session: TargetSession,
        opened: SessionOpened,
        prompt_read: asyncio.Future[None],
        arrival: float,
    ) -> None:
        self._request = request
        self._drafter = backend.drafter
        self._thread = backend.thread
        self._growth = backend.growth
        self._guesses = backend.guesses
        self._vocabulary = vocabulary_of(backend.engine.tokenizer, special_tokens=True)
        self._session = session
        self._target_session = target_session
        self._opened = opened
        self._prompt_read = prompt_read
        self._recorder = StatisticsRecorder(
            arrival,
            queue_seconds=opened.queue_seconds,
            cached_tokens=opened.cached_tokens,
            received=len(request.received.token_ids),
        )
        self._text = TextStream(Detokenizer(backend.engine.tokenizer, request.prompt_ids), StopStrings(request.stop))
        self._limit = request.limit
        self._replayed, _ = self._text.push(request.received.token_ids)
        self._seen = request.received.characters
        session.rounds = len(request.received.token_ids)  # at least as many as there were, so that no noise comes twice

    @classmethod
    @asynccontextmanager
    async def open(
        cls, request: GenerationRequest, backend: Backend, replica: Replica, timeout: float | None
    ) -> AsyncIterator[Self]:
        """Open a session on both sides, and close both in the end; the target reads the prompt.

        Args:
            request: The request.
            backend: What it runs on.
            replica: The verify service to try first, whose target the request was made for.
            timeout: Seconds until the client's deadline; None without one.

        Raises:
            TargetChangedError: The verify service has another target by now.
            ServiceError: No session is free, or the verify services failed or refused.
        """
        arrival = time.perf_counter()
        drafter, thread = backend.drafter, backend.thread
        # opened on the model thread, so behind the closing of sessions that have ended
        opening = partial(
            drafter.open,
            request.begun_ids,
            request.sampling,
            request.target.vocab_size,
            request.limit,
            request.principal,
            len(request.received.token_ids),
            request.policy.drawing,
        )
        open_session = _open_session(request, backend.engine.info)
        metadata = ((REQUEST_ID, request.request_id), *request.span.metadata) if request.request_id else ()
        target_session = TargetSession(
            backend.replicas, replica, open_session, timeout, backend.resume_seconds, metadata=metadata
        )
        async with thread.held(opening, drafter.close) as session, target_session:
            read_prompt = partial(backend.growth.run, partial(drafter.reading, session, request.policy))
            # on one device the two would only slow each other down, and the target has the first token
            reading = read_prompt() if request.target.ahead else None
            one_device = request.target.info.device_id == backend.engine.info.device_id
            try:
                with request.span.child("prefill", tokens=len(request.begun_ids)):
                    opened = await target_session.open(request.target.info)
                reading = reading or read_prompt()
                with backend.cores.shared() if one_device else nullcontext():
                    yield cls(request, backend, session, target_session, opened, reading, arrival)
            finally:
                if reading is not None:
                    reading.cancel()

    @property
    def fingerprint(self) -> str:
        """Of the target that makes the completion."""
        return self._opened.target.fingerprint

    @property
    def max_new_tokens(self) -> int:
        """Tokens after which the completion ends, wherever it goes on."""
        return self._limit - len(self._request.prompt_ids)

    @property
    def prompt_log_probs(self) -> tuple[float, ...]:
        """One for each token of the prompt but the first where the request asks for them."""
        return self._opened.prompt_log_probs

    @property
    def prompt_top_log_probs(self) -> TopLogProbs:
        """The likeliest tokens in the place of each of these, likewise."""
        return self._opened.prompt_top_log_probs

    def waited(self, seconds: float) -> None:
        """Count a wait for this completion's turn; its time to the first token begins with it."""
        self._recorder.arrival -= seconds
        self._recorder.queue_seconds += seconds

    async def rounds(self) -> AsyncGenerator[Chunk | TracedRound | Completion]:
        """Grow, verify, commit, until the target or a stop string ends it; the last event is the `Completion`.

        While the draft model commits and grows, the client gets the commit's text.

        Raises:
            ServiceError: The verify service failed or refused.
        """
        last, commit = None, self._opened.commit
        growing: asyncio.Future[tuple[Growth | None, dict[str, float]]]
        growing = asyncio.ensure_future(self._first_tree(commit))
        try:
            while True:
                yield self._emit(last, commit)
                growth, parameters = await growing
                if last is not None and self._request.trace:
                    yield self._traced(last, parameters)
                if growth is None or self._text.stopped:
                    break
                last = await self._verify(growth, commit)
                commit = last.commit
                growing = self._commit_and_grow(last, commit)
        finally:
            growing.cancel()
        self._request.policy.end()
        yield self._completion(commit)

    async def _first_tree(self, commit: Commit) -> tuple[Growth | None, dict[str, float]]:
        """As `_commit_and_grow`, once the prompt is read, which takes steps of its own."""
        await self._prompt_read
        return await self._commit_and_grow(None, commit)

    def _commit_and_grow(
        self, last: Round | None, commit: Commit
    ) -> asyncio.Future[tuple[Growth | None, dict[str, float]]]:
        """On the model thread: take the commit in, learn from its round, and grow the next tree, if there is one.

        The future of the tree, and of the policy's parameters after the round where a trace is wanted.
        """
        policy = self._request.policy
        # the deepest useful node is the one before the last token, which is the target's own in any case
        max_depth = self._limit - commit.base_length - 1
        max_nodes = self._target_session.max_tree_nodes

        def commit_and_grow() -> Growing[tuple[Growth | None, dict[str, float]]]:
            started = time.perf_counter()
            self._guesses.observe(self._session, commit.token_ids)
            self._drafter.commit(self._session, commit.token_ids)
            if last is not None and not commit.resumed:  # else nothing was verified
                policy.observe(last)
            commit_seconds = time.perf_counter() - started
            parameters = policy.parameters() if self._request.trace else {}
            if commit.finish_reason is not None:
                return None, parameters
            growth = yield from self._drafter.growing(self._session, policy, max_depth, max_nodes)
            return replace(growth, commit_seconds=commit_seconds), parameters

        return self._growth.run(commit_and_grow)

    async def _verify(self, growth: Growth, last: Commit) -> Round:
        """Have the target check a tree; the draft model reads ahead meanwhile, where it is to.

        A round is a span only where the request asks for its trace: a span in each costs an embedded pair a tenth.
        """
        parent = self._request.span if self._request.trace else NO_SPAN
        with parent.child("round", round=last.next_round, nodes=len(growth.tree)) as span:
            sent = time.perf_counter()
            async with self._reading_ahead(last):
                commit = await self._target_session.verify(growth.tree, last)
                answered = time.perf_counter()
            done = Round(growth, commit, answered - sent, ahead_seconds=time.perf_counter() - answered)
            span.note(
                accepted=len(done.accepted),
                resumed=commit.resumed,
                draft_seconds=done.draft_seconds,
                wire_seconds=done.wire_seconds,
                verify_seconds=commit.timings.total,
                rows=commit.shared.rows,
                sessions=commit.shared.sessions,
                hold_seconds=commit.shared.hold_seconds,
            )
        return done

    @asynccontextmanager
    async def _reading_ahead(self, commit: Commit) -> AsyncIterator[None]:
        """Read ahead below the tree that follows `commit`, for as long as the context lives."""
        max_depth = min(self._limit - commit.base_length, self._drafter.reach(self._session))
        breadth = self._request.policy.breadth
        if not self._request.target.ahead or not breadth or max_depth < 1:
            yield
            return
        ahead = DraftingAhead(self._drafter, self._session, max_depth, breadth)
        reading = asyncio.ensure_future(self._read(ahead))
        reading.add_done_callback(_log_failure)  # the commit is good all the same
        try:
            yield
        finally:
            ahead.stop()
            await asyncio.wait([reading])

    async def _read(self, ahead: DraftingAhead) -> None:
        """Read for as long as there is something to read and nobody else wants the model."""
        while self._thread.idle and await self._thread.run(ahead.step):
            pass

    def _emit(self, last: Round | None, commit: Commit) -> Chunk:
        """What the client gets of a commit, counted; `last` is its round, None for the prompt's own."""
        started = time.perf_counter()
        text, token_ids = self._text.push(commit.token_ids)
        count = len(token_ids)
        if last is not None:
            self._recorder.part("detokenize", time.perf_counter() - started)
            self._recorder.round(last, kept=count)
        self._recorder.count(count)
        text, self._replayed = self._unseen(self._replayed + text), ""
        return Chunk(text, token_ids, commit.log_probs[:count], commit.top_log_probs[:count], self._text.offsets)

    def _unseen(self, text: str) -> str:
        """Of the next piece of the text what the client does not have from an earlier draft service."""
        seen = min(self._seen, len(text))
        self._seen -= seen
        return text[seen:]

    def _traced(self, last: Round, parameters: dict[str, float]) -> TracedRound:
        def texts(token_ids: tuple[int, ...]) -> tuple[str, ...]:
            return tuple(self._vocabulary.text(token) for token in token_ids)

        return TracedRound(last, parameters, texts(last.tree.token_ids), texts(last.commit.token_ids))

    def _completion(self, commit: Commit) -> Completion:
        sampling = self._request.sampling
        text = self._unseen(self._text.flush())
        self._recorder.resumes = self._target_session.resumes
        self._recorder.resume_seconds = self._target_session.resume_seconds
        return Completion(
            text=text,
            finish_reason=FinishReason.STOP if self._text.stopped else commit.finish_reason,
            prompt_tokens=len(self._request.prompt_ids),
            statistics=self._recorder.result(seed=0 if sampling.greedy else self._request.seed),
        )


def _open_session(request: GenerationRequest, draft: ModelInfo) -> OpenSession:
    return OpenSession(
        prompt_ids=request.begun_ids,
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        draft=draft,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        log_probs=request.log_probs,
        principal=request.principal,
        generated=len(request.received.token_ids),
        round=request.received.rounds,
        top_log_probs=request.top_log_probs,
        prompt_log_probs=request.prompt_log_probs,
    )


def _log_failure(reading: asyncio.Future[None]) -> None:
    if not reading.cancelled() and (error := reading.exception()):
        log.warning("reading ahead failed", exc_info=error)
