"""Estimates the memory of an answer: an upper bound before the work begins, then the size of the parts received."""

from __future__ import annotations

from collections.abc import Sequence

from dynatree.client import AsyncCompletionStream, Chunk, Prompt
from dynatree.gateway.errors import ApiError
from dynatree.gateway.requests import ChatRequest, CompletionRequest

# Bytes, measured with tracemalloc on CPython 3.11.
CHUNK_BYTES = 512
TOKEN_BYTES = 64  # a token's id and text
LOG_PROB_BYTES = 224  # a token, or a likeliest token at its position, with its log-probability, in memory and as JSON
ECHOED_BYTES = 48  # a log-probability of a prompt in each choice that echoes it: JSON alone
NODE_BYTES = 320  # a node of a round's tree


def check_answer(
    body: CompletionRequest | ChatRequest, prompts: Sequence[Prompt], context_length: int, most: int
) -> None:
    """Refuse a request whose longest possible answer exceeds `most` bytes of memory.

    Raises:
        ApiError: The answer might not fit.
    """
    named = 0 if body.named is None else 1 + body.named  # log-probabilities at each position
    new = context_length if body.new_tokens is None else min(body.new_tokens, context_length)
    echoed = [_most_tokens(prompt, context_length) for prompt in prompts] if body.echoes else []
    tokens = body.completions * (new * len(prompts) + sum(echoed))
    if tokens * (TOKEN_BYTES + named * LOG_PROB_BYTES) <= most:
        return
    each = f"{new + max(echoed, default=0)} tokens" + (f" with {named} log-probabilities each" if named else "")
    raise ApiError(
        400,
        f"the answer may have {len(prompts) * body.completions} choices of {each}, more than the gateway can hold "
        "in memory; ask for fewer prompts, choices (n), tokens (max_tokens) or logprobs at once",
        param="n" if body.completions > 1 else body.fields.new_tokens,
        code="invalid_value",
    )


def size_of(chunk: Chunk) -> int:
    """Estimate the memory of a chunk, in bytes."""
    top = len(chunk.top_log_probs[0]) if chunk.top_log_probs else 0
    log_probs = len(chunk.log_probs) * (1 + top) * LOG_PROB_BYTES
    nodes = 0 if chunk.trace is None else len(chunk.trace.token_ids)
    return CHUNK_BYTES + len(chunk.text) + len(chunk.token_ids) * TOKEN_BYTES + log_probs + nodes * NODE_BYTES


def size_of_prompt(stream: AsyncCompletionStream, echoes: int) -> int:
    """Estimate the memory of a stream's prompt and its log-probabilities, including `echoes` copies, in bytes."""
    top = len(stream.prompt_top_log_probs[0]) if stream.prompt_top_log_probs else 0
    log_probs = len(stream.prompt_log_probs) * (1 + top)
    return len(stream.prompt_ids) * (1 + echoes) * TOKEN_BYTES + log_probs * (LOG_PROB_BYTES + echoes * ECHOED_BYTES)


def _most_tokens(prompt: Prompt, context_length: int) -> int:
    """Upper bound on a prompt's tokens: each token of a text has at least one byte."""
    return min(len(prompt.encode(errors="replace")) if isinstance(prompt, str) else len(prompt), context_length)
