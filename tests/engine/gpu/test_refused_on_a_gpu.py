"""Tests what a GPU does not compute: it is refused by name, or computed otherwise as docs/explanation/gpu.md says.

No GPU is needed, because everything is decided before weights are loaded: only the choice of the device is replaced.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.native import is_native
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.examined import examined
from dynatree.engine.loading import load_engine
from dynatree.engine.offload.choice import copy_bytes
from dynatree.engine.quantized.layers import quantize
from dynatree.engine.quantized.loading import quantized_model
from dynatree.engine.settings import ModelSettings
from tests.support.families import tiny_config
from tests.support.model_zoo import save_random_model

CUDA = torch.device("cuda")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose a GPU for every model."""
    for module in ("examined", "loading", "offload.choice"):
        monkeypatch.setattr(f"dynatree.engine.{module}.chosen_device", lambda _: CUDA)


def saved(folder: Path, family: str = "llama", **changes: Any) -> str:
    tiny_config(family, **changes).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "mamba2", "bamba", "jamba"])
def test_recurrent_layers_are_refused(tmp_path: Path, family: str) -> None:
    with pytest.raises(StartupError, match=f"{family} has recurrent layers, and they are computed on a CPU only"):
        examined(ModelSettings(saved(tmp_path, family)))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_the_targets_own_rounded_copy_is_refused(tmp_path: Path, weights: str) -> None:
    path = saved(tmp_path)
    settings = ModelSettings(path, copy=ModelSettings(path, weights=weights))
    with pytest.raises(StartupError, match=f"the {weights} copy of tiny would be dequantised on cuda, and as slow"):
        copy_bytes(settings, tiny_config("llama"), "tiny")


def test_rows_of_offloaded_layers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynatree.engine.offload.choice.free_memory", lambda _: 1 << 30)
    settings = ModelSettings(saved(tmp_path), resident_layers=1, fixed_rows=(32,))
    monkeypatch.setattr("dynatree.engine.loading.load_tokenizer", lambda _: None)
    with pytest.raises(StartupError, match="on a GPU, --fixed-rows cannot be combined with offloaded layers"):
        load_engine(settings)


def test_offloaded_layers_of_packed_weights_are_refused(tmp_path: Path) -> None:
    """On a GPU transformers reads them, whole."""
    config = tiny_config("llama")
    config.quantization_config = GPTQ
    assert quantized_model(ModelSettings(str(tmp_path)), config, CUDA, "tiny") is None
    with pytest.raises(StartupError, match="quantised weights, which do not go together with --resident-layers"):
        quantized_model(ModelSettings(str(tmp_path), resident_layers=1), config, CUDA, "tiny")


def test_packed_weights_without_their_packages_are_refused_by_name(tmp_path: Path) -> None:
    path = save_random_model(tmp_path / "model", "llama", seed=1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": GPTQ}))
    with pytest.raises(StartupError, match="Loading a GPTQ quantized model requires"):
        load_engine(ModelSettings(str(path)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounded_weights_are_dequantised(bits: int, dtype: torch.dtype) -> None:
    """They are those of a CPU's kernels, as numbers of the model's type; files in GGUF go the same way."""
    layers = {native: nn.Sequential(nn.Linear(64, 32, dtype=dtype)) for native in (True, False)}
    layers[False].load_state_dict(layers[True].state_dict())
    assert not is_native(CUDA, dtype)
    for native, each in layers.items():
        quantize(each, bits, dtype, native)
    assert type(layers[False][0]) is nn.Linear
    assert isinstance(layers[True][0], QuantizedLinear)
    assert layers[False][0].weight.dtype == dtype


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama4_text", "deepseek_v3", "gemma4_text"])
def test_windows_chunks_sinks_caps_and_unequal_sizes_are_not_refused(tmp_path: Path, family: str) -> None:
    assert examined(ModelSettings(saved(tmp_path, family))).context_length > 0
