"""GPTQ, AWQ and compressed-tensors: repacked codes stand for the numbers that each format defines."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynatree.common.errors import StartupError
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from dynatree.engine.weights.packed_weights import format_of
from tests.support.model_zoo import save_random_model
from tests.support.packed_checkpoints import save_packed, stored

CASES = [(method, bits) for method in ("gptq", "gptq_v2", "packed", "int") for bits in (4, 8)] + [("awq", 4)]


@pytest.mark.parametrize(("method", "bits"), CASES)
@pytest.mark.parametrize("group", [32, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_codes_stand_for_the_numbers(method, bits, group, dtype):
    generator = torch.Generator().manual_seed(bits + group)
    tensors, settings, weight = stored(method, bits, group, 64, 512, generator, dtype)
    ours = format_of(settings).unpacked(tensors).dequantized()
    assert (ours - weight).abs().max() <= 1e-6 * weight.abs().max()


@pytest.mark.parametrize(("method", "bits"), CASES)
def test_a_checkpoint_is_served_as_its_weights_are(tmp_path, method, bits):
    logits = []
    for path in save_packed(tmp_path, method, bits):
        engine = load_engine(ModelSettings(str(path), dtype="float32", sessions=1))
        kv = engine.kv_cache.reserve(30)
        with torch.inference_mode():
            logits += engine.forward([Segment(kv, 0, list(range(30)), range(30))])
    assert (logits[0] - logits[1]).square().mean().sqrt() < 0.03 * logits[1].std()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by bitsandbytes, expected gptq, awq, compressed-tensors"),
        ({"quant_method": "gptq", "bits": 3}, "have 3 bits, expected 4 or 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv, expected 4 and gemm"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "have 0 groups of layers, expected 1"),
    ],
)
def test_other_formats_are_refused_by_name(settings, reason):
    with pytest.raises(ValueError, match=reason):
        format_of(settings)


def test_groups_that_are_not_in_order_are_refused():
    tensors, settings, _ = stored("gptq", 4, 32, 64, 64, torch.Generator().manual_seed(0))
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    with pytest.raises(ValueError, match="desc_act"):
        format_of(settings).unpacked(tensors)


def test_scales_that_are_not_finite_are_refused():
    tensors, settings, _ = stored("awq", 4, 32, 64, 64, torch.Generator().manual_seed(0))
    tensors["scales"][0, 0] = torch.inf
    with pytest.raises(ValueError, match="NaN or infinite"):
        format_of(settings).unpacked(tensors)


def test_tensors_that_lack_are_refused(tmp_path):
    folder = save_random_model(tmp_path / "model", "llama", seed=3)
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    state = load_file(folder / "model.safetensors")
    state.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(StartupError, match=r"lacks model.layers.1.self_attn.k_proj.weight"):
        load_engine(ModelSettings(str(folder), sessions=1))
