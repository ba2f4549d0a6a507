"""The attention function that every served model calls: each segment attends to its own range of the arena.

It is registered with `transformers.AttentionInterface`, so no model-specific code is needed. The batch travels to it as
a keyword argument of the model's forward. The registered mask function returns None, so transformers builds no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.batch_invariance import MIN_ROWS, padded_keys, padded_queries
from dynatree.common.engine.segment import Segment
from dynatree.common.errors import StartupError

NAME = "dynatree"
# Keyword arguments of transformers' attention functions that ask for more than softmax(query @ key) @ value.
VARIANTS = {
    "softcap": "softcapping of its scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
}


class Attending(Protocol):
    """Computes the attention of one forward; it travels to the attention function through the model."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """One layer's attention of the forward's `n` tokens.

        Args:
            layer: The layer's index.
            query: `[heads, n, head_dim]`.
            key: `[kv_heads, n, head_dim]`.
            value: `[kv_heads, n, head_dim]`.
            scale: Of the scores; None means `head_dim ** -0.5`.

        Returns:
            `[n, heads, head_dim]`.
        """
        ...


class Batch:
    """Segments laid side by side in one row of tokens, with the attention bias of each, built once for all layers.

    If `batch_invariant`, the segments' queries and keys are padded to batch-invariant sizes. Padded keys are masked.
    Prompts are not padded: each is read in one forward of its own size under every policy.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        arena: KVArena,
        batch_invariant: bool = False,
    ) -> None:
        self.segments = segments
        self.arena = arena
        self._sizes = []  # of each segment: numbers of queries and of keys, with padding
        for segment in segments:
            queries, keys = len(segment.token_ids), segment.stop
            if batch_invariant and (segment.start > 0 or queries < MIN_ROWS):
                queries, keys = padded_queries(queries), padded_keys(keys, arena.shape.head_dim, arena.dtype)
            self._sizes.append((queries, keys))
        self.biases = [
            _bias(segment, sizes, arena.dtype, arena.device)
            for segment, sizes in zip(segments, self._sizes, strict=True)
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store the new keys and values, then attend; as `Attending.attend`."""
        outputs = []  # of each segment: [1, heads, tokens, head_dim]
        offset = 0
        for segment, bias, (padded_tokens, stop) in zip(self.segments, self.biases, self._sizes, strict=True):
            tokens = len(segment.token_ids)
            span = slice(offset, offset + tokens)
            offset = span.stop
            self.arena.write(layer, segment.kv, segment.start, key[:, span], value[:, span])
            keys, values = self.arena.read(layer, segment.kv, stop)  # [kv_heads, stop, head_dim]
            queries = query[None, :, span]  # [1, heads, tokens, head_dim]
            if padded_tokens > tokens:
                queries = pad(queries, (0, 0, 0, padded_tokens - tokens))
            output = scaled_dot_product_attention(  # [1, heads, padded_tokens, head_dim]
                queries,
                keys[None],
                values[None],
                attn_mask=bias,
                is_causal=bias is None and tokens > 1,
                scale=scale,
                enable_gqa=query.shape[0] != keys.shape[0],
            )
            outputs.append(output[:, :, :tokens])
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2))[0].transpose(0, 1)


def _bias(segment: Segment, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The additive attention bias `[queries, keys]`; None where causal attention from slot 0, or full attention, does.

    Args:
        segment: Whose mask it is.
        sizes: Numbers of queries and of keys, with padding.
        dtype: Of the bias.
        device: Of the bias.
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


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dynatree_batch: Attending | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The registered function: query `[1, heads, n, dim]`, key and value `[1, kv_heads, n, dim]`.

    Returns:
        The output `[1, n, heads, dim]`, and no attention weights.

    Raises:
        StartupError: The model asks for an attention variant that is not computed here.
    """
    layer = getattr(module, "layer_idx", None)
    if dynatree_batch is None or layer is None:
        raise StartupError("its layers do not pass keyword arguments and a layer index to their attention")
    refused = [meaning for name, meaning in VARIANTS.items() if options.get(name) is not None]
    if refused:
        raise StartupError(f"its attention uses {', '.join(refused)}, which DynaTree does not compute")
    return dynatree_batch.attend(layer, query[0], key[0], value[0], scaling)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)
