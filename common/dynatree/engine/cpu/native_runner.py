"""The runner of a program: a forward pass over any number of segments is one call of the kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dynatree.engine.cpu.native import address, call
from dynatree.engine.cpu.native_attention import SegmentStructure, Shape, marked, structures_of
from dynatree.engine.cpu.native_program import Program
from dynatree.engine.forward.not_finite import spoil
from dynatree.engine.forward.offloaded_layers import OffloadedLayers
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache

_LEAST_POSITIONS = 256
_ALIGNMENT = 64  # bytes; a cache line
_NUMBERS = "q"  # type code of int64 arrays


class _Program(ctypes.Structure):
    _fields_ = (("operations", ctypes.c_void_p), ("count", ctypes.c_int64), ("shape", Shape))


class _Rotary(ctypes.Structure):
    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_int64),
        ("kept", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("keep", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("rotaries", ctypes.POINTER(_Rotary)),
        ("segments", ctypes.POINTER(SegmentStructure)),
        ("segment_count", ctypes.c_int64),
        ("localities", ctypes.c_int64),
        ("locality", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("cache_layer", ctypes.c_int64),
        ("cache_values", ctypes.c_int64),
        ("cache_head", ctypes.c_int64),
        ("faulty", ctypes.c_void_p),
    )


class NativeRunner:
    """Implements `Runner`, with little Python: after a forward pass, the caches hold none of Python's code and data.

    Args:
        program: Program of the model.
        kv_cache: KV cache that stores keys and values.
        offloaded: Loads the model's last layers into memory while the layers before them compute.
    """

    def __init__(self, program: Program, kv_cache: KVCache, offloaded: OffloadedLayers | None = None) -> None:
        self._program = program
        self._offloaded = offloaded
        cuts = [0, *(program.layers[offloaded.first :] if offloaded else ()), len(program.operations)]
        size = ctypes.sizeof(program.operations) // len(program.operations)
        at = ctypes.addressof(program.operations)
        # one kernel call for each part: all, or all before the offloaded layers, each offloaded layer, and the rest
        self._parts = [_Program(at + size * start, stop - start, program.shape) for start, stop in pairwise(cuts)]
        embeddings: Any = program.model.get_input_embeddings()
        self._vocab_size: int = embeddings.num_embeddings
        self._memory = torch.empty(0, dtype=torch.uint8)  # memory of all buffers except the logits
        self._buffers = (ctypes.c_void_p * len(program.widths))()
        self._buffered = -1  # number of tokens that the buffers are laid out for
        self._rotaries = (_Rotary * len(program.rotaries))()
        self._turns: list[Tensor] = []  # cosines and sines, each [positions, rotary size]
        self._reached = 0  # positions that have cosines and sines
        self._call = _Call(rotaries=self._rotaries)
        self._call.buffers = ctypes.addressof(self._buffers)
        slots, shape = kv_cache.layer(0), program.shape  # [2, kv_heads, slots, dim]
        layers = len(program.layers) - 1
        of_layers = [kv_cache.shape.locality(layer) for layer in range(layers)]
        self._localities = list(dict.fromkeys(of_layers))
        self._of_layers = array(_NUMBERS, map(self._localities.index, of_layers))
        self._call.localities, self._call.locality = len(self._localities), self._of_layers.buffer_info()[0]
        self._call.cache = address(kv_cache.data, program.dtype, layers, 2, shape.kv_heads, -1, shape.dim)
        self._call.cache_layer = slots.numel()
        self._call.cache_values, self._call.cache_head = slots.stride(0), slots.stride(1)
        self._kv_cache = kv_cache  # kept alive because the call points at it

    def run(self, segments: Sequence[Segment]) -> list[Tensor]:
        """See `Runner.run`.

        Raises:
            IndexError: A token is not in the vocabulary, a kept index has no token, or a slot is not the session's.
            ValueError: Positions or a mask do not fit the tokens.
            MemoryError: The kernels cannot allocate their working memory.
        """
        tokens, positions, keep = array(_NUMBERS), array(_NUMBERS), array(_NUMBERS)
        kept = []
        for segment in segments:
            first, size = len(tokens), len(segment.token_ids)
            tokens.extend(segment.token_ids)
            positions.extend(segment.positions)
            wanted = range(size) if segment.keep is None else segment.keep
            if wanted and not 0 <= min(wanted) <= max(wanted) < size:
                raise IndexError(f"keep has an index that is not in [0, {size})")
            keep.extend(first + index for index in wanted)
            kept.append(len(wanted))
        count = len(tokens)
        if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise IndexError(f"a token is not in [0, {self._vocab_size})")
        if len(positions) != count or min(positions) < 0:
            raise ValueError(f"expected a position of at least 0 for each of {count} tokens")
        self._reach(max(positions))
        self._lay_out(max(count, len(keep)))
        logits = torch.empty(len(keep), self._program.widths[-1], dtype=self._program.dtype)
        self._buffers[len(self._buffers) - 1] = address(logits, self._program.dtype, *logits.shape)
        structures, tensors = structures_of(segments, self._kv_cache, self._localities)
        faulty = array("B", bytes(count))
        to = self._call
        to.n, to.kept, to.faulty = count, len(keep), faulty.buffer_info()[0]
        to.tokens, to.keep = (each.buffer_info()[0] for each in (tokens, keep))
        for rotary in self._rotaries:
            rotary.positions = positions.buffer_info()[0]
        to.segments, to.segment_count = structures, len(segments)
        for number, part in enumerate(self._parts):
            with self._offloaded.layer(number - 1) if self._offloaded else nullcontext():
                call("dynatree_forward", ctypes.byref(part), ctypes.byref(to))
        del tensors  # the structures point at them
        split = [logits] if len(kept) == 1 else list(logits.split_with_sizes(kept))
        spoil(segments, split, marked(faulty))
        return split

    def _lay_out(self, count: int) -> None:
        """Lay out the buffers of `count` tokens one after the other."""
        if count == self._buffered:
            return
        size = self._program.dtype.itemsize
        lengths = [-(-width * count * size // _ALIGNMENT) * _ALIGNMENT for width in self._program.widths[:-1]]
        needed = sum(lengths) + _ALIGNMENT
        if needed > len(self._memory):
            self._memory = torch.empty(needed, dtype=torch.uint8)
        at = -(-address(self._memory, torch.uint8, -1) // _ALIGNMENT) * _ALIGNMENT
        for number, length in enumerate(lengths):
            self._buffers[number] = at
            at += length
        self._buffered = count

    def _reach(self, position: int) -> None:
        """Compute the cosines and sines of all positions up to `position`; they depend only on the position."""
        if position < self._reached:
            return
        size = max(_LEAST_POSITIONS, 1 << position.bit_length())
        dtype, most = self._program.dtype, self._program.shape.dim
        turns = []
        for to, rotary in zip(self._rotaries, self._program.rotaries, strict=True):
            both = [each[0].contiguous() for each in rotary(torch.empty(1, 1, dtype=dtype), torch.arange(size)[None])]
            turned = both[0].shape[-1]
            to.cosines, to.sines = (address(each, dtype, size, turned) for each in both)
            if turned % 2 or turned > most:
                raise ValueError(
                    f"the rotary embedding has {turned} dimensions, expected an even number of at most {most}"
                )
            to.size = turned
            turns += both
        self._turns, self._reached = turns, size
