"""Where a step was measured: card, driver, versions, commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def surroundings(device: str) -> dict[str, Any]:
    """For JSON; None where something is not known."""
    import torch  # not by whoever only asks for versions

    on_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"a CPU ({platform.machine()})",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
        "python": platform.python_version(),
        "commit": commit(),
        "modified": bool(_output("git", "-C", str(ROOT), "status", "--porcelain")) if commit() else None,
    }


def commit() -> str | None:
    """The commit that is measured; None where neither the environment nor git knows."""
    return os.environ.get("DYNATREE_COMMIT") or _output("git", "-C", str(ROOT), "rev-parse", "HEAD")


def version_of(package: str) -> str | None:
    """A package's version; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints first; None where it is not installed, or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None
