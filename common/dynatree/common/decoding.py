"""Decoding options: the part of a request that reaches the verify session unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.grammar import Grammar
from dynatree.common.limits import MAX_STOP_TOKENS
from dynatree.common.sampling import Sampling


@dataclass(frozen=True)
class Decoding:
    """Options for choosing tokens, ending the completion, and reporting log-probabilities.

    `OpenSession` and `GenerateRequest` of the protocol have fields of the same names, which `wire` reads and writes.

    Attributes:
        sampling: Options for the target's choice of a token.
        max_new_tokens: Maximum number of new tokens; None means up to the context limit.
        ignore_eos: Whether decoding continues past end-of-sequence tokens.
        stop_token_ids: Additional tokens that end the completion.
        grammar: The texts that the completion may be; None allows any.
        log_probs: Whether each token's log-probability is reported; `top_log_probs` implies it.
        top_log_probs: Number of the likeliest tokens reported at each position.
        prompt_log_probs: Whether the same is reported for the prompt's tokens.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    log_probs: bool = False
    top_log_probs: int = 0
    prompt_log_probs: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "log_probs", self.log_probs or self.top_log_probs > 0)


def check_stop_tokens(token_ids: Sequence[int]) -> None:
    """Check the number of a completion's stop tokens.

    Raises:
        InvalidArgumentError: There are too many.
    """
    if len(token_ids) > MAX_STOP_TOKENS:
        raise InvalidArgumentError(f"{len(token_ids)} stop_token_ids, at most {MAX_STOP_TOKENS} are accepted")
