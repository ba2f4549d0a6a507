"""One session's state on the verify side, and the checks that a request must pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.errors import FailedPreconditionError, InvalidArgumentError
from dynatree.common.model_info import ModelInfo, check_same_tokenizer, token_limit
from dynatree.common.sampling import Sampling
from dynatree.common.tree import TokenTree, check_token_ids
from dynatree.common.wire import model_info_from_pb
from dynatree.v1 import verify_pb2


@dataclass(frozen=True)
class SessionRequest:
    """A checked request for a session: `limit` is the number of tokens, prompt included, at which it finishes."""

    prompt_ids: tuple[int, ...]
    limit: int
    end_tokens: frozenset[int]
    sampling: Sampling
    log_probs: bool = False

    @classmethod
    def from_pb(
        cls,
        message: verify_pb2.OpenSession,
        target: ModelInfo,
        end_tokens: frozenset[int],
        default_seed: int,
    ) -> SessionRequest:
        """Check a request against the target.

        Raises:
            FailedPreconditionError: The draft's tokenizer is not the target's.
            InvalidArgumentError: No prompt, a token outside the vocabulary, or an option out of range.
            OutOfRangeError: The prompt with its new tokens does not fit the target's context.
        """
        check_same_tokenizer(model_info_from_pb(message.draft), target)
        if not message.prompt_ids:
            raise InvalidArgumentError("prompt_ids is empty; a session needs at least one prompt token")
        new_tokens = message.max_new_tokens if message.HasField("max_new_tokens") else None
        limit = token_limit(len(message.prompt_ids), new_tokens, target)
        check_token_ids(message.prompt_ids, target.vocab_size, "prompt_ids")
        check_token_ids(message.stop_token_ids, target.vocab_size, "stop_token_ids")
        return cls(
            prompt_ids=tuple(message.prompt_ids),
            limit=limit,
            end_tokens=frozenset(message.stop_token_ids) | (frozenset() if message.ignore_eos else end_tokens),
            sampling=Sampling.from_pb(
                message.sampling,
                vocab_size=target.vocab_size,
                default_seed=default_seed,
                default_penalty=target.repetition_penalty,
            ),
            log_probs=message.log_probs,
        )


@dataclass
class Session:
    """An open session.

    Invariant between rounds: the first `length - 1` slots of arena row `row` are the committed tokens in order, and
    `pending`, the last committed token, is not in the arena yet: it is the next tree's root.
    """

    row: int
    request: SessionRequest
    committed: list[int]
    round: int = 0
    finished: bool = False

    @property
    def length(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.committed)

    @property
    def pending(self) -> int:
        """The last committed token."""
        return self.committed[-1]

    @property
    def remaining(self) -> int:
        """New tokens until the limit."""
        return self.request.limit - self.length

    def check_tree(self, message: verify_pb2.VerifyRequest, max_nodes: int, vocab_size: int) -> TokenTree:
        """The tree in a request, checked against this session.

        Raises:
            FailedPreconditionError: The session has finished, or the tree is for another round or length.
            InvalidArgumentError: The request has no tree, or a malformed one.
        """
        if message.WhichOneof("request") != "tree":
            raise InvalidArgumentError("a session that is open takes trees; expected the field `tree`")
        tree = message.tree
        if self.finished:
            raise FailedPreconditionError("the session has finished; expected no further tree")
        if tree.round != self.round:
            raise FailedPreconditionError(f"the tree is for round {tree.round}, expected round {self.round}")
        if tree.base_length != self.length:
            raise FailedPreconditionError(f"the tree's base_length is {tree.base_length}, expected {self.length}")
        checked = TokenTree.from_pb(tree, max_nodes=max_nodes, max_depth=self.remaining, vocab_size=vocab_size)
        drawn = self.request.sampling.residual
        if (checked.candidates and not drawn) or (checked and drawn and not checked.candidates):
            raise InvalidArgumentError(
                "a tree carries draft distributions (candidate_counts, candidate_ids, candidate_probs) when, and only "
                "when, the session samples by SAMPLING_SCHEME_RESIDUAL"
            )
        return checked

    def commit(self, token_ids: Sequence[int], finished: bool) -> None:
        """Append committed tokens; the last becomes the next root."""
        self.committed.extend(token_ids)
        self.finished = finished
