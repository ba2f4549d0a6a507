"""GPTQ, AWQ and compressed-tensors: repacked codes stand for the numbers that each format defines."""

import json
import re

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


@pytest.mark.parametrize("method", ["gptq", "gptq_v2"])
def test_the_version_of_gptq_has_two_names(method):
    tensors, settings, weight = stored(method, 4, 32, 64, 512, torch.Generator().manual_seed(1), torch.float16)
    settings["format"] = settings.pop("checkpoint_format")
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


REASONS = "do not go together|expected a matrix|floating-point"
GENERATOR = torch.Generator().manual_seed(0)
NAMES = {"gptq": "qweight qzeros scales", "awq": "qweight qzeros scales", "int": "weight weight_scale"}
NAMES |= {"gptq_v2": NAMES["gptq"], "packed": "weight_packed weight_scale weight_shape"}


def scheme(settings):
    """The settings that name bits and groups."""
    return settings["config_groups"]["group_0"]["weights"] if "config_groups" in settings else settings


def refused(tensors, settings, reason):
    with pytest.raises(ValueError, match=reason):
        format_of(settings).unpacked(tensors)


# "int" of 4 bits has codes of 8 bits too, and AWQ has 4 bits only.
@pytest.mark.parametrize(("method", "bits"), [each for each in CASES if each not in (("int", 4), ("awq", 4))])
def test_other_bits_than_the_tensors_have_are_refused(method, bits):
    tensors, settings, _ = stored(method, bits, 32, 64, 128, GENERATOR)
    scheme(settings)["num_bits" if "config_groups" in settings else "bits"] = 12 - bits
    refused(tensors, settings, f"{12 - bits} bits")


@pytest.mark.parametrize(("method", "bits"), CASES)
@pytest.mark.parametrize("size", [16, 64, -1, 48, 0, "32", 1.5])
def test_other_groups_than_the_tensors_have_are_refused(method, bits, size):
    tensors, settings, _ = stored(method, bits, 32, 64, 128, GENERATOR)
    scheme(settings)["group_size"] = size
    refused(tensors, settings, "in groups of|group_size is")


@pytest.mark.parametrize(("method", "bits"), CASES)
def test_tensors_of_a_layer_that_lack_or_are_of_other_shapes_or_types_are_refused(method, bits):
    tensors, settings, _ = stored(method, bits, 32, 64, 128, GENERATOR)
    for name in NAMES[method].split():
        refused({key: value for key, value in tensors.items() if key != name}, settings, f"lacks {name}")
        whole = tensors[name]
        for other in (whole[:-1], whole[..., :-1], whole.repeat_interleave(2, 0), whole[..., None], whole.bool()):
            refused(tensors | {name: other}, settings, REASONS)


@pytest.mark.parametrize(("method", "bits"), CASES)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_scales_that_are_not_finite_are_refused(method, bits, number):
    tensors, settings, _ = stored(method, bits, 32, 64, 128, GENERATOR)
    tensors["scales" if "scales" in tensors else "weight_scale"][1, 1] = number
    refused(tensors, settings, "NaN or infinite")


def test_groups_that_are_not_in_order_are_refused():
    tensors, settings, _ = stored("gptq", 4, 32, 64, 64, GENERATOR)
    refused(tensors | {"g_idx": tensors["g_idx"].flip(0)}, settings, "desc_act")
    refused(tensors | {"g_idx": tensors["g_idx"][:-1]}, settings, "desc_act")
    del tensors["g_idx"]
    refused(tensors, settings | {"desc_act": True}, "lacks g_idx")
    tensors, settings, _ = stored("packed", 4, 32, 64, 64, GENERATOR)
    refused(tensors | {"weight_g_idx": torch.zeros(64)}, settings, "actorder")
    scheme(settings)["actorder"] = "group"
    refused(tensors, settings, "actorder")


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("packed", {"config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "channel"}}}}, "in groups of"),
        ("gptq", {"bits": 8}, "as 8 bits"),
        ("awq", {"group_size": 128}, "in groups of 128"),
        ("awq", {"version": None}, "version None, expected 4 and gemm"),
        ("packed", {"config_groups": ["a"]}, "have 0 groups of layers, expected 1"),
    ],
)
def test_a_checkpoint_that_its_configuration_contradicts_is_refused(tmp_path, method, changes, reason):
    folder, _ = save_packed(tmp_path, method, 4)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=reason) as refusal:
        load_engine(ModelSettings(str(folder), sessions=1))
    where = r"its |model\.layers\.0\.self_attn\.q_proj: codes "
    assert re.fullmatch(f"model {folder.name} cannot be served: ({where}).*", str(refusal.value))


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
