"""The models whose layers are offloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.model_zoo import ARCHITECTURES, save_random_model
from tests.support.offloaded import LAYERS


@pytest.fixture(name="model", params=ARCHITECTURES)
def model_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    changes = {"n_layer" if request.param == "gpt2" else "num_hidden_layers": LAYERS}
    if request.param in ("qwen2", "qwen3", "smollm3"):
        changes |= {"layer_types": ["full_attention"] * LAYERS}  # type: ignore[dict-item]
    return save_random_model(tmp_path / "model", request.param, 4, **changes)


@pytest.fixture(name="llama")
def llama_fixture(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "model", "llama", 4)
