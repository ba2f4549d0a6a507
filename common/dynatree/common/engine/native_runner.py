"""The runner of a program: a forward over any number of segments is one call of the kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.native import address, call
from dynatree.common.engine.native_attention import SegmentStructure, Shape, marked, structures_of
from dynatree.common.engine.native_program import Program
from dynatree.common.engine.not_finite import spoil
from dynatree.common.engine.segment import Segment
from dynatree.common.engine.streaming.streamed_layers import StreamedLayers

_LEAST_POSITIONS = 256
_ALIGNMENT = 64  # bytes; a line of the caches
_NUMBERS = "q"  # arrays of int64


class _Program(ctypes.Structure):
    _fields_ = (("operations", ctypes.c_void_p), ("count", ctypes.c_int64), ("shape", Shape))


class _Call(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_int64),
        ("kept", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("keep", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("rotary_size", ctypes.c_int64),
        ("segments", ctypes.POINTER(SegmentStructure)),
        ("segment_count", ctypes.c_int64),
        ("arena", ctypes.c_void_p),
        ("arena_layer", ctypes.c_int64),
        ("arena_values", ctypes.c_int64),
        ("arena_head", ctypes.c_int64),
        ("faulty", ctypes.c_void_p),
    )


class NativeRunner:
    """Implements `Runner`. Little Python runs in a forward: after one, nothing of Python is in the caches.

    Args:
        program: Of the model.
        arena: Where keys and values are stored.
        streamed: Brings the model's last layers into memory, while the ones before them compute.
    """

    def __init__(self, program: Program, arena: KVArena, streamed: StreamedLayers | None = None) -> None:
        self._program = program
        self._streamed = streamed
        cuts = [0, *(program.layers[streamed.first :] if streamed else ()), len(program.operations)]
        size = ctypes.sizeof(program.operations) // len(program.operations)
        at = ctypes.addressof(program.operations)
        # what is computed by one call each: all, or what precedes the streamed layers, each of those, and the rest
        self._parts = [_Program(at + size * start, stop - start, program.shape) for start, stop in pairwise(cuts)]
        embeddings: Any = program.model.get_input_embeddings()
        self._vocab_size: int = embeddings.num_embeddings
        self._memory = torch.empty(0, dtype=torch.uint8)  # the buffers', but for the logits
        self._buffers = (ctypes.c_void_p * len(program.widths))()
        self._buffered = -1  # tokens that the buffers are laid out for
        self._cosines = self._sines = torch.empty(0, 0)  # [positions, rotary size]
        self._call = _Call()
        self._call.buffers = ctypes.addressof(self._buffers)
        slots, shape = arena.layer(0), program.shape  # [2, kv_heads, slots, dim]
        layers = len(program.layers) - 1
        self._call.arena = address(arena.data, program.dtype, layers, 2, shape.kv_heads, -1, shape.dim)
        self._call.arena_layer = slots.numel()
        self._call.arena_values, self._call.arena_head = slots.stride(0), slots.stride(1)
        self._arena = arena  # which the call points at

    def run(self, segments: Sequence[Segment]) -> list[Tensor]:
        """As `Runner.run`.

        Raises:
            IndexError: A token that the model does not have, logits of none, or a slot that is not the session's.
            ValueError: Positions or a mask do not fit the tokens.
            MemoryError: There is none for the kernels' own numbers.
        """
        tokens, positions, keep = array(_NUMBERS), array(_NUMBERS), array(_NUMBERS)
        kept = []
        for segment in segments:
            first, size = len(tokens), len(segment.token_ids)
            tokens.extend(segment.token_ids)
            positions.extend(segment.positions)
            wanted = range(size) if segment.keep is None else segment.keep
            if wanted and not 0 <= min(wanted) <= max(wanted) < size:
                raise IndexError(f"logits are wanted of a token that is not in [0, {size})")
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
        structures, masks = structures_of(segments, self._arena)  # the structures point at the masks
        faulty = array("B", bytes(count))
        to = self._call
        to.n, to.kept, to.faulty = count, len(keep), faulty.buffer_info()[0]
        to.tokens, to.positions, to.keep = (each.buffer_info()[0] for each in (tokens, positions, keep))
        to.segments, to.segment_count = structures, len(structures)
        for number, part in enumerate(self._parts):
            with self._streamed.layer(number - 1) if self._streamed else nullcontext():
                call("dynatree_forward", ctypes.byref(part), ctypes.byref(to))
        del masks
        split = [logits] if len(kept) == 1 else list(logits.split_with_sizes(kept))
        spoil(segments, split, marked(faulty))
        return split

    def _lay_out(self, count: int) -> None:
        """Have the buffers of so many tokens lie one behind the other."""
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
        """Have the cosines and sines of positions up to this one, which depend on nothing else."""
        if position < len(self._cosines):
            return
        size = max(_LEAST_POSITIONS, 1 << position.bit_length())
        like = torch.empty(1, 1, dtype=self._program.dtype)
        both = [each[0].contiguous() for each in self._program.rotary(like, torch.arange(size)[None])]
        turned = both[0].shape[-1]
        self._call.cosines, self._call.sines = (address(each, self._program.dtype, size, turned) for each in both)
        if turned % 2 or turned > self._program.shape.dim:
            raise ValueError(f"a head of {self._program.shape.dim} numbers has {turned} that turn")
        self._call.rotary_size = turned
        self._cosines, self._sines = both
