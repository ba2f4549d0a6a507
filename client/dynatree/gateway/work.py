"""The work of one request: it reads the completion streams of the prompts, and encodes the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from dynatree.client import AsyncCompletionStream, Chunk, Completion, FinishReason
from dynatree.gateway.answers import Answer, TopLogProbs, tokens_used, trace_of, usage_of
from dynatree.gateway.encoding import LONG_BYTES, Json, aside, encode, encoded
from dynatree.gateway.memory import size_of, size_of_prompt

AT_ONCE = 8  # prompts of one request that are in work concurrently


@dataclass(frozen=True)
class Wanted:
    """The parts of an answer that a request asks for.

    Attributes:
        completions: Number of completions of each prompt.
        log_probs: Include the tokens' log-probabilities.
        token_ids: Include the token ids.
        trace: Include the rounds; a stream then also has chunks for tokens whose text follows later.
        echo: Begin each choice with its prompt, and with the prompt's log-probabilities if those are included.
        scores_only: Leave out the new tokens: the answer is about the prompts alone.
        usage: End a stream with a chunk that has the usage; the other chunks then have a null usage.
        running_usage: Include the token counts so far in each chunk of a stream.
        cached_tokens: Include in the usage how many prompt tokens were cached. False where callers are not
            authenticated, since the count reveals what another caller has asked.
    """

    completions: int = 1
    log_probs: bool = False
    token_ids: bool = False
    trace: bool = False
    echo: bool = False
    scores_only: bool = False
    usage: bool = False
    running_usage: bool = False
    cached_tokens: bool = False


class Work:
    """The answer to a request, made from its completion streams. Choice `p * n + i` is completion i of prompt p.

    Args:
        streams: One stream for each prompt, not yet read.
        answer: Builder of the answer's JSON objects.
        wanted: Parts of the answer to include.
        hold: Called with the number of bytes whenever the answer takes more memory.
    """

    def __init__(
        self,
        streams: Sequence[AsyncCompletionStream],
        answer: Answer,
        wanted: Wanted,
        hold: Callable[[int], object],
    ) -> None:
        self._streams = streams
        self._answer = answer
        self._wanted = wanted
        self._hold = hold
        self._held = 0
        self._begun: set[int] = set()  # indices of the prompts whose streams have delivered a chunk
        self._opened: set[int] = set()  # indices of the choices of which a stream has told a chunk
        self._echoed: dict[int, dict[str, list[str]]] = {}  # prompt index -> log-probabilities as JSON
        self._began = time.perf_counter()
        self._new_tokens = 0  # received so far

    async def whole(self) -> list[bytes]:
        """Read all streams to their end, and return the whole answer as pieces of JSON.

        Raises:
            DynaTreeError: A completion failed.
        """
        async with aclosing(self._held_chunks()) as chunks:
            async for _ in chunks:
                pass
        return await aside(self._encoded) if self._held > LONG_BYTES else self._encoded()

    def _encoded(self) -> list[bytes]:
        return encoded(self._answer.whole([], self._usage()), self._choices())

    def _choices(self) -> Iterator[Json]:
        for place, stream in enumerate(self._streams):
            for completion in (stream.completion, *stream.completion.alternatives):
                yield self._choice(place, completion)

    async def events(self) -> AsyncGenerator[str]:
        """Yield the chunks of a streamed answer, each as JSON.

        Raises:
            DynaTreeError: A completion failed; the chunks before the failure have been yielded.
        """
        async with aclosing(self._held_chunks()) as chunks:
            async for place, chunk in chunks:
                self._new_tokens += len(chunk.token_ids)
                if not self._opened:  # wait for the first chunk: a failure before it still sets the HTTP status
                    for choice in self._answer.begin():
                        yield await self._chunk(choice)
                index = place * self._wanted.completions + chunk.index
                if index not in self._opened and self._wanted.echo:
                    yield await self._first_chunk(index, partial(self._echo, index, place))
                if (delta := self._delta(index, place, chunk)) is not None:
                    yield await self._chunk(delta)
        for place, stream in enumerate(self._streams):
            for completion in (stream.completion, *stream.completion.alternatives):
                index = place * self._wanted.completions + completion.index
                yield await self._chunk(self._answer.delta(index, "", None, self._reason(completion)))
        if self._wanted.usage:
            yield encode({**self._answer.chunk([]), "usage": self._usage()})

    async def _chunk(self, choice: Json) -> str:
        index = choice["index"]
        if index not in self._opened:
            return await self._first_chunk(index, lambda: choice)
        return encode(self._around(choice))

    async def _first_chunk(self, index: int, make: Callable[[], Json]) -> str:
        """Make and encode a choice's first chunk, which may have the prompt: aside if that is long."""
        self._opened.add(index)

        def made() -> str:
            choice = self._with_prompt_ids(make())
            return b"".join(encoded(self._around(choice), [choice])).decode()

        return await aside(made) if self._held > LONG_BYTES else made()

    def _around(self, choice: Json) -> Json:
        chunk = self._answer.chunk([choice])
        return {**chunk, "usage": self._running_usage()} if self._wanted.usage else chunk

    def _running_usage(self) -> Json | None:
        if not self._wanted.running_usage:
            return None
        prompt_tokens = sum(len(stream.prompt_ids) for stream in self._streams)
        return tokens_used(prompt_tokens, 0 if self._wanted.scores_only else self._new_tokens)

    def _usage(self) -> Json:
        completions = [stream.completion for stream in self._streams]
        return usage_of(
            completions,
            time.perf_counter() - self._began,
            scores_only=self._wanted.scores_only,
            cached_tokens=self._wanted.cached_tokens,
        )

    # A stream's chunks

    def _echo(self, index: int, place: int) -> Json:
        """Return the echoed prompt as a choice's first delta."""
        stream = self._streams[place]
        log_probs = self._behind_prompt(place, self._log_probs((), (), (), ()))
        return self._with_ids(self._answer.delta(index, stream.prompt_text, log_probs), stream.prompt_ids)

    def _behind_prompt(self, place: int, log_probs: Json | None) -> Json | None:
        """Prepend the prompt's log-probabilities to those of a choice; they are encoded once for all choices."""
        if log_probs is None:
            return None
        if place not in self._echoed:
            stream = self._streams[place]
            top = ((), *stream.prompt_top_log_probs) if stream.prompt_top_log_probs else ()
            values = (None, *stream.prompt_log_probs)
            made = self._answer.log_probs(stream.prompt_ids, values, top, stream.prompt_text_offsets)
            self._echoed[place] = {name: items.pieces() for name, items in made.items()}
        before = self._echoed[place]
        return {name: replace(items, before=before[name]) for name, items in log_probs.items()}

    def _delta(self, index: int, place: int, chunk: Chunk) -> Json | None:
        """Return the delta that a chunk adds to its choice; None if the request wants no part of it."""
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
        told = self._log_probs(token_ids, log_probs, top, offsets)
        if wanted.echo:
            stream = self._streams[place]
            text = stream.prompt_text + text
            token_ids = (*stream.prompt_ids, *token_ids)
            told = self._behind_prompt(place, told)
        choice = self._answer.choice(index, text, told, self._reason(completion))
        return self._with_prompt_ids(self._with_ids(choice, token_ids))

    # Shared by streams and whole choices

    def _offsets(self, place: int, offsets: Sequence[int]) -> tuple[int, ...]:
        """Shift a completion's token offsets by the length of the echoed prompt."""
        begin = len(self._streams[place].prompt_text)
        return tuple(begin + offset for offset in offsets)

    def _log_probs(
        self, token_ids: Sequence[int], log_probs: Sequence[float | None], top: TopLogProbs, offsets: Sequence[int]
    ) -> Json | None:
        return self._answer.log_probs(token_ids, log_probs, top, offsets) if self._wanted.log_probs else None

    def _with_ids(self, choice: Json, token_ids: Sequence[int]) -> Json:
        return {**choice, "token_ids": list(token_ids)} if self._wanted.token_ids else choice

    def _with_prompt_ids(self, choice: Json) -> Json:
        """Add the prompt's tokens to the first choice of a prompt."""
        place, number = divmod(choice["index"], self._wanted.completions)
        if number or not self._wanted.token_ids:
            return choice
        return {**choice, "prompt_token_ids": list(self._streams[place].prompt_ids)}

    def _reason(self, completion: Completion) -> FinishReason:
        """Return why a completion ended: one whose new tokens are left out has reached its length."""
        return "length" if self._wanted.scores_only else completion.finish_reason

    # The streams of all prompts

    async def _held_chunks(self) -> AsyncGenerator[tuple[int, Chunk]]:
        """Yield the chunks of all streams, and report the memory that they take."""
        async with aclosing(self._chunks()) as chunks:
            async for place, chunk in chunks:
                size = size_of(chunk)
                if place not in self._begun:
                    self._begun.add(place)
                    echoes = self._wanted.completions if self._wanted.echo else 0
                    size += size_of_prompt(self._streams[place], echoes)
                self._held += size
                self._hold(size)
                yield place, chunk

    async def _chunks(self) -> AsyncGenerator[tuple[int, Chunk]]:
        """Yield the chunks of all streams as they arrive, each with the index of its prompt."""
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
