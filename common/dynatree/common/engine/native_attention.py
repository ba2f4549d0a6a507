"""Attention by a kernel of our own, for CPUs: one call a layer over all segments (`native/attention.c`).

torch's attention is made for many queries. At one query a head it takes several times what reading the keys and values
takes, and each session of a pass needs a call of its own. The kernel reads every key and value once, for all queries of
a segment, and stores the new ones on the way.

The kernel is compiled when the package is installed, if a C compiler is there; without it torch's attention is used.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.segment import Segment

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "native"
# Of each build: whether this CPU runs it; the first that it runs is taken.
BUILDS: dict[str, Callable[[], bool]] = {
    "attention_avx512_bf16.so": lambda: _capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported(),
    "attention_avx512.so": lambda: _capability() == "AVX512",
    "attention_avx2.so": lambda: _capability() == "AVX2",
}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Segment(ctypes.Structure):
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
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


def _capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


@cache
def kernel() -> ctypes._NamedFuncPointer | None:
    """The kernel's function, of the best build for this CPU; None where none was compiled or none fits.

    It runs on the threads of torch's own OpenMP, which is loaded already and has the same name.
    """
    for name, fits in BUILDS.items():
        path = FOLDER / name
        if fits() and path.exists():
            try:
                function = ctypes.CDLL(str(path)).dynatree_attention
            except OSError as error:
                log.warning("the attention kernel %s does not load, so torch's is used: %s", name, error)
                return None
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
            return function
    return None


def is_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel computes attention on this device in this dtype."""
    return device.type == "cpu" and dtype in _DTYPES and kernel() is not None


class NativeBatch:
    """Segments laid side by side in one row of tokens; implements `Attending`.

    A query's result has the same bits whatever other tokens are computed beside it, and in whatever pieces a prompt is
    read: no padding is needed.
    """

    def __init__(self, segments: Sequence[Segment], arena: KVArena) -> None:
        self._arena = arena
        self._masks = []  # kept, since the structures below only point at them
        self._segments = (_Segment * len(segments))()
        first = 0
        for each, structure in zip(segments, self._segments, strict=True):
            structure.first, structure.tokens = first, len(each.token_ids)
            structure.base, structure.start = each.kv.start, each.start
            if each.mask is not None:
                mask = each.mask.contiguous()
                self._masks.append(mask)
                structure.mask, structure.columns = mask.data_ptr(), mask.shape[1]
            first += len(each.token_ids)
        self._layer = _Layer()
        self._shape = _Shape()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store the new keys and values, then attend; as `Attending.attend`.

        Raises:
            MemoryError: There is none for the kernel's own numbers.
        """
        function = kernel()
        assert function is not None, "is_native() says whether there is one"
        dtype = self._arena.dtype
        query, key, value = (_lying(each, dtype) for each in (query, key, value))
        heads, tokens, dim = query.shape
        output = torch.empty(tokens, heads, dim, dtype=dtype)
        slots = self._arena.layer(layer)  # [2, kv_heads, slots, dim]
        to, shape = self._layer, self._shape
        to.query, to.query_head, to.query_token = query.data_ptr(), query.stride(0), query.stride(1)
        to.key, to.key_head, to.key_token = key.data_ptr(), key.stride(0), key.stride(1)
        to.value, to.value_head, to.value_token = value.data_ptr(), value.stride(0), value.stride(1)
        to.keys = slots.data_ptr()
        to.values = to.keys + slots.stride(0) * slots.element_size()
        to.arena_head, to.output = slots.stride(1), output.data_ptr()
        shape.heads, shape.kv_heads, shape.dim, shape.dtype = heads, key.shape[0], dim, _DTYPES[dtype]
        shape.scale = dim**-0.5 if scale is None else scale
        if function(ctypes.byref(to), ctypes.byref(shape), self._segments, len(self._segments)):
            raise MemoryError("there is no memory for attention")
        return output


def _lying(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this dtype, each head's dimensions side by side."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
