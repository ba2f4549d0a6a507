"""The statistics of a completion."""

from dataclasses import dataclass
from typing import Self

from dynatree.v1 import draft_pb2


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
