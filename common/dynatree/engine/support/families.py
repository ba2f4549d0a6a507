"""Decides which models can be served exactly, by the configuration and by the attention that the layers request."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PretrainedConfig, PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.forward.flat_forward import FlatForward
from dynatree.engine.forward.scores import Scores
from dynatree.engine.kv.kv_cache import KVShape

# Kinds of rotary scaling whose frequencies depend on the longest position so far, which a draft token would change.
UNSTABLE_ROPE = frozenset({"dynamic", "longrope"})
# Kinds of layers that call the attention function, which refuses masks that it does not compute.
ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
RECORDED_TOKENS = 4


def check_family(config: PretrainedConfig) -> None:
    """Refuse a family whose layers compute attention themselves instead of calling the registered function.

    It is called only after loading or probing has failed, to explain the failure.

    Raises:
        StartupError: The family does not use the attention interface.
    """
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if family is not None and not getattr(family, "_supports_attention_backend", True):
        raise StartupError(f"{config.model_type} models do not go through transformers' attention interface")


def check_config(config: PretrainedConfig) -> None:
    """Refuse unsupported features that the configuration names; the probes find the remaining ones.

    For a composite model, the configuration of its text part decides.

    Raises:
        StartupError: The model is an encoder-decoder, has layers without attention, or has rotary frequencies that
            depend on the sequence length.
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
    """Refuse a configuration with which transformers' KV cache drops tokens within the context.

    The cache obeys keys such as `sliding_window` even for families whose attention ignores them. `generate()` then
    gives tokens that differ from the model's forward passes over whole sequences.

    Raises:
        StartupError: A layer of the cache has a window that is shorter than the context.
    """
    for layer in DynamicCache(config=config).layers:
        window = getattr(layer, "sliding_window", None)
        if window is not None and window < context_length:
            raise StartupError(
                f"by its configuration generate() keeps a sliding window of {window} tokens, shorter than the context "
                f"of {context_length}"
            )


def _rope_types(values: object) -> Iterator[str]:
    """Yield the kinds of rotary scaling anywhere in a configuration."""
    if isinstance(values, dict):
        for name, value in values.items():
            if name in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _rope_types(value)


class KVShapeRecorder:
    """Records the shape of each layer's keys in one forward pass; implements `Attending` by causal attention."""

    def __init__(self) -> None:
        self._shapes: dict[int, tuple[int, int]] = {}  # kv_heads and head_dim of each layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Compute causal attention among the tokens of the forward pass; see `Attending.attend`."""
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
            query[None], key[None], value[None], is_causal=True, scale=scores.scale, enable_gqa=grouped
        )[0].transpose(0, 1)

    def kv_shape(self, layers: int) -> KVShape:
        """Return the shape that all layers share.

        Args:
            layers: Number of layers.

        Raises:
            StartupError: A layer did not call the attention function, or layers differ.
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
    """Find the shape of the keys and values that every layer stores, by one forward pass over a few tokens.

    In this forward pass, the model builds its own masks and passes all its arguments to the attention function, which
    refuses any that it does not support.

    Args:
        model: Model that was loaded to call the registered attention function.
        context_length: Length of the longest served sequence, in tokens.

    Raises:
        StartupError: The model cannot run on the registered attention function.
    """
    recorder = KVShapeRecorder()
    positions = torch.arange(RECORDED_TOKENS, device=model.device)[None]
    FlatForward(model, context_length, asks=True)(positions, positions, recorder)
    return recorder.kv_shape(model.config.get_text_config().num_hidden_layers)
