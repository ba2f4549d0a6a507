"""Attention by a kernel of our own, for CPUs: one call a layer over all segments (`native/attention.c`).

torch's attention is made for many queries. At one query a head it takes several times what reading the keys and values
takes, and each session of a pass needs a call of its own. The kernel reads every key and value once, for all queries of
a segment, and stores the new ones on the way.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.native import DTYPES, address, call, lying
from dynatree.common.engine.segment import Segment


class SegmentStructure(ctypes.Structure):
    """`struct segment` of `native/kernels.h`."""

    _fields_ = (
        ("first", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("base", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("mask", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
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
        ("arena_head", ctypes.c_int64),
        ("output", ctypes.c_void_p),
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
    )


def structures_of(segments: Sequence[Segment], arena: KVArena) -> tuple[ctypes.Array[SegmentStructure], list[Tensor]]:
    """Segments as the kernels take them, and the masks that these point at, which must live as long.

    Raises:
        IndexError: A slot is not the session's own, or not of the arena: the kernels write where they are told.
        ValueError: A mask does not fit the tokens.
    """
    masks = []
    structures = (SegmentStructure * len(segments))()
    first = 0
    for each, structure in zip(segments, structures, strict=True):
        if each.start < 0 or each.stop > each.kv.size:
            raise IndexError(f"slots {each.start} to {each.stop} are not in a range of {each.kv.size}")
        if each.kv.start < 0 or each.kv.start + each.stop > arena.size:
            raise IndexError(f"a range at slot {each.kv.start} is not in an arena of {arena.size}")
        structure.first, structure.tokens = first, len(each.token_ids)
        structure.base, structure.start = each.kv.start, each.start
        if each.mask is not None:
            mask = each.mask.contiguous()
            structure.mask, structure.columns = address(mask, torch.bool, structure.tokens, -1), mask.shape[1]
            if structure.columns > each.stop:
                raise ValueError(f"a mask has {structure.columns} columns, expected at most {each.stop} slots")
            masks.append(mask)
        first += structure.tokens
    return structures, masks


class NativeBatch:
    """Segments laid side by side in one row of tokens; implements `SegmentAttending`.

    A query's result has the same bits in whatever pieces a prompt is read: no padding is needed.
    """

    def __init__(self, segments: Sequence[Segment], arena: KVArena) -> None:
        self._arena = arena
        self._segments, self._masks = structures_of(segments, arena)
        self._tokens = sum(len(segment.token_ids) for segment in segments)
        self._faulty = array("B", bytes(self._tokens))
        self._layer = _Layer(faulty=self._faulty.buffer_info()[0])
        self._shape = Shape()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store the new keys and values, then attend; as `Attending.attend`.

        Raises:
            MemoryError: There is none for the kernel's own numbers.
            ValueError: A tensor is not of these tokens and this arena, or the heads of keys do not share those of
                queries evenly.
        """
        dtype, heads, tokens = self._arena.dtype, query.shape[0], self._tokens
        kv_heads, dim = self._arena.shape.kv_heads, self._arena.shape.head_dim
        query, key, value = (lying(each, dtype) for each in (query, key, value))
        if heads % kv_heads:
            raise ValueError(f"{heads} heads of queries are no multiple of {kv_heads} of keys")
        output = torch.empty(tokens, heads, dim, dtype=dtype)
        slots = self._arena.layer(layer)
        to, shape = self._layer, self._shape
        to.query, to.query_head, to.query_token = _rows(query, dtype, heads, tokens, dim)
        to.key, to.key_head, to.key_token = _rows(key, dtype, kv_heads, tokens, dim)
        to.value, to.value_head, to.value_token = _rows(value, dtype, kv_heads, tokens, dim)
        to.keys = address(slots, dtype, 2, kv_heads, -1, dim)
        to.values = to.keys + slots.stride(0) * slots.element_size()
        to.arena_head, to.output = slots.stride(1), address(output, dtype, tokens, heads, dim)
        shape.heads, shape.kv_heads, shape.dim, shape.dtype = heads, kv_heads, dim, DTYPES[dtype]
        shape.scale = dim**-0.5 if scale is None else scale
        call("dynatree_attention", ctypes.byref(to), ctypes.byref(shape), self._segments, len(self._segments))
        return output

    def faulty(self) -> Sequence[int]:
        """As `SegmentAttending.faulty`."""
        return marked(self._faulty)


def marked(flags: array[int]) -> Sequence[int]:
    """The places of the flags that a kernel has set."""
    return [place for place, flag in enumerate(flags) if flag] if 1 in flags.tobytes() else ()


def _rows(tensor: Tensor, dtype: torch.dtype, *shape: int) -> tuple[int, int, int]:
    """Where `[heads, tokens, dim]` lie, and the strides of heads and tokens."""
    return address(tensor, dtype, *shape, rows_apart=True), tensor.stride(0), tensor.stride(1)
