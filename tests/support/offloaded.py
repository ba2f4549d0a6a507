"""Engines whose layers are offloaded to a layer cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynatree.engine.engine import Engine
from dynatree.engine.loading import load_engine
from dynatree.engine.offload.disk_layers import DiskLayers
from dynatree.engine.settings import ModelSettings

LAYERS = 5
HARMED = "of the layer cache differs from the layer that was written"


def load(model: Path, cache: Path, resident: int | None, **settings: Any) -> Engine:
    return load_engine(ModelSettings(str(model), sessions=2, resident_layers=resident, layer_cache=cache, **settings))


def source_of(engine: Engine) -> DiskLayers:
    assert isinstance(engine.source, DiskLayers)
    return engine.source


def change(path: Path) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
