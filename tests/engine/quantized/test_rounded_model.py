"""`--weights`: the groups of inputs that share a scale, and the refusal of models that have none."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dynatree.common.errors import StartupError
from dynatree.engine import loading
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
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


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("size", ["hidden_size", "intermediate_size"])
def test_inputs_without_a_group_are_refused_before_the_weights_are_read(tmp_path, monkeypatch, weights, size):
    folder = save_random_model(tmp_path / "model", "llama", seed=1, **{size: 72})
    monkeypatch.setattr(loading, "_load_model", lambda *_: pytest.fail("the weights were read"))
    name = "lm_head" if size == "hidden_size" else "down_proj"
    with pytest.raises(StartupError, match=f"--weights: {name} has 72 inputs, expected multiples of 16"):
        load_engine(ModelSettings(str(folder), weights=weights, sessions=1))
