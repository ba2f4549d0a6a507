"""Import modules of benchmarks/, which is not a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from tests.support.paths import BENCHMARKS

GPU = BENCHMARKS / "gpu"


def module(name: str, folder: Path = BENCHMARKS) -> ModuleType:
    """Import a module of a folder, and the modules that it imports from the same folder."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
