"""The attention function that every served model calls: each segment attends to its own range of the arena.

It is registered with `transformers.AttentionInterface`, so no model-specific code is needed. The call travels to it as
a keyword argument of the model's forward. It computes softmax(query @ key) @ value over the tokens that a segment's
mask shows, and refuses every layer that asks for anything else: another mask, a window shorter than the context, or any
argument that it does not know.
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

from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.batch_invariance import padded_keys, padded_queries
from dynatree.common.engine.segment import Segment
from dynatree.common.errors import StartupError

NAME = "dynatree"
# Names for some keyword arguments of transformers' attention functions that are refused, as all unknown ones are.
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
# Keyword arguments that change no score: what a caller wants returned, and the positions, which are in the keys.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)


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


class SegmentAttending(Attending, Protocol):
    """What computes the attention of segments, and remembers which tokens' keys or values were not finite."""

    def faulty(self) -> Sequence[int]:
        """The places of tokens whose keys or values were not finite, in any layer so far."""
        ...


class Batch:
    """Segments laid side by side in one row of tokens, with the attention bias of each, built once for all layers.

    If `batch_invariant`, the segments' queries and keys are padded to batch-invariant sizes. Padded keys are masked,
    and a padded query repeats the segment's last one.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        arena: KVArena,
        batch_invariant: bool = False,
    ) -> None:
        sizes = []  # of each segment: numbers of queries and of keys, with padding
        for segment in segments:
            queries, keys = len(segment.token_ids), segment.stop
            if batch_invariant:
                queries, keys = padded_queries(queries), padded_keys(keys, arena.shape.head_dim, arena.dtype)
            sizes.append((queries, keys))
        places = list(accumulate((len(segment.token_ids) for segment in segments), initial=0))
        padded = list(accumulate((queries for queries, _ in sizes), initial=0))
        self._tokens = [slice(*span) for span in pairwise(places)]  # of each segment, in the row of tokens
        self._queries = [slice(*span) for span in pairwise(padded)]  # likewise, with padding
        # of each segment, in every layer: the slots that it reads, and those that it fills
        self._slots = [arena.slots(each.kv, keys) for each, (_, keys) in zip(segments, sizes, strict=True)]
        self._filled = [arena.slots(each.kv, each.stop)[:, :, :, each.start :] for each in segments]
        self._biases = [
            _bias(segment, size, arena.dtype, arena.device) for segment, size in zip(segments, sizes, strict=True)
        ]
        self._dtype = arena.dtype
        self._largest: list[Tensor] = []  # of each layer's keys and values, `[n]`: not finite where any is not
        self._spread = self._gathered = None  # indices of tokens, by padded place; of padded places, by token
        if padded[-1] > places[-1]:
            spread, gathered = [], []
            for (start, stop), (queries, _), (size, _) in zip(pairwise(places), pairwise(padded), sizes, strict=True):
                spread += [min(start + place, stop - 1) for place in range(size)]
                gathered += [queries + place for place in range(stop - start)]
            self._spread = torch.tensor(spread, device=arena.device)
            self._gathered = torch.tensor(gathered, device=arena.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store the new keys and values, then attend; as `Attending.attend`."""
        both = torch.stack((key, value)).to(self._dtype)  # [2, kv_heads, n, head_dim]
        self._largest.append(torch.linalg.vector_norm(both, math.inf, (0, 1, 3)))
        both.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        queries = query if self._spread is None else query.index_select(1, self._spread)
        grouped = query.shape[0] != key.shape[0]
        outputs = []  # of each segment: [1, heads, padded tokens, head_dim]
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
                    scale=scale,
                    enable_gqa=grouped,
                )
            )
        output = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2))[0]
        return (output if self._gathered is None else output.index_select(1, self._gathered)).transpose(0, 1)

    def faulty(self) -> Sequence[int]:
        """As `SegmentAttending.faulty`."""
        if not self._largest:
            return ()
        finite = torch.stack(self._largest).isfinite().all(0)
        places: list[int] = (~finite).nonzero()[:, 0].tolist()
        return places


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


@dataclass(frozen=True)
class AttentionCall:
    """What a forward hands to the attention function of every layer.

    Attributes:
        attending: Computes the attention.
        mask: The placeholder that the model got as its mask; None where the model asked for masks itself.
        context_length: Tokens of the longest sequence that is served; a window as long changes nothing.
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
    """The registered function: query `[1, heads, n, dim]`, key and value `[1, kv_heads, n, dim]`.

    Returns:
        The output `[1, n, heads, dim]`, and no attention weights.

    Raises:
        StartupError: The model asks for an attention that is not computed here.
    """
    layer = getattr(module, "layer_idx", None)
    if dynatree_call is None or layer is None:
        raise StartupError("its layers do not pass keyword arguments and a layer index to their attention")
    _check_options(options, dynatree_call.context_length)
    if attention_mask is not None and attention_mask is not dynatree_call.mask:
        _check_mask(attention_mask, dynatree_call.context_length)
    return dynatree_call.attending.attend(layer, query[0], key[0], value[0], scaling)[None], None


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
    """Refuse a mask that is not the causal one up to the end of the context."""
    shows = getattr(mask, "shows", None)
    if shows is None:
        raise StartupError("its attention adds a mask of the model's own, which DynaTree does not compute")
    queries = torch.tensor([[0], [context_length - 1]])
    keys = torch.arange(context_length)[None]
    try:
        visible = shows(torch.tensor(0), torch.tensor(0), queries, keys).expand(2, context_length)
    except (IndexError, RuntimeError, TypeError):  # it depends on more than positions
        visible = None
    if visible is None or not torch.equal(visible, keys <= queries):
        raise StartupError(
            f"its attention does not show every earlier token within {context_length} tokens (a sliding window, "
            "chunks, or a mask that is not causal)"
        )


def _requested_mask(*, mask_function: Callable[..., Tensor], device: torch.device, **_: Any) -> Tensor:
    """The registered mask function: a placeholder that remembers which mask the model asked for."""
    mask = torch.zeros(1, 1, 1, 1, device=device)
    mask.shows = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _requested_mask)
