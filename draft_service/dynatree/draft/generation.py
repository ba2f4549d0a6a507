"""One completion: grow, verify, commit, until the target says that it is over."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from dynatree.common.model_thread import ModelThread
from dynatree.common.sampling import Sampling
from dynatree.common.tree import TokenTree
from dynatree.common.wire import model_info_to_pb
from dynatree.draft.ahead import DraftingAhead
from dynatree.draft.detokenizer import Detokenizer
from dynatree.draft.drafter import Drafter, DraftSession, Growth
from dynatree.draft.policies import Outcome, Policy
from dynatree.draft.statistics import Recorder
from dynatree.draft.stop_strings import StopStrings
from dynatree.draft.verify_client import Answer, VerifyClient, VerifySession
from dynatree.v1 import draft_pb2, tree_pb2, verify_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request: `limit` is the number of tokens, prompt included, at which the completion ends.

    `bounded` says whether the client named that limit; if not, it is the target's context.
    """

    prompt_ids: tuple[int, ...]
    limit: int
    bounded: bool
    sampling: Sampling
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    log_probs: bool
    trace: bool
    policy: Policy
    ahead: bool


@dataclass(frozen=True)
class _Round:
    """A tree that was sent, and the answer to it; then it may have waited for a forward that read ahead to end."""

    growth: Growth
    commit_seconds: float
    answer: Answer
    ahead_seconds: float

    def outcome(self) -> Outcome:
        """What the policy learns of it."""
        waited = self.answer.waited_seconds
        return Outcome(
            tree=self.growth.tree,
            accepted=tuple(self.answer.commit.accepted_nodes),
            levels=self.growth.levels,
            draft_seconds=self.growth.seconds + self.commit_seconds,
            verify_seconds=self.answer.seconds - waited,
            waited_seconds=waited + self.ahead_seconds,
        )


@dataclass(frozen=True)
class _Advance:
    """What the model thread did between two exchanges; no growth after the last commit."""

    commit_seconds: float
    parameters: dict[str, float]
    growth: Growth | None


class Generation:
    """Runs one completion.

    Invariant: the tokens handed on are those of the verify service's commits, in order and nothing else; the draft
    decides how many come in one round, never which.
    """

    def __init__(self, request: GenerationRequest, drafter: Drafter, thread: ModelThread, verify: VerifyClient) -> None:
        self._request = request
        self._drafter = drafter
        self._thread = thread
        self._verify = verify
        self._recorder = Recorder(arrival=time.perf_counter())
        self._text = TextStream(Detokenizer(drafter.engine.tokenizer, request.prompt_ids), StopStrings(request.stop))

    async def run(self, timeout: float | None) -> AsyncIterator[draft_pb2.GenerateResponse]:
        """The completion's messages; the last carries the finish reason and the statistics.

        Raises:
            ServiceError: No session is free, or the verify service failed or refused.
        """
        request = self._request
        session = self._drafter.open(request.prompt_ids, request.sampling)
        try:
            async with self._verify.session(timeout) as stream:
                # on one device the two would only slow each other down, and the target has the first token
                reading = self._read_prompt(session) if request.ahead else None
                opened = await stream.open(self._open_message())
                async for response in self._rounds(session, stream, opened, reading or self._read_prompt(session)):
                    yield response
        finally:
            # asked for behind any forward that still runs for this session
            await self._thread.run(self._drafter.close, session)

    def _read_prompt(self, session: DraftSession) -> asyncio.Future[None]:
        return self._thread.run(self._drafter.read, session, self._request.policy)

    async def _rounds(
        self,
        session: DraftSession,
        stream: VerifySession,
        opened: verify_pb2.SessionOpened,
        reading: asyncio.Future[None],
    ) -> AsyncIterator[draft_pb2.GenerateResponse]:
        commit = opened.commit
        last: _Round | None = None
        advancing = self._start_advance(session, commit, last, opened.max_tree_nodes)
        try:
            while True:
                response = self._hand_on(commit)
                if last is not None:
                    kept = len(response.token_ids)
                    self._recorder.round(last.growth, last.answer, last.commit_seconds, kept)
                yield response
                await reading
                advance = await advancing
                if last is not None and self._request.trace:
                    yield draft_pb2.GenerateResponse(trace=self._trace(last, advance.parameters))
                if advance.growth is None or self._text.stopped:
                    break
                answer, ahead_seconds = await self._verified(session, stream, advance.growth.tree, commit)
                last = _Round(advance.growth, advance.commit_seconds, answer, ahead_seconds)
                commit = answer.commit
                advancing = self._start_advance(session, commit, last, opened.max_tree_nodes)
        finally:
            advancing.cancel()
        yield self._last_message(commit)

    def _start_advance(
        self, session: DraftSession, commit: verify_pb2.Commit, last: _Round | None, max_nodes: int
    ) -> asyncio.Future[_Advance]:
        """Commit and grow on the model thread, while the event loop makes text of the commit."""
        remaining = self._request.limit - commit.base_length
        policy = self._request.policy

        def advance() -> _Advance:
            started = time.perf_counter()
            self._drafter.commit(session, commit.token_ids)
            if last is not None:
                policy.observe(last.outcome())
            commit_seconds = time.perf_counter() - started
            parameters = policy.parameters() if self._request.trace else {}
            if commit.finish_reason:
                return _Advance(commit_seconds, parameters, None)
            # the deepest useful node is the one before the last token, which is the target's own in any case
            growth = self._drafter.grow(session, policy, remaining - 1, max_nodes)
            return _Advance(commit_seconds, parameters, growth)

        return self._thread.run(advance)

    async def _verified(
        self, session: DraftSession, stream: VerifySession, tree: TokenTree, commit: verify_pb2.Commit
    ) -> tuple[Answer, float]:
        """The answer to a tree, and how long reading ahead went on after it; the draft reads meanwhile, if it is to."""
        max_depth = min(self._request.limit - commit.base_length, self._drafter.reach(session))
        breadth = self._request.policy.breadth
        if not self._request.ahead or not breadth or max_depth < 1:
            return await stream.verify(tree, commit), 0.0
        ahead = DraftingAhead(self._drafter, session, max_depth, breadth)
        reading = asyncio.ensure_future(self._read(ahead))
        reading.add_done_callback(_log_failure)  # the commit is good all the same
        try:
            answer = await stream.verify(tree, commit)
            answered = time.perf_counter()
        finally:
            ahead.stop()
            await asyncio.wait([reading])
        return answer, time.perf_counter() - answered

    async def _read(self, ahead: DraftingAhead) -> None:
        """Read for as long as there is something to read and nobody else wants the model."""
        while self._thread.idle and await self._thread.run(ahead.step):
            pass

    def _hand_on(self, commit: verify_pb2.Commit) -> draft_pb2.GenerateResponse:
        started = time.perf_counter()
        text, token_ids = self._text.push(list(commit.token_ids))
        if commit.next_round > 0:
            self._recorder.part("detokenize", time.perf_counter() - started)
        self._recorder.count(len(token_ids))
        return draft_pb2.GenerateResponse(text=text, token_ids=token_ids, log_probs=commit.log_probs[: len(token_ids)])

    def _trace(self, last: _Round, parameters: dict[str, float]) -> draft_pb2.RoundTrace:
        tree, commit = last.growth.tree, last.answer.commit
        tokenizer = self._drafter.engine.tokenizer

        def texts(token_ids: Iterable[int]) -> list[str]:
            return [str(tokenizer.decode([token])) for token in token_ids]

        return draft_pb2.RoundTrace(
            round=commit.next_round - 1,
            base_length=commit.base_length - len(commit.token_ids),
            token_ids=tree.token_ids,
            parents=tree.parents,
            probabilities=[math.exp(log_prob) for log_prob in tree.log_probs],
            texts=texts(tree.token_ids),
            accepted_nodes=commit.accepted_nodes,
            committed_ids=commit.token_ids,
            committed_texts=texts(commit.token_ids),
            parameters=parameters,
            draft_seconds=last.outcome().draft_seconds,
            verify_seconds=commit.timings.total_seconds,
        )

    def _last_message(self, commit: verify_pb2.Commit) -> draft_pb2.GenerateResponse:
        request = self._request
        text = self._text.flush()
        reason = tree_pb2.FINISH_REASON_STOP if self._text.stopped else commit.finish_reason
        completion = draft_pb2.Completion(
            finish_reason=reason,
            prompt_tokens=len(request.prompt_ids),
            statistics=self._recorder.to_pb(seed=0 if request.sampling.greedy else request.sampling.seed),
        )
        return draft_pb2.GenerateResponse(text=text, completion=completion)

    def _open_message(self) -> verify_pb2.OpenSession:
        request = self._request
        return verify_pb2.OpenSession(
            prompt_ids=request.prompt_ids,
            max_new_tokens=request.limit - len(request.prompt_ids) if request.bounded else None,
            ignore_eos=request.ignore_eos,
            sampling=request.sampling.to_pb(),
            draft=model_info_to_pb(self._drafter.engine.info),
            stop_token_ids=request.stop_token_ids,
            log_probs=request.log_probs,
        )


class TextStream:
    """Committed tokens to the text and the tokens that the client gets, up to the first stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self._stops.found

    def push(self, token_ids: list[int]) -> tuple[str, list[int]]:
        """The text that these tokens complete, and those of them that belong to the completion.

        The token that completes a stop string is the last that does; the text ends before the stop string.
        """
        if not self._stops.active:
            return self._detokenizer.push(token_ids), token_ids
        text = ""
        for count, token in enumerate(token_ids, start=1):
            text += self._stops.push(self._detokenizer.push([token]))
            if self._stops.found:
                return text, token_ids[:count]
        return text, token_ids

    def flush(self) -> str:
        """What was held back for a character or a stop string that did not come to be."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()


def _log_failure(reading: asyncio.Future[None]) -> None:
    if not reading.cancelled() and (error := reading.exception()):
        log.warning("reading ahead failed", exc_info=error)
