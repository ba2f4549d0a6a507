"""The device of a model: its choice, its identity across services, and synchronization."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch

from dynatree.common.errors import StartupError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # shared by all containers of a running kernel


def check_device(name: str) -> None:
    """Refuse a device that this machine, or this build of torch, does not have.

    Raises:
        StartupError: The device does not exist; the message lists the devices that do.
    """
    here = ["cpu"]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        here += [accelerator.type, *(f"{accelerator.type}:{each}" for each in range(torch.accelerator.device_count()))]
    if name not in here:
        raise StartupError(
            f"--device is {name}, but torch {torch.__version__} finds only these devices: {', '.join(here)}"
        )


def chosen_device(name: str) -> torch.device:
    """Return the device that an option names; "auto" is the first GPU if there is one, otherwise the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def device_id(device: torch.device) -> str:
    """Return an opaque name that is the same for all processes that compute on the same GPU or machine's CPU."""
    if device.type == "cuda":
        return _digest(str(torch.cuda.get_device_properties(device).uuid))
    machine = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()
    return _digest(f"{machine} {device}")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work queued by this thread; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
