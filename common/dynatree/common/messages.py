"""What the draft and the verify service say to each other, as values; `dynatree.common.wire` carries them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dynatree.common.log_probs import TopLogProbs
from dynatree.common.model_info import ModelInfo
from dynatree.common.pass_statistics import ALONE, PassStatistics
from dynatree.common.sampling import Sampling


class FinishReason(Enum):
    """Why a completion ended."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_new_tokens or the context limit
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class OpenSession:
    """A request for a session: the whole prompt, and how the target chooses.

    `max_new_tokens` None: up to the context limit. `principal` is on whose behalf: whose turn it waits for, and whose
    cached prompts it may reuse. Of a completion that goes on, whose session was lost, `prompt_ids` end with the
    `generated` tokens that it has, which `max_new_tokens` contains; it sent `round` trees. `top_log_probs` is how many
    of the likeliest tokens are named beside each.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int | None
    sampling: Sampling
    draft: ModelInfo
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    log_probs: bool = False
    principal: str = ""
    generated: int = 0
    round: int = 0
    top_log_probs: int = 0
    prompt_log_probs: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, without those that were generated."""
        return len(self.prompt_ids) - self.generated

    @property
    def least_context(self) -> int:
        """Tokens that the target's context must have for it."""
        return max(self.prompt_tokens + (self.max_new_tokens or 1), len(self.prompt_ids))


@dataclass(frozen=True)
class VerifyTimings:
    """Seconds that the verify service spent on one request; `total` contains the others, validation and waiting.

    `forward` is the whole pass, whoever shares it; `attributed` is this session's share of it, in
    proportion to what the pass would cost less without the session.
    """

    forward: float
    accept: float
    commit: float
    total: float
    attributed: float = 0.0


@dataclass(frozen=True)
class Commit:
    """What one target forward decided.

    Attributes:
        next_round: The round that the next tree must carry.
        base_length: Committed tokens after this commit, prompt included.
        token_ids: The accepted path, then the target's own choice after it.
        accepted_nodes: The path's nodes in the tree, from the root down.
        drafted: Nodes of the tree.
        tree_depth: The depth of its deepest node; 0 for an empty tree.
        timings: What it took.
        finish_reason: Set on the session's last commit.
        log_probs: One for each of `token_ids` where the request asked for them.
        trimmed: Nodes of the tree that were not verified.
        shared: The pass that verified it.
        resumed: Whether the session was lost, and opened anew elsewhere: none of the tree was verified.
        top_log_probs: The likeliest tokens in the place of each of `token_ids`, likewise.
    """

    next_round: int
    base_length: int
    token_ids: tuple[int, ...]
    accepted_nodes: tuple[int, ...]
    drafted: int
    tree_depth: int
    timings: VerifyTimings
    finish_reason: FinishReason | None = None
    log_probs: tuple[float, ...] = ()
    trimmed: int = 0
    shared: PassStatistics = ALONE
    resumed: bool = False
    top_log_probs: TopLogProbs = ()


@dataclass(frozen=True)
class SessionOpened:
    """The answer to `OpenSession`: the target, its limits, and the token that the prompt's own forward chose.

    Attributes:
        target: The model, as its service describes it.
        max_tree_nodes: Of the largest tree that the session accepts.
        seed: The seed in force; 0 for greedy decoding.
        commit: The first token.
        replica_id: Opaque; names the process that serves the session.
        queue_seconds: How long the request waited for a free session.
        cached_tokens: Tokens of the prompt whose keys and values were cached.
        prompt_log_probs: One for each token of the prompt but the first where the request asked for them.
        prompt_top_log_probs: The likeliest tokens in the place of each of these, likewise.
    """

    target: ModelInfo
    max_tree_nodes: int
    seed: int
    commit: Commit
    replica_id: str = ""
    queue_seconds: float = 0.0
    cached_tokens: int = 0
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top_log_probs: TopLogProbs = ()
