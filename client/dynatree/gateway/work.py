"""One request's work: its prompts as streams of the client library, and what is answered while they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from dynatree.client import AsyncCompletionStream, Chunk, Completion
from dynatree.gateway.answers import Answer, Json, TopLogProbs, tokens_used, trace_of, usage_of

AT_ONCE = 8  # prompts of one request


@dataclass(frozen=True)
class Wanted:
    """What of the streams a request asks to be told.

    Attributes:
        completions: Of each prompt.
        log_probs: The tokens' log-probabilities.
        token_ids: The tokens.
        trace: The rounds; then a stream tells of tokens whose text is still to come, too.
        echo: The prompts, with their log-probabilities where those are wanted.
        scores_only: Nothing but the prompts.
        usage: A stream's last chunk with what it cost; the others have null.
        running_usage: In each of a stream's chunks, how many tokens there were so far.
    """

    completions: int = 1
    log_probs: bool = False
    token_ids: bool = False
    trace: bool = False
    echo: bool = False
    scores_only: bool = False
    usage: bool = False
    running_usage: bool = False


class Work:
    """The streams of a request's prompts, told as an answer. Choice `p * n + i` is completion i of prompt p.

    Args:
        streams: One for each prompt, not begun.
        answer: In whose words.
        wanted: What is told.
    """

    def __init__(self, streams: Sequence[AsyncCompletionStream], answer: Answer, wanted: Wanted) -> None:
        self._streams = streams
        self._answer = answer
        self._wanted = wanted
        self._began = time.perf_counter()
        self._new_tokens = 0  # that came

    async def whole(self) -> Json:
        """The whole answer, when everything has come.

        Raises:
            DynaTreeError: A completion failed.
        """
        async with aclosing(self._chunks()) as chunks:
            async for _ in chunks:
                pass
        choices = [
            self._choice(place, completion)
            for place, stream in enumerate(self._streams)
            for completion in (stream.completion, *stream.completion.alternatives)
        ]
        return self._answer.whole(choices, self._usage())

    async def events(self) -> AsyncGenerator[Json]:
        """The chunks of a stream.

        Raises:
            DynaTreeError: A completion failed; what came before it was told.
        """
        begun: set[int] = set()
        async with aclosing(self._chunks()) as chunks:
            async for place, chunk in chunks:
                self._new_tokens += len(chunk.token_ids)
                if not begun:  # not before something came: until then a failure is a status of its own
                    for choice in self._answer.begin():
                        yield self._chunk([choice])
                index = place * self._wanted.completions + chunk.index
                if index not in begun and self._wanted.echo:
                    yield self._chunk([self._echo(index, place)])
                begun.add(index)
                if (delta := self._delta(index, place, chunk)) is not None:
                    yield self._chunk([delta])
        for place, stream in enumerate(self._streams):
            for completion in (stream.completion, *stream.completion.alternatives):
                index = place * self._wanted.completions + completion.index
                yield self._chunk([self._answer.delta(index, "", None, completion.finish_reason)])
        if self._wanted.usage:
            yield {**self._answer.chunk([]), "usage": self._usage()}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._answer.chunk(choices)
        return {**chunk, "usage": self._running_usage()} if self._wanted.usage else chunk

    def _running_usage(self) -> Json | None:
        if not self._wanted.running_usage:
            return None
        prompt_tokens = sum(len(stream.prompt_ids) for stream in self._streams)
        return tokens_used(prompt_tokens, 0 if self._wanted.scores_only else self._new_tokens)

    def _usage(self) -> Json:
        completions = [stream.completion for stream in self._streams]
        return usage_of(completions, time.perf_counter() - self._began, scores_only=self._wanted.scores_only)

    # A stream's chunks

    def _echo(self, index: int, place: int) -> Json:
        """The prompt as the first text of a choice."""
        stream = self._streams[place]
        top = ((), *stream.prompt_top_log_probs) if stream.prompt_top_log_probs else ()
        log_probs = self._log_probs(
            stream.prompt_ids, (None, *stream.prompt_log_probs), top, stream.prompt_text_offsets
        )
        return self._with_ids(self._answer.delta(index, stream.prompt_text, log_probs), stream.prompt_ids)

    def _delta(self, index: int, place: int, chunk: Chunk) -> Json | None:
        """What a chunk adds to its choice; None where nothing of it is wanted."""
        if self._wanted.scores_only:
            return None
        offsets = self._offsets(place, chunk.text_offsets)
        log_probs = self._log_probs(chunk.token_ids, chunk.log_probs, chunk.top_log_probs, offsets)
        trace = trace_of(chunk)
        tokens = self._wanted.log_probs or self._wanted.token_ids or self._wanted.trace
        if not (chunk.text or trace or (chunk.token_ids and tokens)):
            return None
        choice = self._with_ids(self._answer.delta(index, chunk.text, log_probs), chunk.token_ids)
        return choice if trace is None else {**choice, "trace": trace}

    # A whole choice

    def _choice(self, place: int, completion: Completion) -> Json:
        wanted, index = self._wanted, place * self._wanted.completions + completion.index
        text, token_ids = completion.text, completion.token_ids
        log_probs: Sequence[float | None] = completion.log_probs
        top: TopLogProbs = completion.top_log_probs
        offsets = self._offsets(place, completion.text_offsets)
        if wanted.scores_only:
            text, token_ids, log_probs, top, offsets = "", (), (), (), ()
        if wanted.echo:
            stream = self._streams[place]
            text = stream.prompt_text + text
            token_ids = (*stream.prompt_ids, *token_ids)
            log_probs = (None, *stream.prompt_log_probs, *log_probs)
            top = ((), *stream.prompt_top_log_probs, *top) if top or stream.prompt_top_log_probs else ()
            offsets = (*stream.prompt_text_offsets, *offsets)
        told = self._log_probs(token_ids, log_probs, top, offsets)
        choice = self._answer.choice(index, text, told, completion.finish_reason)
        choice = self._with_ids(choice, token_ids)
        if wanted.token_ids and completion.index == 0:
            choice["prompt_token_ids"] = list(completion.prompt_ids)
        return choice

    # Pieces of both

    def _offsets(self, place: int, offsets: Sequence[int]) -> tuple[int, ...]:
        """Where tokens of a completion begin in the text of its choice, which an echoed prompt begins."""
        begin = len(self._streams[place].prompt_text)
        return tuple(begin + offset for offset in offsets)

    def _log_probs(
        self, token_ids: Sequence[int], log_probs: Sequence[float | None], top: TopLogProbs, offsets: Sequence[int]
    ) -> Json | None:
        return self._answer.log_probs(token_ids, log_probs, top, offsets) if self._wanted.log_probs else None

    def _with_ids(self, choice: Json, token_ids: Sequence[int]) -> Json:
        return {**choice, "token_ids": list(token_ids)} if self._wanted.token_ids else choice

    # All prompts at once

    async def _chunks(self) -> AsyncGenerator[tuple[int, Chunk]]:
        """The chunks of every stream as they come, each with its prompt's place."""
        if len(self._streams) == 1:
            async with self._streams[0] as stream:
                async for chunk in stream:
                    yield 0, chunk
            return
        queue: asyncio.Queue[tuple[int, Chunk] | Exception | None] = asyncio.Queue(AT_ONCE)
        turns = asyncio.Semaphore(AT_ONCE)

        async def read(place: int, stream: AsyncCompletionStream) -> None:
            try:
                async with turns, stream:
                    async for chunk in stream:
                        await queue.put((place, chunk))
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        tasks = [asyncio.ensure_future(read(place, stream)) for place, stream in enumerate(self._streams)]
        try:
            left = len(tasks)
            while left:
                match await queue.get():
                    case None:
                        left -= 1
                    case Exception() as error:
                        raise error
                    case (place, chunk):
                        yield place, chunk
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
