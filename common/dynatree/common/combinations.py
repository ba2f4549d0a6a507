"""Which options of a model go together, as far as no model is needed to tell."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from dynatree.common.errors import StartupError


def check_placement(settings: Any) -> None:
    """Refuse options that exclude each other.

    Args:
        settings: `ModelSettings`, or the parsed options of the same names.

    Raises:
        StartupError: With both options.
    """
    if settings.tensor_parallel == 1:
        return
    if find_spec("accelerate") is None:
        raise StartupError("--tensor-parallel needs the package accelerate: pip install 'dynatree[parallel]'")
    others = (
        ("--resident-layers", settings.resident_layers is not None),
        ("--layer-cache", settings.layer_cache is not None),
        ("--fixed-rows", bool(settings.fixed_rows)),
    )
    for option, given in others:
        if given:
            raise StartupError(f"--tensor-parallel and {option} do not go together")
    if settings.device not in ("auto", "cpu", "cuda"):
        raise StartupError(f"--tensor-parallel takes the first devices of a machine, and --device is {settings.device}")
