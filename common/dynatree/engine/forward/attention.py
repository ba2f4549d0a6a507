"""The attention function that every served model calls: each segment attends to its own range of the KV cache.

The function is registered with `transformers.AttentionInterface`, so no model-specific code is needed. It receives the
`AttentionCall` as a keyword argument of the model's forward pass. It computes softmax(query @ key) @ value over the
tokens visible in a segment's mask and in the layer's locality, with capped scores or attention sinks if the layer asks
for them. It refuses every layer that asks for anything else: another mask, or an unknown argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from dynatree.common.errors import StartupError
from dynatree.engine.forward import requested_mask
from dynatree.engine.forward.scores import Scores
from dynatree.engine.kv.kv_cache import KVShape
from dynatree.engine.recurrent.scan import Recurring

NAME = "dynatree"
# Readable names for some of the refused keyword arguments of transformers' attention functions.
MEANINGS = {
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "indices": "keys selected by an index",
    "block_indices": "keys selected by an index",
    "is_causal": "tokens that see later ones",
}
# Keyword arguments that change no score: they select return values, or give positions, which the keys already carry.
_WITHOUT_EFFECT = frozenset(
    {
        *("position_ids", "cache_position", "use_cache", "logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)


class Attending(Protocol):
    """Computes the attention of one forward pass; the model hands it to the attention function of every layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Compute one layer's attention for the `n` tokens of the forward pass.

        Args:
            layer: The layer's index.
            query: `[heads, n, head_dim]`.
            key: `[kv_heads, n, head_dim]`.
            value: `[kv_heads, n, head_dim]`.
            scores: How the products of queries and keys become weights.

        Returns:
            `[n, heads, head_dim]`.
        """
        ...


class SegmentAttending(Attending, Protocol):
    """Computes the attention of segments, and remembers the tokens with non-finite keys or values."""

    def faulty(self) -> Sequence[int]:
        """Return the places of the tokens whose keys or values were not finite in any layer so far."""
        ...


# Receives a layer's index, and the mask and the sliding window that the model passes to its attention.
Requests: TypeAlias = Callable[[int, Tensor | None, int | None], None]


@dataclass(frozen=True)
class AttentionCall:
    """The argument that a forward pass hands to the attention function of every layer, and to recurrent layers.

    Attributes:
        attending: Computes the attention.
        shape: Shape to which keys and values are extended; None leaves them as they are.
        mask: Placeholder that the model received as its mask; None if the model builds masks itself.
        requests: Receives the masks that the model builds.
        recurring: Computes recurrent layers; None if the forward pass does not compute them.
    """

    attending: Attending
    shape: KVShape | None = None
    mask: Tensor | None = None
    requests: Requests | None = None
    recurring: Recurring | None = None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
    dynatree_call: AttentionCall | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: query `[1, heads, n, dim]`, key and value `[1, kv_heads, n, dim]`.

    Returns:
        The output `[1, n, heads, value_dim]`, and no attention weights.

    Raises:
        StartupError: The model asks for an attention that this function does not compute.
    """
    layer = getattr(module, "layer_idx", None)
    if dynatree_call is None or layer is None:
        raise StartupError("its layers do not pass keyword arguments and a layer index to their attention")
    _check_options(options)
    sinks = s_aux if sinks is None else sinks
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise StartupError("its attention sinks are not one number for each head, which DynaTree does not compute")
    if dynatree_call.requests is not None:
        dynatree_call.requests(layer, attention_mask, sliding_window)
    elif attention_mask is not None and attention_mask is not dynatree_call.mask:
        raise StartupError("its attention changes its mask, which DynaTree does not compute")
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sinks)
    shape = dynatree_call.shape
    extended = _extended(query[0], key[0], value[0], shape)
    if shape is not None:
        layer = shape.place(layer)
    output = dynatree_call.attending.attend(layer, *extended, scores)
    return output[None, :, :, : value.shape[-1]].contiguous(), None


def _extended(query: Tensor, key: Tensor, value: Tensor, shape: KVShape | None) -> tuple[Tensor, Tensor, Tensor]:
    """Give a layer's keys and values the shape of the KV cache: key heads are repeated, and sizes padded with zeros.

    A query head then still meets its own key head. Zeros change no product, and the output's surplus is cut.
    """
    if shape is None:
        return query, key, value
    if key.shape[0] < shape.kv_heads:
        times = shape.kv_heads // key.shape[0]
        key, value = key.repeat_interleave(times, 0), value.repeat_interleave(times, 0)
    query, key, value = (
        pad(each, (0, shape.head_dim - each.shape[-1])) if each.shape[-1] < shape.head_dim else each
        for each in (query, key, value)
    )
    return query, key, value


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse every argument that would change the scores."""
    refused = []
    for name, value in options.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if not (name == "dropout" and value == 0.0) and not (name == "is_causal" and value is True):
            refused.append(MEANINGS.get(name, f"`{name}`"))
    if refused:
        raise StartupError(f"its attention uses {', '.join(refused)}, which DynaTree does not compute")


AttentionInterface.register(NAME, attention)
requested_mask.register(NAME)
