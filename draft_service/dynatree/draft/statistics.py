"""What a completion cost: every figure of `GenerationStatistics`, defined once, in draft.proto."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from dynatree.common.tree import TokenTree
from dynatree.draft.drafter import Growth
from dynatree.draft.verify_client import Answer
from dynatree.v1 import draft_pb2


@dataclass
class Recorder:
    """Collects one completion's rounds; times are seconds of `time.perf_counter`."""

    arrival: float
    first_token: float = 0.0
    last_token: float = 0.0
    tokens: int = 0
    round_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    levels: int = 0  # summed depths of the trees
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    reached: list[int] = field(default_factory=list)  # rounds whose tree reached depth i + 1
    survived: list[int] = field(default_factory=list)  # rounds whose accepted path reached depth i + 1
    parts: dict[str, list[float]] = field(default_factory=dict)

    def count(self, tokens: int) -> None:
        """Tokens that were handed to the client now."""
        self.last_token = time.perf_counter()
        if self.tokens == 0:
            self.first_token = self.last_token
        self.tokens += tokens

    def round(self, growth: Growth, answer: Answer, draft_commit_seconds: float, kept: int) -> None:
        """One tree, and what became of it; `kept` of the committed tokens belong to the completion."""
        commit = answer.commit
        accepted = min(len(commit.accepted_nodes), kept)
        self.round_tokens += kept
        self.drafted += len(growth.tree)
        self.accepted += accepted
        self.levels += growth.tree.depth
        self.draft_seconds += growth.seconds + draft_commit_seconds
        self.verify_seconds += commit.timings.total_seconds
        self._depths(growth.tree, accepted)
        times = {
            "draft_forward": growth.forward_seconds,
            "grow": growth.seconds - growth.forward_seconds,
            "verify_forward": commit.timings.forward_seconds,
            "accept": commit.timings.accept_seconds,
            "commit": commit.timings.commit_seconds + draft_commit_seconds,
            "wire": answer.wire_seconds,
        }
        for name, seconds in times.items():
            self.part(name, seconds)

    def part(self, name: str, seconds: float) -> None:
        """Time that one part of one round took."""
        self.parts.setdefault(name, []).append(seconds)

    def to_pb(self, seed: int) -> draft_pb2.GenerationStatistics:
        """The figures, as the last message of a completion carries them."""
        rounds = len(self.parts.get("wire", ()))
        return draft_pb2.GenerationStatistics(
            generated_tokens=self.tokens,
            rounds=rounds,
            draft_n=self.drafted,
            draft_n_accepted=self.accepted,
            acceptance_rate=_ratio(self.accepted, self.drafted),
            tokens_per_round=_ratio(self.round_tokens, rounds),
            mean_path_length=_ratio(self.accepted, rounds),
            nodes_per_round=_ratio(self.drafted, rounds),
            acceptance_by_depth=[_ratio(*pair) for pair in zip(self.survived, self.reached, strict=True)],
            time_to_first_token_seconds=max(0.0, self.first_token - self.arrival),
            time_per_output_token_seconds=_ratio(self.last_token - self.first_token, self.tokens - 1),
            total_seconds=max(0.0, self.last_token - self.arrival),
            round_parts=[
                draft_pb2.RoundPart(name=name, total_seconds=sum(times), p50_seconds=statistics.median(times))
                for name, times in self.parts.items()
            ],
            seed=seed,
            committed_per_level=_ratio(self.round_tokens, self.levels),
            draft_seconds=self.draft_seconds,
            wire_seconds=sum(self.parts.get("wire", ())),
            verify_seconds=self.verify_seconds,
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
