"""What a service tells of its model, what two models must share to work together, and what fits into one."""

from __future__ import annotations

from dataclasses import dataclass

from dynatree.common.errors import ContextLengthError, FailedPreconditionError, InvalidArgumentError

# Rows of the forwards that are measured and told apart. The time of a forward steps up at multiples of the tiles of
# matrix kernels, which have 4, 6, 8 or 16 rows; below 6 each number stands for itself, since most sampled trees are
# as small. (`dynatree bench replay` without 3 and 5: 1 to 5 % slower at temperature 0.7 and 1 on AVX2, elsewhere 1 %.)
FORWARD_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class ForwardCost:
    """The seconds that one forward over `rows` tokens of one session took."""

    rows: int
    seconds: float


@dataclass(frozen=True)
class ModelInfo:
    """What a service runs; both services tell it of their model.

    Attributes:
        name: The hub name, or the last component of the local path.
        architecture: The transformers architecture, for example "GPTNeoXForCausalLM".
        parameters: Their number.
        vocab_size: Rows of the embedding; may be padded beyond the tokenizer.
        context_length: Tokens of the longest sequence, prompt and new tokens together.
        dtype: For example "float32".
        device: For example "cuda:0".
        tokenizer_fingerprint: Equal for two models exactly where they can work together.
        version: The version of DynaTree that runs the model.
        device_id: Opaque; equal where two services compute on one device.
        step_bytes: Bytes of the weights that a forward over one token reads.
        forward_costs: Measured when the service started, fewest rows first; empty where none was measured.
        repetition_penalty: Of requests to a target that name none; 1 changes nothing.
        fingerprint: Equal for two targets that give the same tokens; empty for a draft.
        streamed_bytes: Of weights that every forward reads from the disk; 0: all are in memory.
        numerics: What computes, as far as it decides bits; part of a target's fingerprint.
    """

    name: str
    architecture: str
    parameters: int
    vocab_size: int
    context_length: int
    dtype: str
    device: str
    tokenizer_fingerprint: str
    version: str
    device_id: str
    step_bytes: int
    forward_costs: tuple[ForwardCost, ...] = ()
    repetition_penalty: float = 1.0
    fingerprint: str = ""
    streamed_bytes: int = 0
    numerics: str = ""

    def __str__(self) -> str:
        """For messages: the name, and what else decides tokens."""
        return f"{self.name} ({', '.join(filter(None, (self.dtype, self.numerics)))})"

    def same_tokens(self, other: ModelInfo) -> bool:
        """Whether both give the same tokens, wherever they run and however long their sequences may get."""
        return self._identity == other._identity

    @property
    def _identity(self) -> tuple[object, ...]:
        # an older service has no fingerprint
        named = (self.fingerprint,) if self.fingerprint else (self.name, self.architecture, self.parameters)
        return (*named, self.dtype, self.vocab_size, self.tokenizer_fingerprint)


def token_limit(prompt_tokens: int, max_new_tokens: int | None, target: ModelInfo, *, at_least: bool = False) -> int:
    """Tokens, prompt included, at which a completion of `target` finishes: the one check of a request's length.

    Clients look for the words of its message, which are OpenAI's.

    Args:
        prompt_tokens: Tokens of the prompt.
        max_new_tokens: That are asked for; None: as many as fit, which are one at least.
        target: The model whose context counts; the draft's limits nothing but the drafting.
        at_least: Whether the prompt may have more tokens than that.

    Raises:
        InvalidArgumentError: `max_new_tokens` is 0.
        ContextLengthError: They do not fit the context.
    """
    if max_new_tokens == 0:
        raise InvalidArgumentError("max_new_tokens is 0, expected at least 1")
    context = target.context_length
    new_tokens = 1 if max_new_tokens is None else max_new_tokens
    if prompt_tokens + new_tokens > context:
        more = "at least " if at_least else ""
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{more}{prompt_tokens + new_tokens} tokens ({more}{prompt_tokens} in the prompt, {new_tokens} in the "
            f"completion). Please reduce the length of the prompt or of the completion. The model is {target.name}.",
            context_length=context,
            prompt_tokens=prompt_tokens,
        )
    return context if max_new_tokens is None else prompt_tokens + max_new_tokens


def check_same_tokenizer(draft: ModelInfo, target: ModelInfo) -> None:
    """Refuse a draft that speaks of other tokens than the target.

    Raises:
        FailedPreconditionError: The fingerprints differ; the message names both models.
    """
    if draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise FailedPreconditionError(
            f"draft model {draft.name or '(unnamed)'} and target model {target.name} have different tokenizers "
            f"({draft.tokenizer_fingerprint[:12] or 'none'} and {target.tokenizer_fingerprint[:12]})"
        )
