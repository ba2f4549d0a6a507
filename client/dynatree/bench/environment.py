"""What a measurement ran on, as far as the client can know: versions, the commit, the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dynatree.client
from dynatree.common.version import version as dynatree_version


def environment() -> dict[str, Any]:
    """The keys "versions", "git" and "machine" of a report."""
    return {
        "versions": {
            "dynatree": dynatree_version(),
            "torch": _version("torch"),
            "transformers": _version("transformers"),
            "python": platform.python_version(),
        },
        "git": _git(),
        "machine": {"platform": platform.platform(), "cpu_count": os.cpu_count()},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """The commit of the checkout that this code runs from, and whether tracked files differ from it; None elsewhere."""
    folder = Path(dynatree.client.__file__).parent
    # A package that is installed somewhere below another project's checkout is not tracked there.
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
