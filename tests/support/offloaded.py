"""Engines whose layers are offloaded to a layer cache, and fixtures of their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynatree.engine.engine import Engine
from dynatree.engine.loading import load_engine
from dynatree.engine.offload.disk_layers import DiskLayers
from dynatree.engine.settings import ModelSettings
from tests.support.model_zoo import ARCHITECTURES, save_random_model

LAYERS = 5
HARMED = "of the layer cache differs from the layer that was written"


@pytest.fixture(name="model", params=ARCHITECTURES)
def model_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    changes = {"n_layer" if request.param == "gpt2" else "num_hidden_layers": LAYERS}
    if request.param in ("qwen2", "qwen3", "smollm3"):
        changes |= {"layer_types": ["full_attention"] * LAYERS}  # type: ignore[dict-item]
    return save_random_model(tmp_path / "model", request.param, 4, **changes)


@pytest.fixture(name="llama")
def llama_fixture(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "model", "llama", 4)


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
