"""The target's tokenizer, as a verify service sends it."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from dynatree.common.errors import ServiceError, StartupError
from dynatree.draft.target.replicas import Replicas
from dynatree.engine.model.tokenizer import fingerprint, tokenizer_of
from dynatree.engine.model_thread import ModelThread


async def target_tokenizer(replicas: Replicas, thread: ModelThread, timeout: float) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a ready target on a thread; the service must send it within `timeout` seconds.

    Raises:
        StartupError: No service sends it, or it differs from the target's once it is loaded here.
    """
    try:
        replica = replicas.first()
        files = await replica.tokenizer_files(timeout)
    except ServiceError as error:
        raise StartupError(f"the target's tokenizer is not available: {error}") from error
    assert replica.target is not None, "a ready service has told its target"
    target = replica.target.info
    tokenizer = await thread.run(tokenizer_of, files)
    if await thread.run(fingerprint, tokenizer) != target.tokenizer_fingerprint:
        raise StartupError(
            f"the tokenizer of {target.name} differs from the target's once it is loaded here; "
            "expected the verify service's versions of transformers and tokenizers"
        )
    return tokenizer
