"""What two models must share to work together, and what fits into one."""

from __future__ import annotations

from dynatree.common.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from dynatree.v1 import tree_pb2


def token_limit(prompt_tokens: int, max_new_tokens: int | None, model: tree_pb2.ModelInfo) -> int:
    """Tokens, prompt included, at which a session on `model` finishes.

    Raises:
        InvalidArgumentError: `max_new_tokens` is 0.
        OutOfRangeError: They do not fit the context.
    """
    if max_new_tokens == 0:
        raise InvalidArgumentError("max_new_tokens is 0, expected at least 1")
    context = model.context_length
    if prompt_tokens >= context:
        raise OutOfRangeError(f"the prompt has {prompt_tokens} tokens; {model.name} takes at most {context - 1}")
    if max_new_tokens is None:
        return context
    if prompt_tokens + max_new_tokens > context:
        raise OutOfRangeError(
            f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones pass the {context} tokens of {model.name}'s "
            f"context; ask for at most {context - prompt_tokens}, or leave max_new_tokens out to stop at the limit"
        )
    return prompt_tokens + max_new_tokens


def check_same_tokenizer(draft: tree_pb2.ModelInfo, target: tree_pb2.ModelInfo) -> None:
    """Refuse a draft that speaks of other tokens than the target.

    Raises:
        FailedPreconditionError: The fingerprints differ; the message names both models.
    """
    if draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise FailedPreconditionError(
            f"draft model {draft.name or '(unnamed)'} and target model {target.name} have different tokenizers "
            f"({draft.tokenizer_fingerprint[:12] or 'none'} and {target.tokenizer_fingerprint[:12]})"
        )
