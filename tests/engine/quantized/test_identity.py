"""The fingerprint of a model with quantised weights covers all that decides its tokens, so that sessions resume only
where their tokens continue.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynatree.common.errors import StartupError
from dynatree.engine.cpu import native
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from tests.support.gguf_files import save_gguf
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import save_random_model
from tests.support.packed_checkpoints import save_packed

BIAS = "model.layers.1.self_attn.q_proj.bias"


def fingerprint(model, **settings):
    return load_engine(ModelSettings(str(model), sessions=1, **settings)).info.fingerprint


@pytest.fixture(name="with_kernels", params=[pytest.param(True, marks=compiled), False])
def with_kernels_fixture(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(native, "builds", list)
        native.kernels.cache_clear()
    yield request.param
    native.kernels.cache_clear()


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_rounding_of_a_checkpoint_has_its_own(tmp_path, dtype):
    """Without kernels, weights are dequantised as they are loaded, and the rounding still decides tokens."""
    model = save_random_model(tmp_path / "model", "llama", seed=1)
    found = [fingerprint(model, dtype=dtype, weights=weights) for weights in ("auto", "int8", "int4", "int8")]
    assert len(set(found[:3])) == 3
    assert found[3] == found[1]


@pytest.mark.usefixtures("with_kernels")
def test_a_changed_block_of_a_file_changes_it(tmp_path):
    path = save_gguf(tmp_path / "model.gguf", ("Q4_K", "Q6_K"), seed=1, words=300)
    before = fingerprint(path)
    assert fingerprint(path) == before
    raw = bytearray(path.read_bytes())
    raw[-1000] ^= 1
    path.write_bytes(raw)
    assert fingerprint(path) != before


@pytest.mark.usefixtures("with_kernels")
def test_the_biases_of_quantised_layers_belong_to_it(tmp_path):
    folder, _ = save_packed(tmp_path, "gptq", 4, "qwen2")
    before = fingerprint(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[BIAS] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert fingerprint(folder) != before
    tensors[BIAS][3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(StartupError, match=f"its weight {BIAS} holds NaN or infinity"):
        load_engine(ModelSettings(str(folder), sessions=1))
