"""Tokens of a prompt, and the likeliest tokens at each position."""

from dataclasses import dataclass
from typing import Self

from dynatree.v1 import draft_pb2, tree_pb2

# For each token, the likeliest tokens at its position, likeliest first, as (token_id, log_prob).
TopLogProbs = tuple[tuple[tuple[int, float], ...], ...]


def top_log_probs_from_pb(message: tree_pb2.TopLogProbs, places: int) -> TopLogProbs:
    """Split a message into the likeliest tokens at each of `places` positions."""
    count = len(message.token_ids) // places if places else 0  # at each position
    named = tuple(zip(message.token_ids, message.log_probs, strict=False))
    return tuple(named[place * count : (place + 1) * count] for place in range(places)) if count else ()


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompt's tokens, and on request their log-probabilities and text.

    Attributes:
        token_ids: all tokens of the prompt.
        log_probs: the log-probability of each token but the first, on request.
        top_log_probs: the likeliest tokens at the position of each token but the first, on request.
        text: the prompt's text, on request.
        text_offsets: the offset of each token in `text`, in characters, on request.
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    top_log_probs: TopLogProbs = ()
    text: str = ""
    text_offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tokens:
    """The tokens of a prompt.

    Attributes:
        token_ids: the ids of the tokens.
        token_strings: on request, the tokens' spellings in the tokenizer's vocabulary.
    """

    token_ids: tuple[int, ...]
    token_strings: tuple[str, ...] = ()

    @classmethod
    def from_pb(cls, message: draft_pb2.TokenizeResponse) -> Self:
        """Convert the service's answer."""
        return cls(tuple(message.token_ids), tuple(message.token_strings))
