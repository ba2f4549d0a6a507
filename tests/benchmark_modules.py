"""Modules of benchmarks/, which is no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
GPU = BENCHMARKS / "gpu"


def module(name: str, folder: Path = BENCHMARKS) -> ModuleType:
    """A module of a folder, with the others that it imports from there."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
