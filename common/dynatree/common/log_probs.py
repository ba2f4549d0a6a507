"""How many log-probabilities a request may ask for, and what the likeliest tokens of a place are."""

from __future__ import annotations

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MAX_PROMPT_LOG_PROBS, MAX_TOP_LOG_PROBS

# For each of some places the likeliest tokens, likeliest first, each with its natural log-probability.
TopLogProbs = tuple[tuple[tuple[int, float], ...], ...]


def check_log_probs(top_log_probs: int, prompt_tokens: int) -> None:
    """Refuse to name too many tokens in a place, or too many over a prompt.

    Args:
        top_log_probs: How many of the likeliest tokens are wanted in each place.
        prompt_tokens: Of the prompt whose log-probabilities are wanted; 0 where they are not.

    Raises:
        InvalidArgumentError: They are too many.
    """
    if not 0 <= top_log_probs <= MAX_TOP_LOG_PROBS:
        raise InvalidArgumentError(f"top_log_probs is {top_log_probs}, expected a number in [0, {MAX_TOP_LOG_PROBS}]")
    entries = prompt_tokens * (1 + top_log_probs)
    if entries > MAX_PROMPT_LOG_PROBS:
        raise InvalidArgumentError(
            f"prompt_log_probs of {prompt_tokens} prompt tokens with top_log_probs {top_log_probs} are {entries} "
            f"log-probabilities, at most {MAX_PROMPT_LOG_PROBS} are returned; ask for fewer, or shorten the prompt"
        )
