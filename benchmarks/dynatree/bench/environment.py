"""The environment of a measurement as the client knows it: versions, the commit, the machine, the models."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dynatree.client
from dynatree.client import ModelInfo
from dynatree.common.version import version as dynatree_version


@dataclass(frozen=True)
class Environment:
    """The fields of a report that have these names."""

    versions: dict[str, str | None]
    git: Any
    machine: Any


def environment(threads: int | None, read_bandwidth: float | None) -> Environment:
    """Describe this process and its machine.

    Args:
        threads: Number of torch's CPU threads; None if the models run elsewhere.
        read_bandwidth: Result of `bandwidth.read_bandwidth`; None if not measured.
    """
    return Environment(
        versions={
            "dynatree": dynatree_version(),
            "torch": _version("torch"),
            "transformers": _version("transformers"),
            "python": platform.python_version(),
        },
        git=_git(),
        machine={
            "platform": platform.platform(),
            "cpu": _cpu(),
            "cpu_count": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "threads": threads,
            "read_bandwidth": read_bandwidth,
        },
    )


def describe(model: ModelInfo) -> Any:
    """A model as a report describes it."""
    names = ("name", "architecture", "parameters", "context_length", "dtype", "device", "version", "numerics")
    described = {name: getattr(model, name) for name in names}
    return described | {"weight_bytes": model.step_bytes}


def _cpu() -> str | None:
    """The processor's name, from Linux's /proc; None if not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """The commit of this code's checkout, and whether tracked files differ from it; None if there is no checkout."""
    folder = Path(dynatree.client.__file__).parent
    # A package installed inside another project's checkout is not tracked by that checkout.
    if not _git_output(folder, "ls-files"):
        return None
    commit = _git_output(folder, "rev-parse", "HEAD")
    changes = _git_output(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.strip(), "modified": bool(changes)} if commit else None


def _git_output(folder: Path, *arguments: str) -> str:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""
