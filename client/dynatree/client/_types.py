"""The results of calls, as frozen dataclasses without protobuf types."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

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


# For each token, the likeliest tokens at its position, likeliest first, as (token_id, log_prob).
TopLogProbs = tuple[tuple[tuple[int, float], ...], ...]


def top_log_probs_from_pb(message: tree_pb2.TopLogProbs, places: int) -> TopLogProbs:
    """Split a message into the likeliest tokens at each of `places` positions."""
    count = len(message.token_ids) // places if places else 0  # at each position
    named = tuple(zip(message.token_ids, message.log_probs, strict=False))
    return tuple(named[place * count : (place + 1) * count] for place in range(places)) if count else ()


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompt's tokens, and on request their log-probabilities and text.

    Attributes:
        token_ids: all tokens of the prompt.
        log_probs: the log-probability of each token but the first, on request.
        top_log_probs: the likeliest tokens at the position of each token but the first, on request.
        text: the prompt's text, on request.
        text_offsets: the offset of each token in `text`, in characters, on request.
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    top_log_probs: TopLogProbs = ()
    text: str = ""
    text_offsets: tuple[int, ...] = ()


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
class RoundPart:
    """The time that the rounds spent in one part of their work.

    Attributes:
        total_seconds: the sum over all rounds.
        p50_seconds: the median over the rounds.
    """

    total_seconds: float
    p50_seconds: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of a completion.

    A round is one tree and one forward pass of the target; the prefill of the prompt is not a round.

    Attributes:
        generated_tokens: the number of new tokens in the completion.
        rounds: the number of rounds.
        draft_n: the nodes drafted over all rounds.
        draft_n_accepted: the nodes accepted over all rounds.
        acceptance_rate: draft_n_accepted / draft_n, in [0, 1]; 0 if nothing was drafted.
        tokens_per_round: the tokens committed by rounds, divided by rounds.
        mean_path_length: draft_n_accepted / rounds.
        nodes_per_round: draft_n / rounds.
        acceptance_by_depth: entry d - 1 is the share of the rounds whose accepted path reached depth d, among the
            rounds whose tree reached it.
        time_to_first_token_seconds: the time from the request's arrival at the server to the first token.
        time_per_output_token_seconds: the mean time between two tokens after the first; 0 for a single token.
        total_seconds: the time from the request's arrival at the server to the last token.
        round_parts: the rounds' time by part: "draft_forward", "grow", "verify_forward", "accept", "commit", "wire",
            "detokenize".
        seed: the seed of sampling; 0 for greedy decoding.
        committed_per_level: the tokens committed by rounds, divided by the levels drafted; may exceed 1, and is 0 if
            nothing was drafted.
        draft_seconds: the time of all rounds spent on growing and committing in the draft service. A forward pass of
            the draft model that several sessions share counts in part for each.
        wire_seconds: the time of all rounds spent on the stream between the services.
        verify_seconds: the time of all rounds spent in the verify service.
        queue_seconds: the time that the request waited in the queue.
        sessions_per_pass: the mean number of sessions in the target's passes that verified this completion's trees,
            including its own.
        rows_per_pass: the mean number of rows (tokens of all sessions) in those passes.
        trimmed_n: the nodes drafted but not verified, over all rounds.
        cached_tokens: the tokens of the prompt that the target had cached.
        kv_cache_usage: the highest share of the target's KV slots that all sessions together held during the
            completion.
        resumes: the number of times that the completion resumed after the loss of a service. After the loss of a draft
            service, `generated_tokens` covers the whole completion, and all values above except it are those of the
            service that finished it.
        resume_seconds: the sum of the times from each loss to the next token.
    """

    generated_tokens: int
    rounds: int
    draft_n: int
    draft_n_accepted: int
    acceptance_rate: float
    tokens_per_round: float
    mean_path_length: float
    nodes_per_round: float
    acceptance_by_depth: tuple[float, ...]
    time_to_first_token_seconds: float
    time_per_output_token_seconds: float
    total_seconds: float
    round_parts: dict[str, RoundPart]
    seed: int
    committed_per_level: float
    draft_seconds: float
    wire_seconds: float
    verify_seconds: float
    queue_seconds: float = 0.0
    sessions_per_pass: float = 1.0
    rows_per_pass: float = 0.0
    trimmed_n: int = 0
    cached_tokens: int = 0
    kv_cache_usage: float = 0.0
    resumes: int = 0
    resume_seconds: float = 0.0

    @classmethod
    def from_pb(cls, statistics: draft_pb2.GenerationStatistics) -> Self:
        """Convert the statistics in the last message of a stream."""
        return cls(
            generated_tokens=statistics.generated_tokens,
            rounds=statistics.rounds,
            draft_n=statistics.draft_n,
            draft_n_accepted=statistics.draft_n_accepted,
            acceptance_rate=statistics.acceptance_rate,
            tokens_per_round=statistics.tokens_per_round,
            mean_path_length=statistics.mean_path_length,
            nodes_per_round=statistics.nodes_per_round,
            acceptance_by_depth=tuple(statistics.acceptance_by_depth),
            time_to_first_token_seconds=statistics.time_to_first_token_seconds,
            time_per_output_token_seconds=statistics.time_per_output_token_seconds,
            total_seconds=statistics.total_seconds,
            round_parts={
                part.name: RoundPart(total_seconds=part.total_seconds, p50_seconds=part.p50_seconds)
                for part in statistics.round_parts
            },
            seed=statistics.seed,
            committed_per_level=statistics.committed_per_level,
            draft_seconds=statistics.draft_seconds,
            wire_seconds=statistics.wire_seconds,
            verify_seconds=statistics.verify_seconds,
            queue_seconds=statistics.queue_seconds,
            sessions_per_pass=statistics.sessions_per_pass,
            rows_per_pass=statistics.rows_per_pass,
            trimmed_n=statistics.trimmed_n,
            cached_tokens=statistics.cached_tokens,
            kv_cache_usage=statistics.kv_cache_usage,
            resumes=statistics.resumes,
            resume_seconds=statistics.resume_seconds,
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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as its service runs it.

    Attributes:
        name: the hub name, or the last component of the local path.
        architecture: the transformers architecture, for example "GPTNeoXForCausalLM".
        parameters: the number of parameters.
        vocab_size: the rows of the embedding; may be padded beyond the tokenizer's vocabulary.
        context_length: the longest sequence of prompt and new tokens together, in tokens.
        dtype: the number format of the weights, for example "float32".
        device: the torch device, for example "cpu".
        tokenizer_fingerprint: the SHA-256 hash of the tokenizer; two models can work together if it is equal.
        version: the version of DynaTree that runs the model.
        step_bytes: the bytes of weights that a forward pass over one token reads.
        streamed_bytes: the part of `step_bytes` that every forward pass reads from the disk; 0 if all weights are in
            memory.
    """

    name: str
    architecture: str
    parameters: int
    vocab_size: int
    context_length: int
    dtype: str
    device: str
    tokenizer_fingerprint: str
    version: str
    step_bytes: int
    streamed_bytes: int

    @classmethod
    def from_pb(cls, info: tree_pb2.ModelInfo) -> Self:
        """Convert a service's description of its model."""
        return cls(
            name=info.name,
            architecture=info.architecture,
            parameters=info.parameters,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            dtype=info.dtype,
            device=info.device,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            version=info.version,
            step_bytes=info.step_bytes,
            streamed_bytes=info.streamed_bytes,
        )


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """The models and policies of a draft service.

    Attributes:
        draft: the small model, which drafts the trees.
        target: the large model, whose output every completion is.
        policies: the names that a request's `policy` may have; the first is the default.
        chat_template: whether the tokenizer has a chat template, so that prompts may be chats.
    """

    draft: ModelInfo
    target: ModelInfo
    policies: tuple[str, ...]
    chat_template: bool

    @classmethod
    def from_pb(cls, response: draft_pb2.DraftServiceGetModelInfoResponse) -> Self:
        """Convert a service's description of itself."""
        return cls(
            draft=ModelInfo.from_pb(response.draft),
            target=ModelInfo.from_pb(response.target),
            policies=tuple(response.policies),
            chat_template=response.chat_template,
        )


@dataclass(frozen=True)
class Tokens:
    """The tokens of a prompt.

    Attributes:
        token_ids: the ids of the tokens.
        token_strings: on request, the tokens' spellings in the tokenizer's vocabulary.
    """

    token_ids: tuple[int, ...]
    token_strings: tuple[str, ...] = ()

    @classmethod
    def from_pb(cls, message: draft_pb2.TokenizeResponse) -> Self:
        """Convert the service's answer."""
        return cls(tuple(message.token_ids), tuple(message.token_strings))
