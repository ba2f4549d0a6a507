"""The kernels of our own for x86 CPUs: which build of them this CPU runs, and what they share.

They are compiled when the package is installed, if a C compiler is there; without them torch's kernels are used. They
run on the threads of torch's own OpenMP, which is loaded already and has the same name.

In every kernel a token's result has the same bits whatever other tokens are computed beside it.
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
_SETTINGS = "builds.json"  # of each build, the best first, the instructions that it uses, by Linux's names
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of `vectors.h`
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "dynatree_attention": (_POINTER, _POINTER, _POINTER, _COUNT),
    "dynatree_linear": (_POINTER, _POINTER, _COUNT, _POINTER),
    "dynatree_forward": (_POINTER, _POINTER),
}


@cache
def kernels() -> ctypes.CDLL | None:
    """The best build for this CPU that loads; None where none was compiled or none fits."""
    for name in builds():
        path = FOLDER / name
        if path.exists():
            try:
                return _loaded(path)
            except (OSError, AttributeError) as error:
                log.warning("the kernels %s do not load: %s", name, error)
    return None


def builds() -> list[str]:
    """The builds that this CPU runs, the best first; ATEN_CPU_CAPABILITY forbids instructions as it does for torch."""
    there = _instructions()
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        there = {each for each in there if not each.startswith("avx512")}
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        there = set()
    every: dict[str, list[str]] = json.loads((FOLDER / _SETTINGS).read_text())["builds"]
    return [name for name, instructions in every.items() if there.issuperset(instructions)]


def _instructions() -> set[str]:
    """What this CPU and its system can do; nothing where that is not known, as on other systems than Linux."""
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
        raise OSError("it was built of other sources; install again")
    return library


def checksum() -> int:
    """Of the kernels' sources and of how they are compiled; a build of other ones may have other structures."""
    return crc32(b"".join(path.read_bytes() for path in sorted((*FOLDER.glob("*.[ch]"), FOLDER / _SETTINGS))))


def is_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels of our own for this device in this dtype."""
    return device.type == "cpu" and dtype in DTYPES and kernels() is not None


def multiplies_pairs() -> bool:
    """Whether products of bfloat16 are summed in pairs, which gives other bits than one by one."""
    library = kernels()
    return library is not None and "bf16" in Path(library._name).name


def call(function: str, *arguments: object) -> None:
    """Run a kernel.

    Raises:
        MemoryError: There is none for the kernel's own numbers.
    """
    library = kernels()
    assert library is not None, "is_native() says whether there is one"
    if getattr(library, function)(*arguments):
        raise MemoryError("there is no memory for a forward")


def address(tensor: Tensor, dtype: torch.dtype, *shape: int, rows_apart: bool = False) -> int:
    """Where a tensor lies, for a kernel, which reads and writes where it is told.

    Args:
        tensor: On the CPU.
        dtype: That the kernel takes it for.
        shape: Likewise; -1 stands for any number.
        rows_apart: Whether only the numbers of its last dimension lie side by side, and the kernel is told the strides.

    Raises:
        ValueError: It lies elsewhere or otherwise, or has another dtype or shape.
    """
    fits = len(shape) == tensor.dim() and all(a in (b, -1) for a, b in zip(shape, tensor.shape, strict=True))
    side_by_side = tensor.stride(-1) == 1 or tensor.shape[-1] == 1 if rows_apart else tensor.is_contiguous()
    if not (fits and side_by_side and tensor.dtype == dtype and tensor.device.type == "cpu"):
        raise ValueError(
            f"a kernel is given {tensor.dtype} {list(tensor.shape)} of strides {list(tensor.stride())} on "
            f"{tensor.device}, and takes {dtype} {list(shape)} side by side on the CPU"
        )
    return tensor.data_ptr()


def lying(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this dtype, the numbers of its last dimension side by side."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
