"""One session's state on the verify side, and the checks that a request must pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynatree.common.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from dynatree.common.kv_range import KVRange
from dynatree.common.log_probs import TopLogProbs, check_log_probs
from dynatree.common.messages import FinishReason, OpenSession
from dynatree.common.model_info import ModelInfo, check_same_tokenizer, token_limit
from dynatree.common.sampling import Sampling
from dynatree.common.tree import TokenTree, check_token_ids


@dataclass(frozen=True)
class SessionRequest:
    """A checked request for a session: `limit` is the number of tokens, prompt included, at which it finishes.

    Of a completion that goes on, `prompt_ids` end with the `generated` tokens that it has; it sent `round` trees.
    """

    prompt_ids: tuple[int, ...]
    limit: int
    end_tokens: frozenset[int]
    sampling: Sampling
    log_probs: bool = False
    principal: str = ""
    generated: int = 0
    round: int = 0
    top_log_probs: int = 0
    prompt_log_probs: bool = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the completion that goes on is over already; None where it is not."""
        if self.generated and self.prompt_ids[-1] in self.end_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.prompt_ids) >= self.limit else None

    @classmethod
    def checked(cls, request: OpenSession, target: ModelInfo, end_tokens: frozenset[int]) -> SessionRequest:
        """Check a request against the target, whose end-of-sequence tokens are `end_tokens`.

        Raises:
            FailedPreconditionError: The draft's tokenizer is not the target's.
            InvalidArgumentError: No prompt, a token outside the vocabulary, or too many log-probabilities.
            OutOfRangeError: The prompt with its new tokens does not fit the target's context, or what was generated
                does not fit them.
        """
        check_same_tokenizer(request.draft, target)
        if not request.prompt_ids:
            raise InvalidArgumentError("prompt_ids is empty; a session needs at least one prompt token")
        prompt_tokens = request.prompt_tokens
        if prompt_tokens < 1:
            raise InvalidArgumentError(
                f"generated is {request.generated}, expected less than the {len(request.prompt_ids)} prompt_ids"
            )
        limit = token_limit(prompt_tokens, request.max_new_tokens, target)
        if request.prompt_log_probs and request.generated:
            raise InvalidArgumentError(
                f"generated is {request.generated}, and a session that goes on has no prompt_log_probs"
            )
        check_log_probs(request.top_log_probs, prompt_tokens if request.prompt_log_probs else 0)
        if len(request.prompt_ids) > limit:
            raise OutOfRangeError(
                f"generated is {request.generated}, past the limit of {limit - prompt_tokens} new tokens"
            )
        check_token_ids(request.prompt_ids, target.vocab_size, "prompt_ids")
        check_token_ids(request.stop_token_ids, target.vocab_size, "stop_token_ids")
        request.sampling.check_tokens(target.vocab_size)
        return cls(
            prompt_ids=request.prompt_ids,
            limit=limit,
            end_tokens=frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else end_tokens),
            sampling=request.sampling,
            log_probs=request.log_probs or request.top_log_probs > 0,
            principal=request.principal,
            generated=request.generated,
            round=request.round,
            top_log_probs=request.top_log_probs,
            prompt_log_probs=request.prompt_log_probs,
        )


@dataclass(eq=False)
class Session:
    """An open session.

    Invariant while the prompt is read: the first `read` slots of the arena's range `kv` are its first tokens in order.
    Invariant between rounds: the first `length - 1` slots are the committed tokens in order, and `pending`, the last
    committed token, is not in the arena yet: it is the next tree's root.

    Attributes:
        cached: Tokens of the prompt that were not read, since their slots were copied from an earlier session's.
        prompt_log_probs: Where the request asks for them, of the prompt's tokens from the second on, as far as the
            logits before them are known.
        prompt_top_log_probs: The likeliest tokens in the place of each of these.
    """

    kv: KVRange
    request: SessionRequest
    committed: list[int]
    read: int = 0
    cached: int = 0
    round: int = field(init=False)
    finished: bool = False
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top_log_probs: TopLogProbs = ()

    def __post_init__(self) -> None:
        self.round = self.request.round

    @property
    def length(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.committed)

    @property
    def generated(self) -> int:
        """Committed tokens that are not the prompt's; those of a completion that goes on count from its beginning."""
        return self.request.generated + self.length - len(self.request.prompt_ids)

    @property
    def pending(self) -> int:
        """The last committed token."""
        return self.committed[-1]

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are not in the arena yet."""
        return len(self.request.prompt_ids) - self.read

    @property
    def remaining(self) -> int:
        """New tokens until the limit."""
        return self.request.limit - self.length

    def check_place(self, round_: int, base_length: int) -> None:
        """Refuse a tree that does not follow the last commit.

        Raises:
            FailedPreconditionError: The session has finished, or the tree is for another round or length.
        """
        if self.finished:
            raise FailedPreconditionError("the session has finished; expected no further tree")
        if round_ != self.round:
            raise FailedPreconditionError(f"the tree is for round {round_}, expected round {self.round}")
        if base_length != self.length:
            raise FailedPreconditionError(f"the tree's base_length is {base_length}, expected {self.length}")

    def check_distributions(self, tree: TokenTree) -> None:
        """Refuse a tree whose draft distributions are missing, or have no use.

        Raises:
            InvalidArgumentError: The tree carries them, and the session does not need them; or the other way round.
        """
        residual = self.request.sampling.residual
        if (tree.candidates and not residual) or (tree and residual and not tree.candidates):
            raise InvalidArgumentError(
                "a tree carries draft distributions (candidate_counts, candidate_ids, candidate_probs) when, and only "
                "when, the session samples by SAMPLING_SCHEME_RESIDUAL"
            )

    def commit(self, token_ids: Sequence[int], finished: bool) -> None:
        """Append committed tokens; the last becomes the next root."""
        self.committed.extend(token_ids)
        self.finished = finished
