"""What calls return: frozen values without protobuf in them."""

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
    """One round: what was drafted, what was accepted, and what the policy made of it.

    Attributes:
        round: its number; the first is 0.
        base_length: committed tokens before the round, prompt included.
        token_ids: the tree's nodes, every parent before its children.
        parents: the index of each node's parent, -1 for a child of the root.
        probabilities: the draft's probability of each node given its parent.
        texts: each node's own text; not always whole characters.
        accepted_nodes: the indices of the accepted nodes, from the root down.
        committed_ids: the accepted nodes' tokens, then, unless the end cut it short, the target's own choice.
        committed_texts: their text, one by one.
        parameters: the policy's changing parameters after the round, by name.
        draft_seconds: the round's time on the draft side.
        verify_seconds: the round's time in the verify service.
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
        """The round in one message of the stream."""
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
            parameters=dict(sorted(trace.parameters.items())),  # the protocol has no order
            draft_seconds=trace.draft_seconds,
            verify_seconds=trace.verify_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """The round as lists, dictionaries, strings and numbers only."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


# For each of some tokens the likeliest tokens in its place, likeliest first, as (token_id, log_prob).
TopLogProbs = tuple[tuple[tuple[int, float], ...], ...]


def top_log_probs_from_pb(message: tree_pb2.TopLogProbs, places: int) -> TopLogProbs:
    """The likeliest tokens of so many places."""
    count = len(message.token_ids) // places if places else 0  # in each place
    named = tuple(zip(message.token_ids, message.log_probs, strict=False))
    return tuple(named[place * count : (place + 1) * count] for place in range(places)) if count else ()


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """What a stream tells of the prompt.

    Attributes:
        token_ids: all of its tokens.
        log_probs: of each but the first, on request.
        top_log_probs: the likeliest tokens in the place of each but the first, on request.
        text: its text, on request.
        text_offsets: where each token begins in `text`, on request.
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    top_log_probs: TopLogProbs = ()
    text: str = ""
    text_offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one message of a stream added.

    Attributes:
        text: whole characters only; the text of `token_ids` may follow in a later chunk.
        token_ids: the tokens committed since the last chunk.
        index: the completion that this belongs to, 0 to n - 1.
        log_probs: of each of `token_ids`; empty unless `log_probs` was asked for.
        trace: the round that has ended; None unless `trace` was asked for.
        queue_position: how many requests are ahead of this one, which waits for its turn; None once it has begun, and
            unless `queue_position` was asked for.
        top_log_probs: for each of `token_ids` the likeliest tokens in its place, likeliest first, as (token_id,
            log_prob); empty unless `top_log_probs` was asked for.
        text_offsets: where each of `token_ids` begins in the completion's text, in characters; empty unless `log_probs`
            was asked for.
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
        """The chunk in one message of the stream."""
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
    """The time that one part of the rounds took.

    Attributes:
        total_seconds: summed over all rounds.
        p50_seconds: the median over the rounds.
    """

    total_seconds: float
    p50_seconds: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a completion cost. A round is one tree and one forward of the target; the prompt's own is not a round.

    Attributes:
        generated_tokens: new tokens in the completion.
        rounds: rounds it took.
        draft_n: nodes drafted over all rounds.
        draft_n_accepted: nodes accepted over all rounds.
        acceptance_rate: draft_n_accepted / draft_n, in [0, 1]; 0 where nothing was drafted.
        tokens_per_round: tokens committed by rounds / rounds.
        mean_path_length: draft_n_accepted / rounds.
        nodes_per_round: draft_n / rounds.
        acceptance_by_depth: entry d - 1 is the share of accepted paths that reached depth d, among the rounds whose
            tree did.
        time_to_first_token_seconds: from the request's arrival at the server to the first token.
        time_per_output_token_seconds: the mean gap between tokens after the first; 0 for a single token.
        total_seconds: from the request's arrival at the server to the last token.
        round_parts: the rounds' time by part: "draft_forward", "grow", "verify_forward", "accept", "commit", "wire",
            "detokenize".
        seed: the seed that was used; 0 for greedy decoding.
        committed_per_level: tokens committed by rounds / levels drafted, which may exceed 1; 0 where nothing was
            drafted.
        draft_seconds: over all rounds, growing and committing on the draft side; of draft forwards that other sessions
            shared, this one's share.
        wire_seconds: over all rounds, the stream between the services.
        verify_seconds: over all rounds, the verify service.
        queue_seconds: how long the request waited for its turn.
        sessions_per_pass: the mean number of sessions that shared the target's passes with this one, itself included.
        rows_per_pass: the mean number of tokens in those passes, of all sessions.
        trimmed_n: nodes drafted, but not verified, over all rounds.
        cached_tokens: tokens of the prompt that the target had cached.
        kv_cache_usage: the highest share of the target's KV slots that all sessions together held meanwhile.
        resumes: how often the completion went on elsewhere, since a service was lost. After the loss of a draft service
            the figures above are of the service that ended the completion; `generated_tokens` is of all.
        resume_seconds: from each loss to the next token, summed.
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
        """The statistics in the last message of a stream."""
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
        text: the new text, without the prompt; it ends before the stop string that ended it.
        token_ids: the new tokens, without the prompt.
        finish_reason: "stop" for an end-of-sequence token or a stop string, "length" for `max_new_tokens` or the
            context limit, "cancelled".
        prompt_tokens: the length of the prompt, in tokens.
        stats: what it cost.
        index: which of the request's completions it is, 0 to n - 1.
        log_probs: the natural log-probability of each of `token_ids` under the target's own softmax, before any
            option; empty unless `log_probs` was asked for.
        trace: its rounds; empty unless `trace` was asked for.
        alternatives: where n > 1, the other completions, in order; they have no alternatives themselves, and of the
            prompt no more than `prompt_ids`.
        top_log_probs: for each of `token_ids` the likeliest tokens in its place, likeliest first, as (token_id,
            log_prob), under the same softmax; empty unless `top_log_probs` was asked for.
        prompt_ids: the prompt's tokens.
        prompt_log_probs: the log-probability of each of `prompt_ids` from the second on, under the same softmax; empty
            unless `prompt_log_probs` was asked for.
        prompt_top_log_probs: for each of `prompt_ids` from the second on the likeliest tokens in its place; empty
            unless both were asked for.
        text_offsets: where each of `token_ids` begins in `text`, in characters; empty unless `log_probs` was asked for.
            A token that goes on with a character begins where that does, and one without text where the next begins.
        prompt_text: the prompt's text as it was sent, or what its token ids or its chat decode to, special tokens
            included; empty unless `prompt_text` was asked for.
        prompt_text_offsets: where each of `prompt_ids` begins in `prompt_text`, likewise.
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
        """The completion that its last message describes, of all its chunks.

        Raises:
            KeyError: a finish reason that this client does not know.
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
        """The object that `dynatree generate --json` prints: lists, dictionaries, strings and numbers only.

        "log_probs", "top_log_probs", "prompt_log_probs" with "prompt_ids", "prompt_top_log_probs" and "alternatives"
        are there if they were asked for; the trace is not. A prompt of one token has no log-probabilities.
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
    """One model as its service runs it.

    Attributes:
        name: the hub name, or the last component of the local path.
        architecture: the transformers architecture, for example "GPTNeoXForCausalLM".
        parameters: their number.
        vocab_size: rows of the embedding; may be padded beyond the tokenizer.
        context_length: the longest sequence, prompt and new tokens together.
        dtype: for example "float32".
        device: for example "cpu".
        tokenizer_fingerprint: SHA-256 over the tokenizer; two models can work together when it is equal.
        version: the version of DynaTree that runs the model.
        step_bytes: bytes of the weights that a forward over one token reads.
        streamed_bytes: of them, bytes that every forward reads from the disk; 0: all are in memory.
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
        """The model that a service describes."""
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
    """What a draft service runs.

    Attributes:
        draft: the small model, which proposes.
        target: the large model, whose output every completion is.
        policies: the names that a request's `policy` may have; the first is the default.
        chat_template: whether the tokenizer has one, so that prompts may be chats.
    """

    draft: ModelInfo
    target: ModelInfo
    policies: tuple[str, ...]
    chat_template: bool

    @classmethod
    def from_pb(cls, response: draft_pb2.DraftServiceGetModelInfoResponse) -> Self:
        """The service as it describes itself."""
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
        token_ids: their ids.
        token_strings: on request, their spellings in the tokenizer's table.
    """

    token_ids: tuple[int, ...]
    token_strings: tuple[str, ...] = ()

    @classmethod
    def from_pb(cls, message: draft_pb2.TokenizeResponse) -> Self:
        """The message as a value."""
        return cls(tuple(message.token_ids), tuple(message.token_strings))
