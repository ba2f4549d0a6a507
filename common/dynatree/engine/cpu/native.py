"""The project's own kernels for x86 CPUs: selection of a build for this CPU, and shared helpers.

The kernels are compiled when the package is installed, if there is a C compiler; otherwise torch's kernels are used.
They run on the threads of torch's OpenMP library, which is already loaded under the same name.

Every kernel is batch-invariant: a token's result has the same bits regardless of the other tokens in the batch.
"""

from __future__ import annotations

import ctypes
import json
import logging
from functools import cache
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "native"
_SETTINGS = "builds.json"  # instruction sets that each build uses, by Linux's names, best build first
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # codes of `vectors.h`
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "dynatree_attention": (_POINTER, _POINTER, _POINTER, _COUNT),
    "dynatree_linear": (_POINTER, _POINTER, _COUNT, _POINTER),
    "dynatree_forward": (_POINTER, _POINTER),
    "dynatree_experts": (_POINTER, _POINTER, _COUNT, _POINTER, _POINTER, _POINTER),
    "dynatree_recurrence": (_POINTER,),
    "dynatree_convolution": (_POINTER,),
}


@cache
def kernels() -> ctypes.CDLL | None:
    """Return the best build that this CPU supports and that loads, or None."""
    for name in builds():
        path = FOLDER / name
        if path.exists():
            try:
                return _loaded(path)
            except (OSError, AttributeError) as error:
                log.warning("the kernels %s do not load: %s", name, error)
    return None


def builds() -> list[str]:
    """Return the builds that this CPU supports, best first; ATEN_CPU_CAPABILITY limits them as it limits torch."""
    there = _instructions()
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        there = {each for each in there if not each.startswith("avx512")}
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        there = set()
    every: dict[str, list[str]] = json.loads((FOLDER / _SETTINGS).read_text())["builds"]
    return [name for name, instructions in every.items() if there.issuperset(instructions)]


def _instructions() -> set[str]:
    """Return the instruction sets of this CPU and its system; empty if unknown, as on systems other than Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for function, arguments in _FUNCTIONS.items():
        getattr(library, function).argtypes = arguments
    library.dynatree_sources.restype = ctypes.c_uint32
    if library.dynatree_sources() != checksum():
        raise OSError("it was built from other sources; install the package again")
    return library


def checksum() -> int:
    """Return a checksum of the kernels' sources and build settings; other sources may have other structures."""
    return crc32(b"".join(path.read_bytes() for path in sorted((*FOLDER.glob("*.[ch]"), FOLDER / _SETTINGS))))


def is_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the project's own kernels support this device and this dtype."""
    return device.type == "cpu" and dtype in DTYPES and kernels() is not None


def multiplies_pairs() -> bool:
    """Whether products of bfloat16 are summed in pairs, which gives different bits than one-by-one summation."""
    library = kernels()
    return library is not None and "bf16" in Path(library._name).name


def call(function: str, *arguments: object) -> None:
    """Run a kernel.

    Raises:
        MemoryError: The kernel cannot allocate its working memory.
    """
    library = kernels()
    assert library is not None, "is_native() says whether there is one"
    if getattr(library, function)(*arguments):
        raise MemoryError("the kernel's working memory cannot be allocated")


def address(tensor: Tensor, dtype: torch.dtype, *shape: int, rows_apart: bool = False) -> int:
    """Check a tensor and return its address for a kernel, which does not check the memory that it reads and writes.

    Args:
        tensor: Tensor on the CPU.
        dtype: Data type that the kernel expects.
        shape: Shape that the kernel expects; -1 matches any size.
        rows_apart: Whether only the last dimension must be contiguous, because the kernel receives the strides.

    Raises:
        ValueError: The tensor's device, layout, dtype or shape is not as expected.
    """
    if tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_cpu:
        return tensor.data_ptr()  # by far the most frequent case, in a fifth of the time
    fits = len(shape) == tensor.dim() and all(a in (b, -1) for a, b in zip(shape, tensor.shape, strict=True))
    side_by_side = tensor.stride(-1) == 1 or tensor.shape[-1] == 1 if rows_apart else tensor.is_contiguous()
    if not (fits and side_by_side and tensor.dtype == dtype and tensor.device.type == "cpu"):
        raise ValueError(
            f"a tensor is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}, "
            f"expected contiguous {dtype} {list(shape)} on the CPU"
        )
    return tensor.data_ptr()


def lying(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in this dtype with a contiguous last dimension."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
