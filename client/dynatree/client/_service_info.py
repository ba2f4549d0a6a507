"""A draft service's models and policies."""

from dataclasses import dataclass
from typing import Self

from dynatree.v1 import draft_pb2, tree_pb2


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as its service runs it.

    Attributes:
        name: the hub name, or the last component of the local path.
        architecture: the transformers architecture, for example "GPTNeoXForCausalLM".
        parameters: the number of parameters.
        vocab_size: the rows of the embedding; may be padded beyond the tokenizer's vocabulary.
        context_length: the longest sequence of prompt and new tokens together, in tokens.
        dtype: the number format of the weights, for example "float32".
        device: the torch device, for example "cpu".
        tokenizer_fingerprint: the SHA-256 hash of the tokenizer whose ids the service sends; a draft's is the target's.
        version: the version of DynaTree that runs the model.
        step_bytes: the bytes of weights that a forward pass over one token reads.
        streamed_bytes: the part of `step_bytes` that every forward pass reads from the disk; 0 if all weights are in
            memory.
        numerics: the formats of quantised weights, and the kernels; from the same weights, two services whose numerics
            are equal compute equal bits.
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
    step_bytes: int
    streamed_bytes: int
    numerics: str

    @classmethod
    def from_pb(cls, info: tree_pb2.ModelInfo) -> Self:
        """Convert a service's description of its model."""
        return cls(
            name=info.name,
            architecture=info.architecture,
            parameters=info.parameters,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            dtype=info.dtype,
            device=info.device,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            version=info.version,
            step_bytes=info.step_bytes,
            streamed_bytes=info.streamed_bytes,
            numerics=info.numerics,
        )


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """The models and policies of a draft service.

    Attributes:
        draft: the small model, which drafts the trees.
        target: the large model, whose output every completion is.
        policies: the names that a request's `policy` may have; the first is the default.
        chat_template: whether the tokenizer has a chat template, so that prompts may be chats.
        tool_format: how the template writes calls of functions: "hermes", "llama3", "mistral",
            "mistral_named", "qwen3_coder" or "harmony".
    """

    draft: ModelInfo
    target: ModelInfo
    policies: tuple[str, ...]
    chat_template: bool
    tool_format: str

    @classmethod
    def from_pb(cls, response: draft_pb2.DraftServiceGetModelInfoResponse) -> Self:
        """Convert a service's description of itself."""
        return cls(
            draft=ModelInfo.from_pb(response.draft),
            target=ModelInfo.from_pb(response.target),
            policies=tuple(response.policies),
            chat_template=response.chat_template,
            tool_format=response.tool_format,
        )
