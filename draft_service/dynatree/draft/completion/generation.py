"""One completion: grow, verify, commit, until the target ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from dynatree.common.decoding import Decoding
from dynatree.common.limits import RESUME_SECONDS
from dynatree.common.log_probs import TopLogProbs
from dynatree.common.messages import Commit, FinishReason, OpenSession, SessionOpened
from dynatree.common.model_info import ModelInfo
from dynatree.draft.completion.ahead import DraftingAhead
from dynatree.draft.completion.statistics import Statistics, StatisticsRecorder
from dynatree.draft.growth.best_guesses import BestGuesses
from dynatree.draft.growth.draft_session import DraftSession
from dynatree.draft.growth.draft_source import DraftSource
from dynatree.draft.growth.drafter import Drafter, Growing
from dynatree.draft.growth.round import Growth, Round
from dynatree.draft.growth.shared_growth import SharedGrowth
from dynatree.draft.policies import Policy
from dynatree.draft.target.remote_session import RemoteSession
from dynatree.draft.target.replica import Replica
from dynatree.draft.target.replicas import Replicas
from dynatree.draft.target.target import Target
from dynatree.draft.text.detokenizer import Detokenizer
from dynatree.draft.text.stop_strings import StopStrings
from dynatree.draft.text.text_stream import TextStream
from dynatree.engine.grammar.state import GrammarState
from dynatree.engine.model.vocabulary import vocabulary_of
from dynatree.engine.model_thread import ModelThread
from dynatree.serving.grpc_options import REQUEST_ID
from dynatree.serving.tracing import NO_SPAN, Span

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """The resources that all completions share.

    Attributes:
        source: The draft model, or its absence.
        drafter: Grows trees with it.
        thread: The thread on which the draft model runs.
        growth: Batches the draft forward passes of all sessions.
        replicas: The verify services.
        guesses: Statistics of the draft model's best guesses.
        resume_seconds: Seconds that a completion waits for a new verify service after losing its own.
    """

    source: DraftSource
    drafter: Drafter
    thread: ModelThread
    growth: SharedGrowth
    replicas: Replicas
    guesses: BestGuesses
    resume_seconds: float = RESUME_SECONDS


@dataclass(frozen=True)
class Received:
    """The part of a completion that a client already has from a lost draft service: tokens, characters, rounds."""

    token_ids: tuple[int, ...] = ()
    characters: int = 0
    rounds: int = 0


NOTHING_RECEIVED = Received()


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one completion, checked as far as the draft side can.

    Attributes:
        prompt_ids: The prompt.
        decoding: Decoding options of the target.
        stop: Strings that end the completion.
        trace: Whether the client gets a trace of each round.
        policy: The policy of this completion alone.
        target: The target that the request was built for.
        seed: The completion's seed. `decoding.sampling` has the same, unless the policy learns from other requests.
        principal: The principal.
        recalls: Whether trees may have candidates from the principal's earlier completions.
        keeps: Whether later completions of the principal may have candidates from this one.
        received: The part that the client already has from a lost draft service.
        grammar: State of the grammar after that part; None allows any text.
        special_tokens: Whether the text has the names of special tokens.
        request_id: The request's id in logs.
        span: The tracing span of the completion.
    """

    prompt_ids: tuple[int, ...]
    decoding: Decoding
    stop: tuple[str, ...]
    trace: bool
    policy: Policy
    target: Target
    seed: int
    principal: str = ""
    recalls: bool = True
    keeps: bool = True
    received: Received = NOTHING_RECEIVED
    grammar: GrammarState | None = None
    special_tokens: bool = False
    request_id: str = ""
    span: Span = NO_SPAN

    @property
    def begun_ids(self) -> tuple[int, ...]:
        """The prompt, and the tokens that the client already has."""
        return self.prompt_ids + self.received.token_ids

    @property
    def limit(self) -> int:
        """Largest length of the sequence, prompt included."""
        if self.decoding.max_new_tokens is None:
            return self.target.info.context_length
        return len(self.prompt_ids) + self.decoding.max_new_tokens

    @property
    def least_context(self) -> int:
        """Smallest context of a target that can serve the request, in tokens."""
        return max(len(self.prompt_ids) + (self.decoding.max_new_tokens or 1), len(self.begun_ids))


@dataclass(frozen=True)
class Chunk:
    """Committed tokens, their text, and each token's offset; the text of a token may come in a later chunk."""

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    top_log_probs: TopLogProbs
    text_offsets: tuple[int, ...]


@dataclass(frozen=True)
class TracedRound:
    """A round, the policy's parameters after it, and the texts of its nodes and committed tokens."""

    round: Round
    parameters: dict[str, float]
    node_texts: tuple[str, ...]
    committed_texts: tuple[str, ...]


@dataclass(frozen=True)
class Completed:
    """The end of a completion: the rest of its text, the reason, and its statistics."""

    text: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    statistics: Statistics


class Generation:
    """Runs one completion: `Generation.open`, then `rounds`.

    Invariant: the client gets exactly the tokens of the verify service's commits, in order. The draft model decides how
    many come in one round, never which.
    """

    def __init__(
        self,
        request: GenerationRequest,
        backend: Backend,
        session: DraftSession,
        remote_session: RemoteSession,
        opened: SessionOpened,
        prefilled: asyncio.Future[None],
        arrival: float,
    ) -> None:
        self._request = request
        self._drafter = backend.drafter
        self._thread = backend.thread
        self._growth = backend.growth
        self._guesses = backend.guesses
        self._vocabulary = vocabulary_of(backend.source.tokenizer, special_tokens=True)
        self._session = session
        self._remote_session = remote_session
        self._opened = opened
        self._prefilled = prefilled
        self._recorder = StatisticsRecorder(
            arrival,
            queue_seconds=opened.queue_seconds,
            cached_tokens=opened.cached_tokens,
            received=len(request.received.token_ids),
        )
        detokenizer = Detokenizer(backend.source.tokenizer, request.prompt_ids, special_tokens=request.special_tokens)
        self._text = TextStream(detokenizer, StopStrings(request.stop))
        self._limit = request.limit
        commit = opened.commit  # of no tokens if those received end with an end token
        ended = commit.finish_reason is FinishReason.STOP and not commit.token_ids
        self._replayed, _ = self._text.push(request.received.token_ids, ended=ended)
        self._seen = request.received.characters
        session.rounds = len(request.received.token_ids)  # an upper bound on past rounds, so that no noise repeats

    @classmethod
    @asynccontextmanager
    async def open(
        cls, request: GenerationRequest, backend: Backend, replica: Replica, timeout: float | None
    ) -> AsyncIterator[Self]:
        """Open a session on both sides, have the target prefill the prompt, and close both sessions on exit.

        Args:
            request: The request.
            backend: The shared resources.
            replica: The verify service to try first; the request was built for its target.
            timeout: Seconds until the client's deadline; None: no deadline.

        Raises:
            TargetChangedError: The verify service has changed its target.
            ServiceError: No session is free, or the verify services failed or refused.
        """
        arrival = time.perf_counter()
        drafter, thread = backend.drafter, backend.thread
        # opened on the model thread, so after the sessions that have ended are closed
        opening = partial(
            drafter.open,
            request.begun_ids,
            request.decoding.sampling,
            request.target.vocab_size,
            request.limit,
            request.principal,
            len(request.received.token_ids),
            request.policy.drawing,
            recalls=request.recalls,
            keeps=request.keeps,
            grammar=request.grammar,
        )
        open_session = OpenSession(
            prompt_ids=request.begun_ids,
            decoding=request.decoding,
            draft=backend.source.info,
            principal=request.principal,
            generated=len(request.received.token_ids),
            round=request.received.rounds,
        )
        metadata = ((REQUEST_ID, request.request_id), *request.span.metadata) if request.request_id else ()
        remote_session = RemoteSession(
            backend.replicas, replica, open_session, timeout, backend.resume_seconds, metadata=metadata
        )
        async with thread.held(opening, drafter.close) as session, remote_session:
            # on one device the two prefills would slow each other down, and the target makes the first token
            tokens = None if request.target.ahead else request.limit - len(request.begun_ids)
            prefill = partial(backend.growth.run, partial(drafter.prefilling, session, request.policy, tokens))
            reading = prefill() if request.target.ahead else None
            one_device = request.target.info.device_id == backend.source.info.device_id
            try:
                with request.span.child("open session", tokens=len(request.begun_ids)):
                    opened = await remote_session.open(request.target.info)
                reading = reading or prefill()
                with backend.source.sharing() if one_device else nullcontext():
                    yield cls(request, backend, session, remote_session, opened, reading, arrival)
            finally:
                if reading is not None:
                    reading.cancel()

    @property
    def target(self) -> ModelInfo:
        """The target that makes the completion."""
        return self._opened.target

    @property
    def max_new_tokens(self) -> int:
        """Tokens after which the completion ends, even if it resumes on another verify service."""
        return self._limit - len(self._request.prompt_ids)

    @property
    def prompt_log_probs(self) -> tuple[float, ...]:
        """Log-probability of each prompt token but the first, if the request asks for them."""
        return self._opened.prompt_log_probs

    @property
    def prompt_top_log_probs(self) -> TopLogProbs:
        """The likeliest tokens at each of these positions, if the request asks for them."""
        return self._opened.prompt_top_log_probs

    def waited(self, seconds: float) -> None:
        """Add `seconds` of queueing before this completion; its time to first token includes them."""
        self._recorder.arrival -= seconds
        self._recorder.queue_seconds += seconds

    async def rounds(self) -> AsyncGenerator[Chunk | TracedRound | Completed]:
        """Grow, verify and commit until the target or a stop string ends the completion; the last event is `Completed`.

        The client gets a commit's text while the draft model takes in the commit and grows the next tree.

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
        """Do `_commit_and_grow` once the draft model has read the prompt, which it reads in separate steps."""
        await self._prefilled
        return await self._commit_and_grow(None, commit)

    def _commit_and_grow(
        self, last: Round | None, commit: Commit
    ) -> asyncio.Future[tuple[Growth | None, dict[str, float]]]:
        """On the model thread, take in the commit, learn from its round, and grow the next tree.

        Returns:
            The future of the tree, None after the last commit, and of the policy's parameters if a trace is wanted.
        """
        policy = self._request.policy
        # the last token is always the target's own, so the deepest useful node is the one before it
        max_depth = self._limit - commit.base_length - 1
        max_nodes = self._remote_session.max_tree_nodes

        def commit_and_grow() -> Growing[tuple[Growth | None, dict[str, float]]]:
            started = time.perf_counter()
            self._guesses.observe(self._session, commit.token_ids)
            self._drafter.commit(self._session, commit.token_ids)
            if last is not None and not commit.resumed:  # a resumed commit verified no tree
                policy.observe(last)
            commit_seconds = time.perf_counter() - started
            parameters = policy.parameters() if self._request.trace else {}
            if commit.finish_reason is not None:
                return None, parameters
            growth = yield from self._drafter.growing(self._session, policy, max_depth, max_nodes)
            return replace(growth, commit_seconds=commit_seconds), parameters

        return self._growth.run(commit_and_grow)

    async def _verify(self, growth: Growth, last: Commit) -> Round:
        """Have the target verify a tree; meanwhile the draft model drafts ahead if the target allows it.

        A round has a span only if the request asks for a trace: a span in each round slows an embedded pair by a tenth.
        """
        parent = self._request.span if self._request.trace else NO_SPAN
        with parent.child("round", round=last.next_round, nodes=len(growth.tree)) as span:
            sent = time.perf_counter()
            async with self._drafting_ahead(last):
                commit = await self._remote_session.verify(growth.tree, last)
                answered = time.perf_counter()
            done = Round(growth, commit, answered - sent, ahead_seconds=time.perf_counter() - answered)
            span.note(
                accepted=len(done.accepted),
                resumed=commit.resumed,
                draft_seconds=done.draft_seconds,
                wire_seconds=done.wire_seconds,
                verify_seconds=commit.timings.total,
                rows=commit.pass_statistics.rows,
                sessions=commit.pass_statistics.sessions,
                hold_seconds=commit.pass_statistics.hold_seconds,
            )
        return done

    @asynccontextmanager
    async def _drafting_ahead(self, commit: Commit) -> AsyncIterator[None]:
        """Draft ahead below the tree that follows `commit` until the context exits."""
        max_depth = min(self._limit - commit.base_length, self._drafter.reach(self._session))
        breadth = self._request.policy.breadth
        if not self._request.target.ahead or not breadth or max_depth < 1:
            yield
            return
        ahead = DraftingAhead(self._drafter, self._session, max_depth, breadth)
        reading = asyncio.ensure_future(self._read(ahead))
        reading.add_done_callback(_log_failure)  # the commit is valid even if drafting ahead fails
        try:
            yield
        finally:
            ahead.stop()
            await asyncio.wait([reading])

    async def _read(self, ahead: DraftingAhead) -> None:
        """Draft ahead while there are nodes to read and no other session needs the draft model."""
        while self._thread.idle and await self._thread.run(ahead.step):
            pass

    def _emit(self, last: Round | None, commit: Commit) -> Chunk:
        """Build and count the chunk of a commit; `last` is its round, None for the commit of the prompt."""
        started = time.perf_counter()
        text, token_ids = self._text.push(commit.token_ids, ended=commit.finish_reason is FinishReason.STOP)
        count = len(token_ids)
        if last is not None:
            self._recorder.part("detokenize", time.perf_counter() - started)
            self._recorder.round(last, kept=count)
        self._recorder.count(count)
        text, self._replayed = self._unseen(self._replayed + text), ""
        return Chunk(text, token_ids, commit.log_probs[:count], commit.top_log_probs[:count], self._text.offsets)

    def _unseen(self, text: str) -> str:
        """Return the part of the next piece of text that the client does not have from an earlier draft service."""
        seen = min(self._seen, len(text))
        self._seen -= seen
        return text[seen:]

    def _traced(self, last: Round, parameters: dict[str, float]) -> TracedRound:
        def texts(token_ids: tuple[int, ...]) -> tuple[str, ...]:
            return tuple(self._vocabulary.text(token) for token in token_ids)

        return TracedRound(last, parameters, texts(last.tree.token_ids), texts(last.commit.token_ids))

    def _completion(self, commit: Commit) -> Completed:
        sampling = self._request.decoding.sampling
        text = self._unseen(self._text.flush())
        self._recorder.resumes = self._remote_session.resumes
        self._recorder.resume_seconds = self._remote_session.resume_seconds
        return Completed(
            text=text,
            finish_reason=FinishReason.STOP if self._text.stopped else commit.finish_reason,
            prompt_tokens=len(self._request.prompt_ids),
            statistics=self._recorder.result(seed=0 if sampling.greedy else self._request.seed),
        )


def _log_failure(reading: asyncio.Future[None]) -> None:
    if not reading.cancelled() and (error := reading.exception()):
        log.warning("drafting ahead failed", exc_info=error)
