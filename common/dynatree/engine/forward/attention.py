"""The attention function that every served model calls: each segment attends to its own range of the KV cache.

The function is registered with `transformers.AttentionInterface`, so no model-specific code is needed. It receives the
`AttentionCall` as a keyword argument of the model's forward pass. It computes softmax(query @ key) @ value over the
tokens visible in a segment's mask. It refuses every layer that asks for anything else: another mask, a window shorter
than the context, or an unknown argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from dynatree.common.errors import StartupError
from dynatree.engine.forward.batch_invariance import padded_keys, padded_queries
from dynatree.engine.forward.scores import Scores
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache

NAME = "dynatree"
# Readable names for some of the refused keyword arguments of transformers' attention functions.
MEANINGS = {
    "softcap": "softcapping of its scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "indices": "keys selected by an index",
    "block_indices": "keys selected by an index",
    "is_causal": "tokens that see later ones",
}
# Keyword arguments that change no score: they select return values, or give positions, which the keys already carry.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
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


class Batch:
    """Segments side by side in one row of tokens; the attention bias of each is built once for all layers.

    If `batch_invariant`, the segments' queries and keys are padded to batch-invariant sizes. Padded keys are masked,
    and a padded query repeats the segment's last one.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        kv_cache: KVCache,
        batch_invariant: bool = False,
    ) -> None:
        sizes = []  # per segment: numbers of queries and of keys, with padding
        for segment in segments:
            queries, keys = len(segment.token_ids), segment.stop
            if batch_invariant:
                queries, keys = padded_queries(queries), padded_keys(keys, kv_cache.shape.head_dim, kv_cache.dtype)
            sizes.append((queries, keys))
        places = list(accumulate((len(segment.token_ids) for segment in segments), initial=0))
        padded = list(accumulate((queries for queries, _ in sizes), initial=0))
        self._tokens = [slice(*span) for span in pairwise(places)]  # per segment, in the row of tokens
        self._queries = [slice(*span) for span in pairwise(padded)]  # per segment, in the padded row
        # per segment, in every layer: the KV slots that it reads, and the KV slots that it fills
        self._slots = [kv_cache.slots(each.kv, keys) for each, (_, keys) in zip(segments, sizes, strict=True)]
        self._filled = [kv_cache.slots(each.kv, each.stop)[:, :, :, each.start :] for each in segments]
        self._biases = [
            _bias(segment, size, kv_cache.dtype, kv_cache.device) for segment, size in zip(segments, sizes, strict=True)
        ]
        self._dtype = kv_cache.dtype
        self._largest: list[Tensor] = []  # per layer: largest magnitude of each token's keys and values, `[n]`
        self._spread = self._gathered = None  # token index of each padded place; padded place of each token
        if padded[-1] > places[-1]:
            spread, gathered = [], []
            for (start, stop), (queries, _), (size, _) in zip(pairwise(places), pairwise(padded), sizes, strict=True):
                spread += [min(start + place, stop - 1) for place in range(size)]
                gathered += [queries + place for place in range(stop - start)]
            self._spread = torch.tensor(spread, device=kv_cache.device)
            self._gathered = torch.tensor(gathered, device=kv_cache.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Store the new keys and values, then attend; see `Attending.attend`."""
        both = torch.stack((key, value)).to(self._dtype)  # [2, kv_heads, n, head_dim]
        self._largest.append(torch.linalg.vector_norm(both, math.inf, (0, 1, 3)))
        both.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        queries = query if self._spread is None else query.index_select(1, self._spread)
        grouped = query.shape[0] != key.shape[0]
        outputs = []  # per segment: [1, heads, padded tokens, head_dim]
        for tokens, padded, slots, filled, bias in zip(
            self._tokens, self._queries, self._slots, self._filled, self._biases, strict=True
        ):
            filled[layer].copy_(both[:, :, tokens])
            keys, values = slots[layer].unbind(0)  # [kv_heads, keys, head_dim]
            outputs.append(
                scaled_dot_product_attention(
                    queries[None, :, padded],
                    keys[None],
                    values[None],
                    attn_mask=bias,
                    is_causal=bias is None and padded.stop - padded.start > 1,
                    scale=scores.scale,
                    enable_gqa=grouped,
                )
            )
        output = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2))[0]
        return (output if self._gathered is None else output.index_select(1, self._gathered)).transpose(0, 1)

    def faulty(self) -> Sequence[int]:
        """See `SegmentAttending.faulty`."""
        if not self._largest:
            return ()
        finite = torch.stack(self._largest).isfinite().all(0)
        places: list[int] = (~finite).nonzero()[:, 0].tolist()
        return places


def _bias(segment: Segment, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the additive attention bias `[queries, keys]`, or None if plain causal or full attention suffices.

    Causal attention suffices for tokens from slot 0 on, and full attention for a single token.

    Args:
        segment: Segment with the mask.
        sizes: Numbers of queries and of keys, with padding.
        dtype: Data type of the bias.
        device: Device of the bias.
    """
    tokens = len(segment.token_ids)
    mask = segment.mask
    if mask is None:
        if sizes == (tokens, segment.stop) and (segment.start == 0 or tokens == 1):
            return None
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    bias = torch.zeros(sizes, dtype=dtype)
    bias[:tokens, segment.stop - mask.shape[1] : segment.stop].masked_fill_(~mask, float("-inf"))
    bias[:, segment.stop :] = float("-inf")
    return bias.to(device)


@dataclass(frozen=True)
class AttentionCall:
    """The argument that a forward pass hands to the attention function of every layer.

    Attributes:
        attending: Computes the attention.
        mask: Placeholder that the model received as its mask; None if the model builds masks itself.
        context_length: Length of the longest served sequence in tokens; a window at least as long has no effect.
    """

    attending: Attending
    mask: Tensor | None
    context_length: int


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dynatree_call: AttentionCall | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: query `[1, heads, n, dim]`, key and value `[1, kv_heads, n, dim]`.

    Returns:
        The output `[1, n, heads, dim]`, and no attention weights.

    Raises:
        StartupError: The model asks for an attention that this function does not compute.
    """
    layer = getattr(module, "layer_idx", None)
    if dynatree_call is None or layer is None:
        raise StartupError("its layers do not pass keyword arguments and a layer index to their attention")
    _check_options(options, dynatree_call.context_length)
    if attention_mask is not None and attention_mask is not dynatree_call.mask:
        _check_mask(attention_mask, dynatree_call.context_length)
    return dynatree_call.attending.attend(layer, query[0], key[0], value[0], Scores(scaling))[None], None


def _check_options(options: Mapping[str, Any], context_length: int) -> None:
    """Refuse every argument that would change the scores."""
    refused = []
    for name, value in options.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name == "sliding_window":
            if value < context_length:
                refused.append(f"a sliding window of {value} tokens, shorter than the context of {context_length}")
        elif not (name == "dropout" and value == 0.0) and not (name == "is_causal" and value is True):
            refused.append(MEANINGS.get(name, f"`{name}`"))
    if refused:
        raise StartupError(f"its attention uses {', '.join(refused)}, which DynaTree does not compute")


def _check_mask(mask: Tensor, context_length: int) -> None:
    """Refuse a mask that is not causal up to the end of the context."""
    shows = getattr(mask, "shows", None)
    if shows is None:
        raise StartupError("its attention adds a mask of the model's own, which DynaTree does not compute")
    queries = torch.tensor([[0], [context_length - 1]])
    keys = torch.arange(context_length)[None]
    try:
        visible = shows(torch.tensor(0), torch.tensor(0), queries, keys).expand(2, context_length)
    except (IndexError, RuntimeError, TypeError):  # the mask depends on more than positions
        visible = None
    if visible is None or not torch.equal(visible, keys <= queries):
        raise StartupError(
            f"its attention does not show every earlier token within {context_length} tokens (a sliding window, "
            "chunks, or a mask that is not causal)"
        )


def _requested_mask(*, mask_function: Callable[..., Tensor], device: torch.device, **_: Any) -> Tensor:
    """Return a placeholder mask that remembers the mask function of the model's request."""
    mask = torch.zeros(1, 1, 1, 1, device=device)
    mask.shows = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _requested_mask)
