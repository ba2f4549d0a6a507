"""The device of a model: its identity for other services, waiting for it, and whether kernels can be compiled."""

from __future__ import annotations

import hashlib
import platform
from importlib.util import find_spec
from pathlib import Path

import torch

from dynatree.common.errors import StartupError

HAS_TRITON = find_spec("triton") is not None  # the CUDA builds of torch bring it; importing it takes time
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # one for all containers of a running kernel


def check_device(name: str) -> None:
    """Refuse a device that this machine, or this build of torch, does not have.

    Raises:
        StartupError: With the devices that there are.
    """
    here = ["cpu"]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        here += [accelerator.type, *(f"{accelerator.type}:{each}" for each in range(torch.accelerator.device_count()))]
    if name not in here:
        raise StartupError(
            f"--device is {name}, and the devices that torch {torch.__version__} finds here are: {', '.join(here)}"
        )


def device_id(device: torch.device) -> str:
    """An opaque name that is equal where two processes compute on the same device: a GPU, or a machine's CPU."""
    if device.type == "cuda":
        return _digest(str(torch.cuda.get_device_properties(device).uuid))
    machine = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()
    return _digest(f"{machine} {device}")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that this thread asked of it; a CPU has."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
