"""A session's state in the verify service, and the checks of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynatree.common.decoding import Decoding
from dynatree.common.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from dynatree.common.log_probs import TopLogProbs, check_log_probs
from dynatree.common.messages import FinishReason, OpenSession
from dynatree.common.model_info import ModelInfo, check_same_tokenizer, token_limit
from dynatree.common.tree import TokenTree, check_token_ids
from dynatree.engine.grammar.state import GrammarState
from dynatree.engine.kv.kv_range import KVRange


@dataclass(frozen=True)
class SessionRequest:
    """A checked request for a session.

    Attributes:
        prompt_ids: The prompt, as in `OpenSession`.
        limit: Sequence length in tokens, prompt included, at which the session finishes.
        end_tokens: Tokens that finish the session.
        decoding: Decoding options.
        principal: Principal of the request.
        generated: Number of trailing `prompt_ids` that a lost session generated.
        round: Number of trees that the lost session sent.
        grammar: State of the grammar at the end of `prompt_ids`; None allows any text.
    """

    prompt_ids: tuple[int, ...]
    limit: int
    end_tokens: frozenset[int]
    decoding: Decoding
    principal: str = ""
    generated: int = 0
    round: int = 0
    grammar: GrammarState | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why a resumed completion is already complete; None if it is not."""
        if self.generated and self.prompt_ids[-1] in self.end_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.prompt_ids) >= self.limit else None

    @classmethod
    def checked(cls, request: OpenSession, target: ModelInfo, end_tokens: frozenset[int]) -> SessionRequest:
        """Check a request against the target, whose end-of-sequence tokens are `end_tokens`.

        Raises:
            FailedPreconditionError: The draft's tokenizer is not the target's.
            InvalidArgumentError: No prompt, a token outside the vocabulary, too many log-probabilities, or a grammar
                for a completion that does not end with it.
            OutOfRangeError: The prompt with its new tokens does not fit the target's context, or the generated tokens
                exceed the requested number of new tokens.
        """
        check_same_tokenizer(request.draft, target)
        if not request.prompt_ids:
            raise InvalidArgumentError("prompt_ids is empty; a session needs at least one prompt token")
        prompt_tokens = request.prompt_tokens
        if prompt_tokens < 1:
            raise InvalidArgumentError(
                f"generated is {request.generated}, expected less than the {len(request.prompt_ids)} prompt_ids"
            )
        decoding = request.decoding
        limit = token_limit(prompt_tokens, decoding.max_new_tokens, target)
        if decoding.prompt_log_probs and request.generated:
            raise InvalidArgumentError(
                f"generated is {request.generated}, but a resumed session has no prompt_log_probs"
            )
        check_log_probs(decoding.top_log_probs, prompt_tokens if decoding.prompt_log_probs else 0)
        if len(request.prompt_ids) > limit:
            raise OutOfRangeError(
                f"generated is {request.generated}, past the limit of {limit - prompt_tokens} new tokens"
            )
        if decoding.grammar is not None and decoding.ignore_eos:
            raise InvalidArgumentError("ignore_eos is set, but a completion with a grammar ends when its text does")
        check_token_ids(request.prompt_ids, target.vocab_size, "prompt_ids")
        check_token_ids(decoding.stop_token_ids, target.vocab_size, "stop_token_ids")
        decoding.sampling.check_tokens(target.vocab_size)
        return cls(
            prompt_ids=request.prompt_ids,
            limit=limit,
            end_tokens=frozenset(decoding.stop_token_ids) | (frozenset() if decoding.ignore_eos else end_tokens),
            decoding=decoding,
            principal=request.principal,
            generated=request.generated,
            round=request.round,
        )


@dataclass(eq=False)
class VerifySession:
    """An open session.

    Invariant during prefill: the first `read` slots of the KV range `kv` hold the prompt's first tokens in order.
    Invariant between rounds: the first `length - 1` slots hold the committed tokens in order. The last committed token,
    `pending`, is not in the KV cache yet: it is the root of the next tree.

    Attributes:
        cached: Number of prompt tokens whose slots were copied from an earlier session instead of computed.
        grammar: State of the grammar after the committed tokens; None allows any text.
        prompt_log_probs: Log-probabilities of the prompt's tokens from the second on, if requested, as far as the
            prompt has been read.
        prompt_top_log_probs: The likeliest tokens at each of these positions, if requested.
    """

    kv: KVRange
    request: SessionRequest
    committed: list[int]
    read: int = 0
    cached: int = 0
    round: int = field(init=False)
    finished: bool = False
    grammar: GrammarState | None = field(init=False)
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top_log_probs: TopLogProbs = ()

    def __post_init__(self) -> None:
        self.round = self.request.round
        self.grammar = self.request.grammar

    @property
    def length(self) -> int:
        """Number of committed tokens, prompt included."""
        return len(self.committed)

    @property
    def generated(self) -> int:
        """Number of committed tokens after the prompt, including those of a lost session."""
        return self.request.generated + self.length - len(self.request.prompt_ids)

    @property
    def pending(self) -> int:
        """The last committed token."""
        return self.committed[-1]

    @property
    def unread(self) -> int:
        """Number of prompt tokens that are not in the KV cache yet."""
        return len(self.request.prompt_ids) - self.read

    @property
    def remaining(self) -> int:
        """Number of new tokens left until the limit."""
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
        """Refuse a tree whose draft distributions are missing or superfluous.

        Raises:
            InvalidArgumentError: The session needs distributions and the tree has none, or the other way round.
        """
        residual = self.request.decoding.sampling.residual
        if (tree.candidates and not residual) or (tree and residual and not tree.candidates):
            raise InvalidArgumentError(
                "a tree carries draft distributions (candidate_counts, candidate_ids, candidate_probs) when, and only "
                "when, the session samples by SAMPLING_SCHEME_RESIDUAL"
            )

    def commit(self, token_ids: Sequence[int], finished: bool) -> None:
        """Append committed tokens; the last becomes the next root."""
        self.committed.extend(token_ids)
        self.finished = finished
        if self.grammar is not None and not finished:
            self.grammar = self.grammar.after_all(token_ids)
            assert self.grammar is not None, "a token that the grammar forbids is never chosen"
