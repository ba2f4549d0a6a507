"""Statistics of a completion: the figures of `GenerationStatistics`, which draft.proto defines."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from dynatree.common.tree import TokenTree
from dynatree.draft.growth.round import Round


@dataclass(frozen=True)
class RoundPart:
    """Seconds of one part of the rounds: the sum over all rounds, and the median."""

    name: str
    total_seconds: float
    p50_seconds: float


@dataclass(frozen=True)
class Statistics:
    """The figures of one completion; draft.proto defines each under the same name, except for `rounds_by_depth`.

    `rounds_by_depth` has for each depth the number of rounds whose tree reached it, and of those whose accepted path
    did.
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
    round_parts: tuple[RoundPart, ...]
    seed: int
    committed_per_level: float
    draft_seconds: float
    wire_seconds: float
    verify_seconds: float
    queue_seconds: float
    sessions_per_pass: float
    rows_per_pass: float
    trimmed_n: int
    cached_tokens: int
    kv_cache_usage: float
    resumes: int
    resume_seconds: float
    rounds_by_depth: tuple[tuple[int, int], ...]


@dataclass
class StatisticsRecorder:
    """Collects one completion's rounds; times are seconds of `time.perf_counter`.

    `received` tokens came from a lost draft service. Only `generated_tokens` includes them; all other figures are about
    this service alone.
    """

    arrival: float
    received: int = 0
    first_token: float = 0.0
    last_token: float = 0.0
    tokens: int = 0
    round_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    depth_sum: int = 0  # summed depth of the trees
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    queue_seconds: float = 0.0
    cached_tokens: int = 0
    pass_sessions: int = 0
    pass_rows: int = 0
    kv_cache_usage: float = 0.0
    trimmed: int = 0
    resumes: int = 0
    resume_seconds: float = 0.0
    reached: list[int] = field(default_factory=list)  # rounds whose tree reached depth i + 1
    survived: list[int] = field(default_factory=list)  # rounds whose accepted path reached depth i + 1
    parts: dict[str, list[float]] = field(default_factory=dict)

    def count(self, tokens: int) -> None:
        """Count tokens that the client gets now."""
        self.last_token = time.perf_counter()
        if self.tokens == 0:
            self.first_token = self.last_token
        self.tokens += tokens

    def round(self, done: Round, kept: int) -> None:
        """Take in one round; `kept` of its committed tokens belong to the completion."""
        growth, timings = done.growth, done.commit.timings
        accepted = min(len(done.accepted), kept)
        self.round_tokens += kept
        self.drafted += len(done.tree)
        self.accepted += accepted
        self.depth_sum += done.tree.depth
        self.draft_seconds += done.draft_seconds
        self.verify_seconds += timings.total
        self.pass_sessions += done.pass_statistics.sessions
        self.pass_rows += done.pass_statistics.rows
        self.kv_cache_usage = max(self.kv_cache_usage, done.pass_statistics.kv_cache_usage)
        self.trimmed += done.commit.trimmed
        self._depths(done.tree, accepted)
        times = {
            "draft_forward": growth.forward_seconds,
            "grow": growth.seconds - growth.forward_seconds,
            "verify_forward": timings.forward,
            "accept": timings.accept,
            "commit": timings.commit + growth.commit_seconds,
            "wire": done.wire_seconds,
        }
        for name, seconds in times.items():
            self.part(name, seconds)

    def part(self, name: str, seconds: float) -> None:
        """Take in the seconds of one part of one round."""
        self.parts.setdefault(name, []).append(seconds)

    def result(self, seed: int) -> Statistics:
        """Return the figures so far; `seed` is the seed in force, 0 for greedy decoding."""
        rounds = len(self.parts.get("wire", ()))
        return Statistics(
            generated_tokens=self.received + self.tokens,
            rounds=rounds,
            draft_n=self.drafted,
            draft_n_accepted=self.accepted,
            acceptance_rate=_ratio(self.accepted, self.drafted),
            tokens_per_round=_ratio(self.round_tokens, rounds),
            mean_path_length=_ratio(self.accepted, rounds),
            nodes_per_round=_ratio(self.drafted, rounds),
            acceptance_by_depth=tuple(_ratio(*pair) for pair in zip(self.survived, self.reached, strict=True)),
            time_to_first_token_seconds=max(0.0, self.first_token - self.arrival),
            time_per_output_token_seconds=_ratio(self.last_token - self.first_token, self.tokens - 1),
            total_seconds=max(0.0, self.last_token - self.arrival),
            round_parts=tuple(
                RoundPart(name, total_seconds=sum(times), p50_seconds=statistics.median(times))
                for name, times in self.parts.items()
            ),
            seed=seed,
            committed_per_level=_ratio(self.round_tokens, self.depth_sum),
            draft_seconds=self.draft_seconds,
            wire_seconds=sum(self.parts.get("wire", ())),
            verify_seconds=self.verify_seconds,
            queue_seconds=self.queue_seconds,
            sessions_per_pass=_ratio(self.pass_sessions, rounds),
            rows_per_pass=_ratio(self.pass_rows, rounds),
            trimmed_n=self.trimmed,
            cached_tokens=self.cached_tokens,
            kv_cache_usage=self.kv_cache_usage,
            resumes=self.resumes,
            resume_seconds=self.resume_seconds,
            rounds_by_depth=tuple(zip(self.reached, self.survived, strict=True)),
        )

    def _depths(self, tree: TokenTree, accepted: int) -> None:
        missing = tree.depth - len(self.reached)
        if missing > 0:
            self.reached.extend([0] * missing)
            self.survived.extend([0] * missing)
        for depth in range(tree.depth):
            self.reached[depth] += 1
            self.survived[depth] += depth < accepted


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
