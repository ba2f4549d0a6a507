"""A service's description of its model, the check that two models can work together, and the context limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dynatree.common.errors import ContextLengthError, FailedPreconditionError, InvalidArgumentError

# Row counts at which forward passes are measured. The time of a forward pass steps up at multiples of the tiles of
# matrix kernels, which have 4, 6, 8 or 16 rows. Every count below 6 is measured, since most sampled trees are that
# small. (`dynatree bench replay` without 3 and 5: 1 to 5 % slower at temperature 0.7 and 1 on AVX2, elsewhere 1 %.)
FORWARD_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096)

NO_MODEL = "none"  # name of the draft model of a service that drafts from n-grams alone


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one forward pass over `rows` tokens of one session."""

    rows: int
    seconds: float


@dataclass(frozen=True)
class ModelInfo:
    """Description of the model that a service runs; both services report it.

    Attributes:
        name: The hub name, or the last component of the local path.
        architecture: The transformers architecture, for example "GPTNeoXForCausalLM".
        parameters: Number of parameters.
        vocab_size: Rows of the embedding; may be padded beyond the tokenizer.
        context_length: Tokens of the longest sequence, prompt and new tokens together.
        dtype: The data type, for example "float32".
        device: The device, for example "cuda:0".
        tokenizer_fingerprint: Identifies the tokenizer whose ids the service sends; a draft service sends the target's.
        version: The version of DynaTree that runs the model.
        device_id: Opaque identifier; equal if two services compute on the same device.
        step_bytes: Bytes of weights that a forward pass over one token reads.
        forward_costs: Costs measured when the service started, fewest rows first; empty if not measured.
        repetition_penalty: The target's default for requests that set none; 1 has no effect.
        fingerprint: Equal for two targets that produce the same tokens; empty for a draft model.
        streamed_bytes: Bytes of weights that every forward pass reads from disk; 0 if all weights are in memory.
        numerics: Readable name of the kernels and settings that decide bits; part of a target's fingerprint.
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
        """The name and the numeric properties that affect tokens, for messages."""
        return f"{self.name} ({', '.join(filter(None, (self.dtype, self.numerics)))})"

    def same_tokens(self, other: ModelInfo) -> bool:
        """Whether both models produce the same tokens, regardless of device and context length."""
        return self._identity == other._identity

    @property
    def _identity(self) -> tuple[object, ...]:
        # services of older versions send no fingerprint
        named = (self.fingerprint,) if self.fingerprint else (self.name, self.architecture, self.parameters)
        return (*named, self.dtype, self.vocab_size, self.tokenizer_fingerprint)


def token_limit(prompt_tokens: int, max_new_tokens: int | None, target: ModelInfo, *, at_least: bool = False) -> int:
    """Sequence length in tokens, prompt included, at which a completion of `target` finishes.

    This is the only check of a request's length. The error message has OpenAI's wording, which clients match.

    Args:
        prompt_tokens: Number of prompt tokens.
        max_new_tokens: Requested number of new tokens; None means as many as fit, at least one.
        target: The target model. The draft model's context limits only how far it can draft.
        at_least: Whether `prompt_tokens` is only a lower bound.

    Raises:
        InvalidArgumentError: `max_new_tokens` is 0.
        ContextLengthError: The tokens do not fit the context.
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


class Tokenized(Protocol):
    """A model with a tokenizer, such as `ModelInfo`."""

    @property
    def name(self) -> str:
        """See `ModelInfo`."""
        ...

    @property
    def tokenizer_fingerprint(self) -> str:
        """See `ModelInfo`."""
        ...


def check_same_tokenizer(draft: Tokenized, target: Tokenized) -> None:
    """Refuse a draft model, or a draft service without one, whose tokenizer differs from the target's.

    Raises:
        FailedPreconditionError: The fingerprints differ; the message names both models.
    """
    if draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        who = "the draft service" if draft.name == NO_MODEL else f"draft model {draft.name or '(unnamed)'}"
        raise FailedPreconditionError(
            f"{who} and target model {target.name} have different tokenizers "
            f"({draft.tokenizer_fingerprint[:12] or 'none'} and {target.tokenizer_fingerprint[:12]})"
        )
