"""The attention function that every served model calls: each segment against its own arena row.

Registered with `transformers.AttentionInterface`, so that no model-specific code is needed. The batch travels to it
as a keyword argument of the model's forward; a mask function that returns None keeps transformers from building its
own mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from dynatree.common.engine.alike import FEWEST_ROWS, filled_keys, filled_queries
from dynatree.common.engine.arena import KVArena, KVShape
from dynatree.common.errors import StartupError

NAME = "dynatree"


class Attending(Protocol):
    """What travels to the attention function through a model's forward."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Query `[heads, n, dim]`, key and value `[kv_heads, n, dim]` of one layer to the output `[n, heads, dim]`."""


@dataclass(frozen=True)
class Segment:
    """The tokens that one session puts through a forward.

    Token `i` is stored in slot `start + i` of arena row `row`, and is embedded at `positions[i]`.
    `mask` is bool `[n, m]` over the last `m` of the slots 0 to `start + n`; the slots before those are visible to every
    token. None means causal. `keep` names the tokens whose logits are wanted; None means all.
    """

    row: int
    start: int
    token_ids: Sequence[int]
    positions: Sequence[int]
    mask: Tensor | None = None
    keep: Sequence[int] | None = None

    @property
    def stop(self) -> int:
        """One past the last slot written."""
        return self.start + len(self.token_ids)


class Batch:
    """Segments laid side by side in one row of tokens, with the attention bias of each, built once for all layers.

    Where `alike`, a token behind a context attends the same to the last bit, whatever else is in its segment: queries
    and keys are filled up to what is summed alike, keys with masked ones.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        arena: KVArena,
        dtype: torch.dtype,
        device: torch.device,
        alike: bool = False,
    ) -> None:
        self.segments = segments
        self.arena = arena
        self._sizes = []  # of each segment: queries and keys
        for segment in segments:
            queries, keys = len(segment.token_ids), segment.stop
            if alike and (segment.start > 0 or queries < FEWEST_ROWS):
                queries, keys = filled_queries(queries), filled_keys(keys, arena.shape.head_dim, dtype)
            self._sizes.append((queries, keys))
        self.biases = [
            _bias(segment, sizes, dtype, device) for segment, sizes in zip(segments, self._sizes, strict=True)
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store the new keys and values, then attend: query `[heads, n, dim]` to output `[n, heads, dim]`."""
        outputs = []
        offset = 0
        for segment, bias, (most, stop) in zip(self.segments, self.biases, self._sizes, strict=True):
            tokens = len(segment.token_ids)
            span = slice(offset, offset + tokens)
            offset = span.stop
            self.arena.write(layer, segment.row, segment.start, key[:, span], value[:, span])
            keys, values = self.arena.read(layer, segment.row, stop)
            queries = query[None, :, span]
            if most > tokens:
                queries = pad(queries, (0, 0, 0, most - tokens))
            output = scaled_dot_product_attention(
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
    """The additive attention bias `[queries, keys]`, or None where plain causal or full attention will do."""
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


@dataclass
class Recorder:
    """Stands in for a batch while a model is probed: plain causal attention, noting each layer's key shape."""

    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Causal attention among the new tokens alone; shapes as in `Batch.attend`."""
        self.shapes[layer] = (key.shape[0], key.shape[2])
        grouped = query.shape[0] != key.shape[0]
        return scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=grouped
        )[0].transpose(0, 1)

    def kv_shape(self) -> KVShape:
        """The one shape that all layers share.

        Raises:
            StartupError: No layer called the attention function, or layers differ.
        """
        if sorted(self.shapes) != list(range(len(self.shapes))) or len(set(self.shapes.values())) != 1:
            raise StartupError("its layers do not all attend in one shape through transformers' attention interface")
        kv_heads, head_dim = self.shapes[0]
        return KVShape(len(self.shapes), kv_heads, head_dim)


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
    refused = [name for name in ("softcap", "s_aux", "position_bias", "head_mask") if options.get(name) is not None]
    if refused:
        raise StartupError(f"its attention uses {', '.join(refused)}, which DynaTree does not compute")
    return dynatree_batch.attend(layer, query[0], key[0], value[0], scaling)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)
