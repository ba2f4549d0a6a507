"""Domain values to protobuf messages and back; nothing else of `common` knows the messages."""

from __future__ import annotations

from dynatree.common.model_info import ForwardCost, ModelInfo
from dynatree.v1 import tree_pb2


def model_info_to_pb(info: ModelInfo) -> tree_pb2.ModelInfo:
    """The message that carries model information; its costs are rounded to float32."""
    return tree_pb2.ModelInfo(
        name=info.name,
        architecture=info.architecture,
        parameters=info.parameters,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        dtype=info.dtype,
        device=info.device,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        version=info.version,
        device_id=info.device_id,
        step_bytes=info.step_bytes,
        forward_costs=[tree_pb2.ForwardCost(rows=cost.rows, seconds=cost.seconds) for cost in info.forward_costs],
        repetition_penalty=info.repetition_penalty,
    )


def model_info_from_pb(message: tree_pb2.ModelInfo) -> ModelInfo:
    """Model information from a message; what the message leaves out is empty or 0."""
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        parameters=message.parameters,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        dtype=message.dtype,
        device=message.device,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        version=message.version,
        device_id=message.device_id,
        step_bytes=message.step_bytes,
        forward_costs=tuple(ForwardCost(cost.rows, cost.seconds) for cost in message.forward_costs),
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
    )
