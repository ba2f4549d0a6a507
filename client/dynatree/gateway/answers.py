"""The gateway's answers as JSON objects of OpenAI's API; one class for completions, one for chats."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from dynatree.client import Chunk, Completion, FinishReason
from dynatree.gateway.encoding import Items, Json
from dynatree.gateway.token_texts import TokenTexts
from dynatree.gateway.tools import Call

# For each token, the likeliest tokens at its position as (id, log-probability), likeliest first.
TopLogProbs = Sequence[Sequence[tuple[int, float]]]
LOWEST_LOG_PROB = -9999.0  # stands for minus infinity, which JSON cannot express


class Reader(Protocol):
    """Parts the text of a choice as it arrives.

    Attributes:
        calls: Number of calls so far.
        reasoning: Reasoning that the last `push` or `end` has read.
    """

    calls: int
    reasoning: str

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text; return the next text of the content, and the calls that are complete."""

    def end(self) -> tuple[str, list[Call]]:
        """Return the rest of the content and of the calls."""


class Answer(Protocol):
    """Builds the JSON objects of one answer: the chunks of a stream, or the whole answer."""

    def begin(self) -> list[Json]:
        """Return the choices of a stream's first chunks."""

    def delta(self, index: int, text: str, log_probs: Json | None = None, reason: FinishReason | None = None) -> Json:
        """Return the choice of a stream's chunk."""

    def choice(self, index: int, text: str, log_probs: Json | None, reason: FinishReason) -> Json:
        """Return the choice of a whole answer."""

    def log_probs(
        self, token_ids: Sequence[int], log_probs: Sequence[float | None], top: TopLogProbs, offsets: Sequence[int]
    ) -> Json:
        """Return the log-probabilities of the next tokens of a choice, and the offset of each in its text."""

    def chunk(self, choices: list[Json]) -> Json:
        """Return a stream's chunk."""

    def whole(self, choices: list[Json], usage: Json) -> Json:
        """Return the whole answer."""


class _Named:
    """The id, model and time of an answer, which all its objects share."""

    prefix: str
    chunk_object: str
    object: str

    def __init__(self, model: str, texts: TokenTexts | None) -> None:
        self._fields = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._token_texts = texts

    @property
    def _texts(self) -> TokenTexts:
        if self._token_texts is None:
            raise ValueError("an answer without log-probabilities was made without the tokens' texts")
        return self._token_texts

    def chunk(self, choices: list[Json]) -> Json:
        """Return a stream's chunk."""
        return {**self._fields, "object": self.chunk_object, "choices": choices}

    def whole(self, choices: list[Json], usage: Json) -> Json:
        """Return the whole answer."""
        return {**self._fields, "object": self.object, "choices": choices, "usage": usage}


class TextAnswer(_Named):
    """The answer to `POST /v1/completions`."""

    prefix = "cmpl"
    chunk_object = object = "text_completion"

    def begin(self) -> list[Json]:
        """Return no choices: a completion's stream begins with its text."""
        return []

    def delta(self, index: int, text: str, log_probs: Json | None = None, reason: FinishReason | None = None) -> Json:
        """Return the choice of a stream's chunk."""
        return {"index": index, "text": text, "logprobs": log_probs, "finish_reason": reason}

    def choice(self, index: int, text: str, log_probs: Json | None, reason: FinishReason) -> Json:
        """Return the choice of a whole answer."""
        return self.delta(index, text, log_probs, reason)

    def log_probs(
        self, token_ids: Sequence[int], log_probs: Sequence[float | None], top: TopLogProbs, offsets: Sequence[int]
    ) -> Json:
        """Return the log-probabilities of the next tokens; each chosen token is also among its likeliest tokens."""

        def likeliest(place: int) -> dict[str, float] | None:
            log_prob = log_probs[place]
            if log_prob is None:  # the prompt's first token, which has no context
                return None
            named: dict[str, float] = {}
            for each, value in (*(top[place] if top else ()), (token_ids[place], log_prob)):
                named.setdefault(self._texts.name(each), _finite(value))  # the likeliest of tokens with equal texts
            return named

        count = len(token_ids)
        return {
            "tokens": Items(count, lambda some: [self._texts.name(token_id) for token_id in token_ids[some]]),
            "token_logprobs": Items(
                count, lambda some: [None if each is None else _finite(each) for each in log_probs[some]]
            ),
            "top_logprobs": Items(count, lambda some: [likeliest(place) for place in range(*some.indices(count))]),
            "text_offset": Items(len(offsets), lambda some: list(offsets[some])),
        }


class ChatAnswer(_Named):
    """The answer to `POST /v1/chat/completions`; `choices` is the number of choices.

    `reader` makes a reader of a choice's text, which finds its calls and its reasoning; None means that all of the text
    is content.
    """

    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    object = "chat.completion"

    def __init__(
        self,
        model: str,
        texts: TokenTexts | None,
        choices: int,
        reader: Callable[[], Reader] | None = None,
    ) -> None:
        super().__init__(model, texts)
        self._choices = choices
        self._reader = reader
        self._readers: dict[int, Reader] = {}  # by choice, of a stream

    def begin(self) -> list[Json]:
        """Return one choice with the assistant's role for each completion."""
        return [self._delta(index, {"role": "assistant", "content": ""}) for index in range(self._choices)]

    def delta(self, index: int, text: str, log_probs: Json | None = None, reason: FinishReason | None = None) -> Json:
        """Return the choice of a stream's chunk."""
        if self._reader is None:
            return self._delta(index, {"content": text} if text or reason is None else {}, log_probs, reason)
        reader = self._readers.get(index) or self._readers.setdefault(index, self._reader())
        before = reader.calls
        text, calls = reader.push(text) if reason is None else reader.end()
        delta: Json = {"content": text} if text else {}
        if reader.reasoning:
            delta["reasoning_content"] = reader.reasoning
        if calls:
            delta["tool_calls"] = [{"index": before + place, **each.json} for place, each in enumerate(calls)]
        return self._delta(index, delta, log_probs, reason_with_calls(reason, reader.calls))

    def _delta(self, index: int, delta: Json, log_probs: Json | None = None, reason: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": reason}

    def choice(self, index: int, text: str, log_probs: Json | None, reason: FinishReason) -> Json:
        """Return the choice of a whole answer."""
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._reader is not None:
            reader = self._reader()
            parts = [(*read(), reader.reasoning) for read in (partial(reader.push, text), reader.end)]
            message["content"] = "".join(content for content, _, _ in parts)
            if reasoning := "".join(reasoning for _, _, reasoning in parts):
                message["reasoning_content"] = reasoning
            if reader.calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = [call.json for _, calls, _ in parts for call in calls]
                told = reason_with_calls(reason, reader.calls)
                return {"index": index, "message": message, "logprobs": log_probs, "finish_reason": told}
        return {"index": index, "message": message, "logprobs": log_probs, "finish_reason": reason}

    def log_probs(
        self, token_ids: Sequence[int], log_probs: Sequence[float | None], top: TopLogProbs, offsets: Sequence[int]
    ) -> Json:
        """Return the log-probabilities of the next tokens of a choice; OpenAI's chat format has no text offsets."""

        def tokens(some: slice) -> list[Json]:
            likeliest = top[some] if top else ((),) * len(token_ids[some])
            return [
                {**self._token(token_id, log_prob), "top_logprobs": [self._token(*each) for each in named]}
                for token_id, log_prob, named in zip(token_ids[some], log_probs[some], likeliest, strict=True)
            ]

        return {"content": Items(len(token_ids), tokens), "refusal": None}

    def _token(self, token_id: int, log_prob: float | None) -> Json:
        token = self._texts.bytes(token_id)
        value = LOWEST_LOG_PROB if log_prob is None else _finite(log_prob)
        return {"token": token.decode(errors="replace"), "logprob": value, "bytes": list(token)}


def reason_with_calls(reason: str | None, calls: int) -> str | None:
    """Return the finish reason of a choice that has `calls` calls of functions."""
    return "tool_calls" if calls and reason == "stop" else reason


def _finite(log_prob: float) -> float:
    return max(log_prob, LOWEST_LOG_PROB)


def tokens_used(prompt_tokens: int, new_tokens: int) -> Json:
    """Return the token counts of a usage, which are known at any time."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


def usage_of(
    completions: Sequence[Completion], seconds: float, *, scores_only: bool = False, cached_tokens: bool = False
) -> Json:
    """Return the usage of completions and their alternatives; each prompt's tokens count once.

    Args:
        completions: The first completion of each prompt.
        seconds: Time from the request to the last token of all completions.
        scores_only: Whether the answer leaves out the new tokens.
        cached_tokens: Whether to include the number of cached prompt tokens.
    """
    every = [each for first in completions for each in (first, *first.alternatives)]
    stats = [each.stats for each in every]
    prompt_tokens = sum(each.prompt_tokens for each in completions)
    new_tokens = 0 if scores_only else sum(len(each.token_ids) for each in every)
    rounds, drafted = sum(each.rounds for each in stats), sum(each.draft_n for each in stats)
    accepted = sum(each.draft_n_accepted for each in stats)
    committed = sum(each.tokens_per_round * each.rounds for each in stats)
    cached = sum(each.stats.cached_tokens for each in completions)
    return {
        **tokens_used(prompt_tokens, new_tokens),
        **({"prompt_tokens_details": {"cached_tokens": cached}} if cached_tokens else {}),
        "speculative_decoding": {
            "mean_acceptance_length": committed / rounds if rounds else 0.0,
            "acceptance_rate": accepted / drafted if drafted else 0.0,
            "rounds": rounds,
            "draft_n": drafted,
            "draft_n_accepted": accepted,
            "time_to_first_token_seconds": min(each.time_to_first_token_seconds for each in stats),
            "total_seconds": seconds,
            "queue_seconds": max(each.queue_seconds for each in stats),
            "resumes": sum(each.resumes for each in stats),
            "seed": stats[0].seed,
        },
    }


def trace_of(chunk: Chunk) -> Json | None:
    """Return the round that a chunk reports, in the form of a line of `dynatree generate --trace`; None without one."""
    return None if chunk.trace is None else {"index": chunk.index, **chunk.trace.to_dict()}
