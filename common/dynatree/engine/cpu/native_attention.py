"""Attention by the project's own CPU kernel: one call for each layer over all segments (`native/attention.c`).

torch's attention is optimized for many queries. With one query for each head, it takes several times as long as reading
the keys and values, and each session of a pass needs a separate call. The kernel reads every key and value once for all
queries of a segment, and stores the new keys and values in the same call.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from itertools import accumulate, product

import torch
from torch import Tensor

from dynatree.engine.cpu.native import DTYPES, address, call, lying
from dynatree.engine.forward.narrowing import narrowed
from dynatree.engine.forward.scores import Scores
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache
from dynatree.engine.kv.locality import Locality

TILE = 64  # slots that the kernel reads together


class SegmentStructure(ctypes.Structure):
    """`struct segment` of `native/kernels.h`."""

    _fields_ = (
        ("first", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("base", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("mask", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("lowest", ctypes.c_void_p),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("query_head", ctypes.c_int64),
        ("query_token", ctypes.c_int64),
        ("key_head", ctypes.c_int64),
        ("key_token", ctypes.c_int64),
        ("value_head", ctypes.c_int64),
        ("value_token", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("cache_head", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("faulty", ctypes.c_void_p),
    )


class Shape(ctypes.Structure):
    """`struct shape` of `native/kernels.h`."""

    _fields_ = (
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )


def structures_of(
    segments: Sequence[Segment], kv_cache: KVCache, localities: Sequence[Locality]
) -> tuple[ctypes.Array[SegmentStructure], list[Tensor]]:
    """Return the kernels' structures of all segments under one locality after the other.

    Returns:
        The structures, and the tensors that they point at, which must outlive them.

    Raises:
        IndexError: A slot is outside the session's range or the KV cache; the kernels do not check bounds.
        ValueError: A mask or the positions do not fit the tokens.
    """
    tensors: list[Tensor] = []
    structures = (SegmentStructure * (len(localities) * len(segments)))()
    placed = list(zip(segments, accumulate(len(each.token_ids) for each in segments), strict=True))
    for structure, (locality, (each, stop)) in zip(structures, product(localities, placed), strict=True):
        if each.start < 0 or each.stop > each.kv.size:
            raise IndexError(f"slots {each.start} to {each.stop} are outside a range of {each.kv.size} slots")
        if each.kv.start < 0 or each.kv.start + each.stop > kv_cache.size:
            raise IndexError(
                f"slots {each.kv.start} to {each.kv.start + each.stop} are outside a KV cache of {kv_cache.size} slots"
            )
        structure.tokens = len(each.token_ids)
        structure.first = stop - structure.tokens
        structure.base, structure.start = each.kv.start, each.start
        if each.mask is not None:
            mask = each.mask.contiguous()
            structure.mask, structure.columns = address(mask, torch.bool, structure.tokens, -1), mask.shape[1]
            if structure.columns > each.stop:
                raise ValueError(f"a mask has {structure.columns} columns, expected at most {each.stop} slots")
            tensors.append(mask)
        if locality.changes(max(each.positions, default=0) + 1):
            tensors += _narrow(structure, each, locality)
    return structures, tensors


def _narrow(structure: SegmentStructure, segment: Segment, locality: Locality) -> list[Tensor]:
    """Hide the slots that a locality hides; slots are then counted from the first tile that a token sees.

    Returns:
        The tensors that the structure points at.

    Raises:
        ValueError: The positions do not fit the tokens.
    """
    if len(segment.positions) != structure.tokens:
        raise ValueError(f"expected a position for each of {structure.tokens} tokens, got {len(segment.positions)}")
    mask, lowest = narrowed(segment, locality)
    if mask is None:
        if (lowest > torch.arange(segment.start, segment.stop)).any():
            raise ValueError("a token's position is so far beyond its slot that the token does not see itself")
        tensors = [lowest]
    else:
        structure.mask = address(mask, torch.bool, structure.tokens, structure.columns)
        lowest.clamp_(max=segment.stop - structure.columns)
        tensors = [lowest, mask]
    unseen = int(lowest.min()) // TILE * TILE
    lowest -= unseen
    structure.base += unseen
    structure.start -= unseen
    structure.lowest = address(lowest, torch.int64, structure.tokens)
    return tensors


class NativeBatch:
    """Segments side by side in one row of tokens; implements `SegmentAttending`.

    A query's result has the same bits however a prompt is split into pieces, so no padding is needed.
    """

    def __init__(self, segments: Sequence[Segment], kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        self._segments = segments
        self._structures: dict[Locality, tuple[ctypes.Array[SegmentStructure], list[Tensor]]] = {}
        self._tokens = sum(len(segment.token_ids) for segment in segments)
        self._faulty = array("B", bytes(self._tokens))
        self._layer = _Layer(faulty=self._faulty.buffer_info()[0])
        self._shape = Shape()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Store the new keys and values, then attend; see `Attending.attend`.

        Raises:
            IndexError: There is no such layer, or a slot is outside the session's range or the KV cache.
            MemoryError: The kernel cannot allocate its working memory.
            ValueError: A tensor does not fit these tokens and this KV cache, the number of query heads is not a
                multiple of the number of key heads, or the cap is not a positive number.
        """
        locality = self._kv_cache.shape.locality(layer)
        if locality not in self._structures:
            self._structures[locality] = structures_of(self._segments, self._kv_cache, [locality])
        structures, _ = self._structures[locality]
        dtype, heads, tokens = self._kv_cache.dtype, query.shape[0], self._tokens
        kv_heads, dim = self._kv_cache.shape.kv_heads, self._kv_cache.shape.head_dim
        query, key, value = (lying(each, dtype) for each in (query, key, value))
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key heads")
        if scores.cap is not None and not 0.0 < scores.cap < math.inf:
            raise ValueError(f"the scores' cap is {scores.cap}, expected a positive number")
        output = torch.empty(tokens, heads, dim, dtype=dtype)
        sinks = None if scores.sinks is None else lying(scores.sinks, torch.float32)
        slots = self._kv_cache.layer(layer)
        to, shape = self._layer, self._shape
        to.query, to.query_head, to.query_token = _rows(query, dtype, heads, tokens, dim)
        to.key, to.key_head, to.key_token = _rows(key, dtype, kv_heads, tokens, dim)
        to.value, to.value_head, to.value_token = _rows(value, dtype, kv_heads, tokens, dim)
        to.keys = address(slots, dtype, 2, kv_heads, -1, dim)
        to.values = to.keys + slots.stride(0) * slots.element_size()
        to.cache_head, to.output = slots.stride(1), address(output, dtype, tokens, heads, dim)
        to.sinks = None if sinks is None else address(sinks, torch.float32, heads)
        shape.heads, shape.kv_heads, shape.dim, shape.dtype = heads, kv_heads, dim, DTYPES[dtype]
        shape.scale = dim**-0.5 if scores.scale is None else scores.scale
        shape.cap = scores.cap or 0.0
        call("dynatree_attention", ctypes.byref(to), ctypes.byref(shape), structures, len(structures))
        return output

    def faulty(self) -> Sequence[int]:
        """See `SegmentAttending.faulty`."""
        return marked(self._faulty)


def marked(flags: array[int]) -> Sequence[int]:
    """Return the places of the flags that a kernel has set."""
    return [place for place, flag in enumerate(flags) if flag] if 1 in flags.tobytes() else ()


def _rows(tensor: Tensor, dtype: torch.dtype, *shape: int) -> tuple[int, int, int]:
    """Return the address of a tensor `[heads, tokens, dim]`, and its strides over heads and tokens."""
    return address(tensor, dtype, *shape, rows_apart=True), tensor.stride(0), tensor.stride(1)
