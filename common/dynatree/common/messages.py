"""The messages between the draft and the verify service, as values; `dynatree.common.wire` encodes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dynatree.common.decoding import Decoding
from dynatree.common.log_probs import TopLogProbs
from dynatree.common.model_info import ModelInfo
from dynatree.common.pass_statistics import ALONE, PassStatistics


class FinishReason(Enum):
    """Reason why a completion ended."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_new_tokens or the context limit


@dataclass(frozen=True)
class OpenSession:
    """A request for a session.

    Attributes:
        prompt_ids: The whole prompt. After a lost session, it ends with the tokens that the session generated.
        decoding: Decoding options; `max_new_tokens` includes the tokens of a lost session.
        draft: The draft model; only its name, tokenizer fingerprint and device id are sent.
        principal: Principal of the request: it decides the queue turn and which cached prompts may be reused.
        generated: Number of trailing `prompt_ids` that a lost session generated.
        round: Number of trees that the lost session sent.
    """

    prompt_ids: tuple[int, ...]
    decoding: Decoding
    draft: ModelInfo
    principal: str = ""
    generated: int = 0
    round: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, without the generated ones."""
        return len(self.prompt_ids) - self.generated

    @property
    def least_context(self) -> int:
        """Smallest context length, in tokens, that a target needs for this request."""
        return max(self.prompt_tokens + (self.decoding.max_new_tokens or 1), len(self.prompt_ids))


@dataclass(frozen=True)
class VerifyTimings:
    """Seconds that the verify service spent on one request.

    Attributes:
        forward: Time of the whole forward pass, which several sessions may share.
        accept: Time of acceptance, and of the preparation before the forward pass.
        commit: Time of the sessions' commits.
        total: Time from the request's arrival to its answer, validation and waiting included.
        attributed: This session's part of `forward`, proportional to the seconds that the pass would save without it.
    """

    forward: float
    accept: float
    commit: float
    total: float = 0.0
    attributed: float = 0.0


@dataclass(frozen=True)
class Commit:
    """The outcome of one target forward pass for a session.

    Attributes:
        next_round: The round that the next tree must carry.
        base_length: Committed tokens after this commit, prompt included.
        token_ids: The accepted path, then the target's own choice after it.
        accepted_nodes: The path's nodes in the tree, from the root down.
        timings: Seconds spent on the request.
        finish_reason: Set on the session's last commit.
        log_probs: One log-probability per entry of `token_ids`, if the request asked for them.
        trimmed: Nodes of the tree that were not verified.
        pass_statistics: Statistics of the pass that verified the tree.
        resumed: Whether the session was lost and reopened elsewhere; then none of the tree was verified.
        top_log_probs: The likeliest tokens at the position of each entry of `token_ids`, if requested.
    """

    next_round: int
    base_length: int
    token_ids: tuple[int, ...]
    accepted_nodes: tuple[int, ...]
    timings: VerifyTimings
    finish_reason: FinishReason | None = None
    log_probs: tuple[float, ...] = ()
    trimmed: int = 0
    pass_statistics: PassStatistics = ALONE
    resumed: bool = False
    top_log_probs: TopLogProbs = ()


@dataclass(frozen=True)
class SessionOpened:
    """The answer to `OpenSession`: the target, its limits, and the first token, chosen by the prompt's prefill.

    Attributes:
        target: The target model, as its service describes it.
        max_tree_nodes: Largest number of nodes in a tree that the session accepts.
        commit: The commit of the first token.
        queue_seconds: Seconds that the request waited for a free session.
        cached_tokens: Prompt tokens whose keys and values were cached.
        prompt_log_probs: One log-probability per prompt token except the first, if requested.
        prompt_top_log_probs: The likeliest tokens at each of these positions, if requested.
    """

    target: ModelInfo
    max_tree_nodes: int
    commit: Commit
    queue_seconds: float = 0.0
    cached_tokens: int = 0
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top_log_probs: TopLogProbs = ()
