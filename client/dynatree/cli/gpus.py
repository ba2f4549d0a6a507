"""Counts the GPUs without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
from pathlib import Path

from dynatree.common.errors import StartupError

_ROCM = Path("/dev/kfd")  # AMD's driver; torch calls its GPUs cuda too


def check_device(option: str, name: str) -> None:
    """Refuse a CUDA device that NVIDIA's driver does not list; torch may still refuse a listed device.

    Raises:
        StartupError: The GPU does not exist.
    """
    kind, _, index = name.partition(":")
    if kind != "cuda" or _ROCM.exists():
        return
    count = _count()
    if int(index or 0) >= count:
        here = "only " + ", ".join(f"cuda:{each}" for each in range(count)) if count else "no GPU"
        raise StartupError(
            f"{option} is {name}, but NVIDIA's driver finds {here} on this machine; expected auto or cpu"
        )


def may_have_gpu(name: str) -> bool:
    """Whether a device, or the one that "auto" stands for, may be a CUDA GPU; torch decides in the end."""
    return name.startswith("cuda") or (name == "auto" and (_ROCM.exists() or _count() > 0))


def _count() -> int:
    """Number of GPUs that NVIDIA's driver lists; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
