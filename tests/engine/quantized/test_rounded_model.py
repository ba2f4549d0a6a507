"""`--weights`: the groups of inputs that share a scale, and the refusal of models that have none."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from dynatree.common.errors import StartupError
from dynatree.engine import loading
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.model.checkpoint import Checkpoint
from dynatree.engine.served import served
from dynatree.engine.settings import ModelSettings
from dynatree.engine.weights.quantized_weight import rounded
from tests.support.model_zoo import save_random_model


def test_inputs_that_are_no_multiple_of_32_have_groups_of_16(tmp_path):
    folder = save_random_model(tmp_path / "model", "llama", seed=1, intermediate_size=80)
    engine = load_engine(ModelSettings(str(folder), weights="int4", dtype="float32", sessions=1))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                bits, group = (8, 64) if name == "lm_head" else (4, 16 if name.endswith("down_proj") else 32)
                layer.weight.copy_(rounded(layer.weight, bits, group).dequantized())
        kv = engine.kv_cache.reserve(40)
        (ours,) = engine.forward([Segment(kv, 0, list(range(40)), range(40))])
        theirs = model(torch.arange(40)[None]).logits[0]
    assert (ours - theirs).square().mean().sqrt() < 0.03 * theirs.std()


def test_the_memory_never_holds_the_floats_of_two_layers(tmp_path, monkeypatch):
    folder = save_random_model(tmp_path / "model", "llama", seed=1, num_hidden_layers=4)
    layers: list[LlamaDecoderLayer] = []

    def fill(files, module, prefix=""):
        assert all(type(each.mlp.down_proj) is QuantizedLinear for each in layers)
        if isinstance(module, LlamaDecoderLayer):
            layers.append(module)
        real(files, module, prefix)

    real = Checkpoint.fill
    monkeypatch.setattr(Checkpoint, "fill", fill)
    engine = load_engine(ModelSettings(str(folder), weights="int4", sessions=1))
    assert layers == list(engine.model.model.layers)


def test_activations_have_the_dtype_of_the_checkpoint(tmp_path):
    folder = save_random_model(tmp_path / "model", "llama", seed=1)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    settings = ModelSettings(str(folder), weights="int8", sessions=1)
    assert load_engine(settings).info.dtype == served(settings).dtype == "bfloat16"


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_layers_that_are_rounded_one_by_one_give_the_same_target(tmp_path, monkeypatch, architecture):
    settings = ModelSettings(
        str(save_random_model(tmp_path / "model", architecture, seed=1)), weights="int8", sessions=1
    )
    one_by_one = load_engine(settings)
    monkeypatch.setattr(loading, "_to_round", lambda *_: None)
    at_once = load_engine(settings)
    assert one_by_one.info == at_once.info
    logits = []
    for engine in (one_by_one, at_once):
        kv = engine.kv_cache.reserve(40)
        logits += engine.forward([Segment(kv, 0, list(range(40)), range(40))])
    assert torch.equal(*logits)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("size", ["hidden_size", "intermediate_size"])
def test_inputs_without_a_group_are_refused_before_the_weights_are_read(tmp_path, monkeypatch, weights, size):
    folder = save_random_model(tmp_path / "model", "llama", seed=1, **{size: 72})
    monkeypatch.setattr(loading, "_load_model", lambda *_: pytest.fail("the weights were read"))
    name = "lm_head" if size == "hidden_size" else "down_proj"
    with pytest.raises(StartupError, match=f"--weights: {name} has 72 inputs, expected multiples of 16"):
        load_engine(ModelSettings(str(folder), weights=weights, sessions=1))
