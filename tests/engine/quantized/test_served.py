"""How a model would be served is known before its weights are loaded, and refusals have the words of loading."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynatree.common.errors import StartupError
from dynatree.engine.loading import load_engine
from dynatree.engine.model.files import size_text
from dynatree.engine.served import served
from dynatree.engine.settings import ModelSettings
from tests.support.gguf_files import save_gguf
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import save_random_model
from tests.support.packed_checkpoints import save_packed

PROGRAM = "a native program"


def gguf(folder):
    return save_gguf(folder / "model.gguf", ("Q4_K", "Q6_K", "Q8_0"), seed=1, tied=True, words=300)


def mixture(folder):
    every = {"num_experts": 4, "num_experts_per_tok": 4}  # a step then reads all weights
    return save_gguf(folder / "mixture.gguf", ("Q8_0", "Q4_K"), seed=1, family="qwen3moe", words=300, **every)


def packed(folder):
    return save_packed(folder, "gptq", 4)[0]


def plain(family):
    return lambda folder: save_random_model(folder / family, family, seed=1)


@compiled
@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize(
    ("save", "settings", "weights", "computed_by"),
    [
        (gguf, {}, "Q4_K and Q6_K and Q8_0", PROGRAM),
        (gguf, {"dtype": "float32"}, "Q4_K and Q6_K and Q8_0", PROGRAM),
        (mixture, {}, "Q4_K and Q8_0", "a native program"),
        (packed, {}, "gptq of 4 bits", PROGRAM),
        (plain("llama"), {"dtype": "bfloat16"}, "bfloat16", PROGRAM),
        (plain("gpt_neox"), {"dtype": "bfloat16", "weights": "int8"}, "int8", PROGRAM),
        (plain("gpt2"), {"weights": "int4"}, "int4 and int8", "native kernels in transformers' modules"),
    ],
    ids=["gguf", "gguf-float32", "mixture", "gptq", "bfloat16", "int8", "int4"],
)
def test_it_is_what_loading_finds(tmp_path, caplog, save, settings, weights, computed_by):
    caplog.set_level("INFO")
    path = str(save(tmp_path))
    told = served(ModelSettings(path, **settings))
    engine = load_engine(ModelSettings(path, sessions=1, **settings))
    info = engine.info
    assert (told.weights, told.computed_by, told.offloaded_layers) == (weights, computed_by, 0)
    for name in ("name", "architecture", "parameters", "dtype", "device", "context_length", "tokenizer_fingerprint"):
        assert getattr(told, name) == getattr(info, name), name
    assert (computed_by == PROGRAM) == engine.batch_invariant
    assert told.kv_bytes == engine.kv_cache.shape.slot_bytes(engine.model.dtype)
    table = 0 if told.weight_bytes == info.step_bytes else engine.model.get_input_embeddings().weight.nbytes
    assert told.weight_bytes == pytest.approx(info.step_bytes + table, rel=0.02)
    assert f"{weights} weights" in str(told)
    log = caplog.text
    assert f"its weights take {size_text(told.weight_bytes)} of memory" in log
    assert weights == "bfloat16" or f"numerics: {weights} weights, " in log


@compiled
@pytest.mark.parametrize("save", [gguf, plain("llama")])
def test_the_log_of_a_copy_says_what_the_target_itself_takes(tmp_path, caplog, save):
    caplog.set_level("INFO")
    path = str(save(tmp_path))
    settings = ModelSettings(path, copy=ModelSettings(path, weights="int4", chooses_tokens=False))
    told = served(settings)
    assert f": {size_text(told.weight_bytes)} of weights, and " in caplog.text
    assert told.weight_bytes == served(replace(settings, copy=None)).weight_bytes


def lacks_a_tensor(folder):
    path = gguf(folder)
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_k.weight", b"blk.9.attn_k.weight"))
    return path, {}


def three_bits(folder):
    path = packed(folder)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["bits"] = 3
    (path / "config.json").write_text(json.dumps(config))
    return path, {}


def other_method(folder):
    path = packed(folder)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "version": "gemv"}
    (path / "config.json").write_text(json.dumps(config))
    return path, {}


def groups_out_of_order(folder):
    path = packed(folder)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (path / "config.json").write_text(json.dumps(config))
    state = load_file(path / "model.safetensors")
    state = {name: each.flip(0) if name.endswith(".g_idx") else each for name, each in state.items()}
    save_file(state, path / "model.safetensors")
    return path, {}


def rotated(folder):
    path, _ = save_packed(folder, "packed", 4)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["transform_config"] = {"config_groups": {"R4": {"type": "hadamard"}}}
    (path / "config.json").write_text(json.dumps(config))
    return path, {}


def scaled_activations(folder):
    """AWQ's, which it has where a layer follows an activation function, as in StarCoder2."""
    path, _ = save_packed(folder, "awq", 4)
    state = load_file(path / "model.safetensors")
    state["model.layers.1.mlp.act_fn.scales"] = torch.ones(64)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path, {}


def packed_experts(folder):
    path = packed(folder)
    whole = save_random_model(folder / "mixture", "qwen3_moe", seed=1)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    mixture = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(mixture | {"quantization_config": config}))
    state = load_file(whole / "model.safetensors")
    save_file({name: each for name, each in state.items() if "expert" not in name}, whole / "model.safetensors")
    return whole, {}


def rounded_twice(folder):
    return packed(folder), {"weights": "int8"}


def inputs_in_no_group(folder):
    changes = {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2}
    return save_random_model(folder / "model", "llama", seed=1, **changes), {"weights": "int4"}


def beams(folder):
    path = packed(folder)
    (path / "generation_config.json").write_text(json.dumps({"num_beams": 4}))
    return path, {}


def a_longer_context(folder):
    return gguf(folder), {"max_context": 161}


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lacks_a_tensor, "no place for its tensor blk.9.attn_k.weight"),
        (three_bits, "its weights have 3 bits, expected 4 or 8"),
        (other_method, "version gemv, expected 4 and gemm"),
        (groups_out_of_order, "its groups of inputs are not in order"),
        (scaled_activations, r"its checkpoint has model\.layers\.1\.mlp\.act_fn\.scales, but no codes of"),
        (rotated, r"its compressed-tensors expect rotated activations \(transform_config\)"),
        (packed_experts, "experts in gptq weights are not served"),
        (rounded_twice, "has gptq weights, which cannot be rounded again to int8"),
        (inputs_in_no_group, "has 72 inputs, expected multiples of 16"),
        (beams, "its generation_config sets num_beams"),
        (a_longer_context, "--max-context is 161, expected at most its context of 160 tokens"),
    ],
)
def test_refusals_have_the_words_of_loading(tmp_path, harm, words):
    path, settings = harm(tmp_path)
    with pytest.raises(StartupError, match=words) as refused:
        load_engine(ModelSettings(str(path), sessions=1, **settings))
    with pytest.raises(StartupError) as told:
        served(ModelSettings(str(path), **settings))
    assert str(told.value) == str(refused.value)


def test_weights_that_other_packages_read_are_said_to_be_untested(tmp_path):
    path = save_random_model(tmp_path / "model", "llama", seed=1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    found = served(ModelSettings(str(path), device="cpu"))
    assert found.computed_by == "transformers with fp8 (not tested)"
    assert " on cpu by transformers with fp8 (not tested), " in str(found)
