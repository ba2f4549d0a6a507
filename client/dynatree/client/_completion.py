"""Completions, the chunks they arrive in, and their traced rounds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from dynatree.client._statistics import Statistics
from dynatree.client._tokens import PromptTokens, TopLogProbs, top_log_probs_from_pb
from dynatree.v1 import draft_pb2, tree_pb2

FinishReason = Literal["stop", "length", "cancelled"]
FINISH_REASONS: dict[int, FinishReason] = {
    tree_pb2.FINISH_REASON_STOP: "stop",
    tree_pb2.FINISH_REASON_LENGTH: "length",
    tree_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round: the drafted tree, the accepted path, and the policy's parameters afterwards.

    Attributes:
        round: the round's number; the first is 0.
        base_length: the number of committed tokens before the round, including the prompt.
        token_ids: the token of each node of the tree, every parent before its children.
        parents: the index of each node's parent, -1 for a child of the root.
        probabilities: the draft's probability of each node given its parent.
        texts: the text of each node's token; it may be a part of a character.
        accepted_nodes: the indices of the accepted nodes, from the root down.
        committed_ids: the tokens of the accepted nodes, then the token that the target chose itself, which is missing
            if the completion ended before it.
        committed_texts: the text of each of `committed_ids`.
        parameters: the policy's adaptive parameters after the round, by name.
        draft_seconds: the time of the round in the draft service.
        verify_seconds: the time of the round in the verify service.
    """

    round: int
    base_length: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    probabilities: tuple[float, ...]
    texts: tuple[str, ...]
    accepted_nodes: tuple[int, ...]
    committed_ids: tuple[int, ...]
    committed_texts: tuple[str, ...]
    parameters: dict[str, float]
    draft_seconds: float
    verify_seconds: float

    @classmethod
    def from_pb(cls, trace: draft_pb2.RoundTrace) -> Self:
        """Convert the trace in one message of the stream."""
        return cls(
            round=trace.round,
            base_length=trace.base_length,
            token_ids=tuple(trace.token_ids),
            parents=tuple(trace.parents),
            probabilities=tuple(trace.probabilities),
            texts=tuple(trace.texts),
            accepted_nodes=tuple(trace.accepted_nodes),
            committed_ids=tuple(trace.committed_ids),
            committed_texts=tuple(trace.committed_texts),
            parameters=dict(sorted(trace.parameters.items())),  # protobuf maps are unordered
            draft_seconds=trace.draft_seconds,
            verify_seconds=trace.verify_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the round as a dictionary of lists, strings and numbers that JSON can hold."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of a stream: the part that it adds to a completion, or the request's position in the queue.

    Attributes:
        text: the new text, in whole characters; the text of `token_ids` may follow in a later chunk.
        token_ids: the tokens committed since the last chunk.
        index: the index of the completion that the chunk belongs to, 0 to n - 1.
        log_probs: the log-probability of each of `token_ids`; empty unless `log_probs` was requested.
        trace: the round that committed the tokens; None unless `trace` was requested.
        queue_position: the number of requests ahead of this one while it waits; None once the request has begun, and
            unless `queue_position` was requested.
        top_log_probs: for each of `token_ids`, the likeliest tokens at its position, likeliest first, as (token_id,
            log_prob); empty unless `top_log_probs` was requested.
        text_offsets: the offset of each of `token_ids` in the completion's text, in characters; empty unless
            `log_probs` was requested.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    log_probs: tuple[float, ...] = ()
    trace: RoundTrace | None = None
    queue_position: int | None = None
    top_log_probs: tuple[tuple[tuple[int, float], ...], ...] = ()
    text_offsets: tuple[int, ...] = ()

    @classmethod
    def from_pb(cls, response: draft_pb2.GenerateResponse) -> Self:
        """Convert one message of the stream."""
        return cls(
            text=response.text,
            token_ids=tuple(response.token_ids),
            index=response.index,
            log_probs=tuple(response.log_probs),
            trace=RoundTrace.from_pb(response.trace) if response.HasField("trace") else None,
            queue_position=response.queue_position if response.HasField("queue_position") else None,
            top_log_probs=top_log_probs_from_pb(response.top_log_probs, len(response.token_ids)),
            text_offsets=tuple(response.text_offsets),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole completion.

    Attributes:
        text: the new text, without the prompt, and without the stop string that ended it.
        token_ids: the new tokens, without the prompt.
        finish_reason: "stop" if an end-of-sequence token, a stop token or a stop string ended the completion; "length"
            if `max_new_tokens` or the context limit did; "cancelled" if it was cancelled.
        prompt_tokens: the number of tokens of the prompt.
        stats: the completion's statistics.
        index: the completion's index among those of the request, 0 to n - 1.
        log_probs: the natural log-probability of each of `token_ids` under the target's unmodified softmax, before
            temperature and all other options; empty unless `log_probs` was requested.
        trace: the completion's rounds; empty unless `trace` was requested.
        alternatives: if n > 1, the other completions, in order. They have no alternatives themselves, and of the
            `prompt_...` attributes only `prompt_ids` and `prompt_tokens`.
        top_log_probs: for each of `token_ids`, the likeliest tokens at its position, likeliest first, as (token_id,
            log_prob), under the same softmax; empty unless `top_log_probs` was requested.
        prompt_ids: the prompt's tokens.
        prompt_log_probs: the log-probability of each of `prompt_ids` from the second on, under the same softmax; empty
            unless `prompt_log_probs` was requested.
        prompt_top_log_probs: for each of `prompt_ids` from the second on, the likeliest tokens at its position; empty
            unless `prompt_log_probs` and `top_log_probs` were requested.
        text_offsets: the offset of each of `token_ids` in `text`, in characters; empty unless `log_probs` was
            requested. A token that continues a character has the offset of that character, and a token without text
            the offset of the next token.
        prompt_text: the prompt's text as it was sent, or decoded from its token ids or its chat, including special
            tokens; empty unless `prompt_text` was requested.
        prompt_text_offsets: the offset of each of `prompt_ids` in `prompt_text`, by the rules of `text_offsets`; empty
            unless `prompt_text` was requested.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    stats: Statistics
    index: int = 0
    log_probs: tuple[float, ...] = ()
    trace: tuple[RoundTrace, ...] = ()
    alternatives: "tuple[Completion, ...]" = ()
    top_log_probs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_ids: tuple[int, ...] = ()
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top_log_probs: tuple[tuple[tuple[int, float], ...], ...] = ()
    text_offsets: tuple[int, ...] = ()
    prompt_text: str = ""
    prompt_text_offsets: tuple[int, ...] = ()

    @classmethod
    def from_pb(
        cls, completion: draft_pb2.Completion, *, index: int, chunks: Sequence[Chunk], prompt: PromptTokens
    ) -> Self:
        """Assemble a completion from its chunks and its last message.

        Raises:
            KeyError: this client does not know the finish reason.
        """
        return cls(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            finish_reason=FINISH_REASONS[completion.finish_reason],
            prompt_tokens=completion.prompt_tokens,
            stats=Statistics.from_pb(completion.statistics),
            index=index,
            log_probs=tuple(log_prob for chunk in chunks for log_prob in chunk.log_probs),
            trace=tuple(chunk.trace for chunk in chunks if chunk.trace),
            top_log_probs=tuple(likeliest for chunk in chunks for likeliest in chunk.top_log_probs),
            prompt_ids=prompt.token_ids,
            prompt_log_probs=prompt.log_probs,
            prompt_top_log_probs=prompt.top_log_probs,
            text_offsets=tuple(offset for chunk in chunks for offset in chunk.text_offsets),
            prompt_text=prompt.text,
            prompt_text_offsets=prompt.text_offsets,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `dynatree generate --json` prints, made of lists, dictionaries, strings and numbers.

        "log_probs", "top_log_probs", "prompt_log_probs" with "prompt_ids", "prompt_top_log_probs" and "alternatives"
        are present if they were requested; the trace is left out. A prompt of one token has no log-probabilities.
        """
        completion = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "stats": asdict(self.stats) | {"acceptance_by_depth": list(self.stats.acceptance_by_depth)},
        }
        if self.log_probs:
            completion["log_probs"] = list(self.log_probs)
        if self.top_log_probs:
            completion["top_log_probs"] = _lists(self.top_log_probs)
        if self.prompt_log_probs:
            completion["prompt_ids"] = list(self.prompt_ids)
            completion["prompt_log_probs"] = list(self.prompt_log_probs)
        if self.prompt_top_log_probs:
            completion["prompt_top_log_probs"] = _lists(self.prompt_top_log_probs)
        if self.alternatives:
            completion["alternatives"] = [each.to_dict() for each in self.alternatives]
        return completion


def _lists(top: TopLogProbs) -> list[list[list[float]]]:
    return [[list(each) for each in likeliest] for likeliest in top]
