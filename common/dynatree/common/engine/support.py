"""Which models can be served exactly, judged by the configuration and by what the layers ask of their attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PretrainedConfig, PreTrainedModel

from dynatree.common.engine.arena import KVShape
from dynatree.common.engine.flat_forward import FlatForward
from dynatree.common.errors import StartupError

# Kinds of rotary scaling whose frequencies follow the longest position so far: a speculative token would change them.
UNSTABLE_ROPE = frozenset({"dynamic", "longrope"})
# Kinds of layers that go through the attention function, which knows what it computes.
ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
RECORDED_TOKENS = 4


def check_family(config: PretrainedConfig) -> None:
    """Refuse a family whose layers compute their attention themselves, so that no registered function reaches it.

    Asked only where loading or probing a model has failed: it explains the failure.

    Raises:
        StartupError: The family is one of these.
    """
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if family is not None and not getattr(family, "_supports_attention_backend", True):
        raise StartupError(f"{config.model_type} models do not go through transformers' attention interface")


def check_config(config: PretrainedConfig) -> None:
    """Refuse by its name what the configuration shows; what it does not show, the probes find.

    A composite model's text part decides.

    Raises:
        StartupError: An encoder-decoder, layers that do not attend, or rotary frequencies that change with the sequence
            length.
    """
    if config.is_encoder_decoder:
        raise StartupError(f"{config.model_type} is an encoder-decoder; DynaTree serves decoder-only models")
    text = config.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENDING)
    if others:
        raise StartupError(f"{text.model_type} has {', '.join(others)} layers, which DynaTree does not compute")
    unstable = sorted(UNSTABLE_ROPE & set(_rope_types(vars(text))))
    if unstable:
        raise StartupError(f"{text.model_type} uses {unstable[0]} rotary scaling, which depends on the sequence length")


def check_cache(config: PretrainedConfig, context_length: int) -> None:
    """Refuse a configuration by which transformers' own cache drops tokens within the context.

    It does so by keys such as `sliding_window` even for families whose attention ignores them. `generate()` then gives
    other tokens than the model's forward passes over whole sequences.

    Raises:
        StartupError: Layers of the cache have a window that is shorter than the context.
    """
    for layer in DynamicCache(config=config).layers:
        window = getattr(layer, "sliding_window", None)
        if window is not None and window < context_length:
            raise StartupError(
                f"by its configuration generate() keeps a sliding window of {window} tokens, shorter than the context "
                f"of {context_length}"
            )


def _rope_types(values: object) -> Iterator[str]:
    """The kinds of rotary scaling anywhere in a configuration."""
    if isinstance(values, dict):
        for name, value in values.items():
            if name in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _rope_types(value)


class KVShapeRecorder:
    """Records the shape of each layer's keys in one forward; implements `Attending` by causal attention."""

    def __init__(self) -> None:
        self._shapes: dict[int, tuple[int, int]] = {}  # of each layer: kv_heads, head_dim

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Causal attention among the forward's own tokens; as `Attending.attend`."""
        if key.shape != value.shape:
            raise StartupError(
                f"its keys and values differ in size ({key.shape[0]} heads of {key.shape[2]}, and {value.shape[0]} of "
                f"{value.shape[2]})"
            )
        if layer in self._shapes:
            raise StartupError(f"it attends more than once in layer {layer}")
        self._shapes[layer] = (key.shape[0], key.shape[2])
        grouped = query.shape[0] != key.shape[0]
        return scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=grouped
        )[0].transpose(0, 1)

    def kv_shape(self, layers: int) -> KVShape:
        """The one shape that all layers share.

        Args:
            layers: Their number.

        Raises:
            StartupError: Not every layer called the attention function, or layers differ.
        """
        if sorted(self._shapes) != list(range(layers)):
            raise StartupError(
                f"{len(self._shapes)} of its {layers} layers attend through transformers' attention interface; the "
                "others may keep recurrent state"
            )
        shapes = sorted(set(self._shapes.values()))
        if len(shapes) != 1:
            sizes = ", ".join(f"{heads} heads of {size}" for heads, size in shapes)
            raise StartupError(f"its layers differ in their keys and values ({sizes})")
        kv_heads, head_dim = shapes[0]
        return KVShape(layers, kv_heads, head_dim)


def record_kv_shape(model: PreTrainedModel, context_length: int) -> KVShape:
    """The shape of the keys and values that every layer stores, found by one forward over a few tokens.

    In this forward the model asks for its own masks and hands its arguments to the attention function, which refuses
    what it does not compute.

    Args:
        model: Loaded to call the registered attention function.
        context_length: Tokens of the longest sequence that is served.

    Raises:
        StartupError: The model cannot run on the registered attention function.
    """
    recorder = KVShapeRecorder()
    positions = torch.arange(RECORDED_TOKENS, device=model.device)[None]
    FlatForward(model, context_length, asks=True)(positions, positions, recorder)
    return recorder.kv_shape(model.config.get_text_config().num_hidden_layers)
