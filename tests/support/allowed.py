"""The tokens that the state of a grammar allows."""

import torch

from dynatree.engine.grammar.masking import HasBits, allowed, packed


def allowed_tokens(state: HasBits, vocab_size: int) -> list[int]:
    """Return the tokens that may follow, in ascending order."""
    masks = packed([state], vocab_size, torch.device("cpu"))
    found: list[int] = allowed(masks, vocab_size)[0].nonzero()[:, 0].tolist()
    return found
