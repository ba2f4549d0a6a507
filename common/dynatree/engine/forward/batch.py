"""Attention by torch: segments side by side in one row of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dynatree.engine.forward.batch_invariance import KEY_BLOCK, padded_keys, padded_queries
from dynatree.engine.forward.narrowing import narrowed
from dynatree.engine.forward.scores import Scores
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache
from dynatree.engine.kv.locality import GLOBAL, Locality

_MOST_SCORES = 1 << 24  # scores computed at a time where torch's attention cannot be used; 64 MiB


@dataclass(frozen=True)
class _Reads:
    """The part of the KV cache that a segment reads in the layers of one locality.

    Attributes:
        slots: Keys and values, `[layers, 2, kv_heads, keys, head_dim]`.
        bias: Additive attention bias `[queries, keys]`; None if plain causal or full attention suffices.
    """

    slots: Tensor
    bias: Tensor | None


class Batch:
    """Segments side by side in one row of tokens; implements `SegmentAttending`.

    The attention biases are built once for all layers of a locality. If `batch_invariant`, the segments' queries and
    keys are padded to batch-invariant sizes. Padded keys are masked, and a padded query repeats the segment's last one.
    Layers with capped scores or sinks are not batch-invariant: torch's attention supports neither, so float32 matrix
    products compute these layers, and the order of their sums depends on the sizes.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        kv_cache: KVCache,
        batch_invariant: bool = False,
    ) -> None:
        self._segments = segments
        self._kv_cache = kv_cache
        self._batch_invariant = batch_invariant
        counts = [len(segment.token_ids) for segment in segments]
        self._padded_counts = [padded_queries(count) if batch_invariant else count for count in counts]
        places = list(accumulate(counts, initial=0))
        padded = list(accumulate(self._padded_counts, initial=0))
        self._tokens = [slice(*span) for span in pairwise(places)]  # per segment, in the row of tokens
        self._queries = [slice(*span) for span in pairwise(padded)]  # per segment, in the padded row
        self._filled = [kv_cache.slots(each.kv, each.stop)[:, :, :, each.start :] for each in segments]
        self._reads: dict[Locality, list[_Reads]] = {}  # per segment
        self._largest: list[Tensor] = []  # per layer: largest magnitude of each token's keys and values, `[n]`
        self._spread = self._gathered = None  # token index of each padded place; padded place of each token
        if padded[-1] > places[-1]:
            spread, gathered = [], []
            for (start, stop), (queries, beyond) in zip(pairwise(places), pairwise(padded), strict=True):
                spread += [min(start + place, stop - 1) for place in range(beyond - queries)]
                gathered += [queries + place for place in range(stop - start)]
            self._spread = torch.tensor(spread, device=kv_cache.device)
            self._gathered = torch.tensor(gathered, device=kv_cache.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Store the new keys and values, then attend; see `Attending.attend`."""
        both = torch.stack((key, value)).to(self._kv_cache.dtype)  # [2, kv_heads, n, head_dim]
        self._largest.append(torch.linalg.vector_norm(both, math.inf, (0, 1, 3)))
        both.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        queries = query if self._spread is None else query.index_select(1, self._spread)
        outputs = []  # per segment: [heads, padded tokens, head_dim]
        for tokens, padded, filled, reads in zip(
            self._tokens, self._queries, self._filled, self._reads_of(layer), strict=True
        ):
            filled[layer].copy_(both[:, :, tokens])
            keys, values = reads.slots[layer].unbind(0)  # [kv_heads, keys, head_dim]
            outputs.append(_attention(queries[:, padded], keys, values, reads.bias, scores))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return (output if self._gathered is None else output.index_select(1, self._gathered)).transpose(0, 1)

    def faulty(self) -> Sequence[int]:
        """See `SegmentAttending.faulty`."""
        if not self._largest:
            return ()
        finite = torch.stack(self._largest).isfinite().all(0)
        places: list[int] = (~finite).nonzero()[:, 0].tolist()
        return places

    def _reads_of(self, layer: int) -> list[_Reads]:
        locality = self._kv_cache.shape.locality(layer)
        if locality not in self._reads:
            self._reads[locality] = [
                self._read(segment, queries, locality)
                for segment, queries in zip(self._segments, self._padded_counts, strict=True)
            ]
        return self._reads[locality]

    def _read(self, segment: Segment, queries: int, locality: Locality) -> _Reads:
        """Return the slots that a segment with `queries` padded queries reads, and their bias.

        Whole blocks of keys that no token sees are left out, so that the others are summed in the same order.
        """
        cache, tokens, first = self._kv_cache, len(segment.token_ids), 0
        mask, lowest = segment.mask, None
        if locality != GLOBAL:
            mask, lowest = narrowed(segment, locality)
            first = int(lowest.min()) // KEY_BLOCK * KEY_BLOCK
            if mask is None:
                mask = _causal(tokens) & (torch.arange(segment.start, segment.stop) >= lowest[:, None])
        keys = segment.stop - first
        if self._batch_invariant:
            keys = padded_keys(keys, cache.shape.head_dim, cache.dtype)
        slots = cache.slots(segment.kv, first + keys)[:, :, :, first:]
        if mask is None:
            if (queries, keys) == (tokens, segment.stop) and (segment.start == 0 or tokens == 1):
                return _Reads(slots, None)
            mask = _causal(tokens)
        return _Reads(slots, _bias(segment, mask, lowest, first, (queries, keys), cache.dtype).to(cache.device))


def _attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scores: Scores) -> Tensor:
    """Return softmax(query @ key) @ value, `[heads, n, head_dim]`.

    Args:
        query: `[heads, n, head_dim]`.
        key: `[kv_heads, keys, head_dim]`.
        value: `[kv_heads, keys, head_dim]`.
        bias: `[n, keys]`; None means causal from the first key on, or for one query, full attention.
        scores: How the products become weights.
    """
    heads, count, _ = query.shape
    if scores.cap is None and scores.sinks is None:
        output: Tensor = scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=bias,
            is_causal=bias is None and count > 1,
            scale=scores.scale,
            enable_gqa=heads != key.shape[0],
        )
        return output[0]
    if bias is None:
        bias = torch.full((count, count), -math.inf, device=query.device).triu(1) if count > 1 else query.new_zeros(1)
    bias, key, value = bias.expand(count, key.shape[1]), key.float(), value.float()
    starts = range(0, count, max(_MOST_SCORES // (heads * key.shape[1]), 1))
    pieces = (slice(start, start + starts.step) for start in starts)
    return torch.cat([_explicit(query[:, piece], bias[piece], key, value, scores) for piece in pieces], 1)


def _explicit(query: Tensor, bias: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Compute `_attention` in float32 with capped scores, and with sinks beside them.

    A sink is one more score in the softmax of its query head, whose weight is dropped.
    """
    heads, count, size = query.shape
    grouped = query.float().reshape(len(key), -1, size)  # [kv_heads, heads / kv_heads * n, head_dim]
    products = scores.capped((grouped @ key.mT).view(heads, count, -1) * scores.factor(size)) + bias
    if scores.sinks is not None:
        products = torch.cat((products, scores.sinks.float()[:, None, None].expand(-1, count, 1)), -1)
    weights = products.softmax(-1)[:, :, : key.shape[1]]
    return (weights.reshape(len(key), -1, key.shape[1]) @ value).view(heads, count, size).to(query.dtype)


def _causal(tokens: int) -> Tensor:
    """Return the mask of a causal segment over its own tokens."""
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def _bias(
    segment: Segment, mask: Tensor, lowest: Tensor | None, first: int, sizes: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the additive attention bias `[queries, keys]`.

    Args:
        segment: The segment.
        mask: Mask over the segment's last slots, as `Segment.mask`.
        lowest: The lowest slot before the mask's columns that each token sees, `[n]`; None means slot 0.
        first: First slot that is read.
        sizes: Numbers of queries and of keys, with padding.
        dtype: Data type of the bias.
    """
    tokens, stop = len(segment.token_ids), segment.stop - first
    mask = mask[:, max(mask.shape[1] - stop, 0) :]
    before = stop - mask.shape[1]
    bias = torch.zeros(sizes, dtype=dtype)
    bias[:tokens, before:stop].masked_fill_(~mask, -math.inf)
    if lowest is not None:
        bias[:tokens, :before].masked_fill_(torch.arange(first, first + before) < lowest[:, None], -math.inf)
    bias[:, stop:] = -math.inf
    return bias
