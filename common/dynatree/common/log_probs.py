"""The limit on requested log-probabilities, and the type of the likeliest tokens."""

from __future__ import annotations

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MAX_PROMPT_LOG_PROBS, MAX_TOP_LOG_PROBS

# One entry per position: the likeliest tokens, likeliest first, each with its natural log-probability.
TopLogProbs = tuple[tuple[tuple[int, float], ...], ...]


def check_log_probs(top_log_probs: int, prompt_tokens: int) -> None:
    """Refuse a request for too many log-probabilities, at one position or over the whole prompt.

    Args:
        top_log_probs: Number of the likeliest tokens requested at each position.
        prompt_tokens: Length of the prompt if its log-probabilities are requested, else 0.

    Raises:
        InvalidArgumentError: The request exceeds a limit.
    """
    if not 0 <= top_log_probs <= MAX_TOP_LOG_PROBS:
        raise InvalidArgumentError(f"top_log_probs is {top_log_probs}, expected a number in [0, {MAX_TOP_LOG_PROBS}]")
    entries = prompt_tokens * (1 + top_log_probs)
    if entries > MAX_PROMPT_LOG_PROBS:
        raise InvalidArgumentError(
            f"prompt_log_probs of {prompt_tokens} prompt tokens with top_log_probs {top_log_probs} are {entries} "
            f"log-probabilities, at most {MAX_PROMPT_LOG_PROBS} are returned; ask for fewer, or shorten the prompt"
        )
