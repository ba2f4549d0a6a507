"""Tests that a model without weights that a checkpoint fills is the model that transformers loads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dynatree.common.errors import StartupError
from dynatree.engine.examined import examined
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.model.checkpoint import Checkpoint, saved_buffers
from dynatree.engine.model.composite import KEY_MAPPING, text_config_of
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.served import served
from dynatree.engine.settings import ModelSettings
from tests.support.door import saved
from tests.support.families import FAMILIES, NOT_TINY, tiny_config, tiny_model

SHORT = ("ernie4_5_moe", "gemma4_text", "glm4_moe", "llama")
NOT_SERVED = {"deepseek_v4", "gpt_neo", "zaya"}
CASES = sorted(set(FAMILIES) - NOT_TINY - NOT_SERVED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in CASES]
)
def test_a_filled_model_is_the_one_that_transformers_loads(tmp_path, family, dtype):
    """Its parameters and saved buffers have equal dtypes and bits; or the checkpoint is refused."""
    try:
        tiny = tiny_model(tiny_config(family))
        for buffer in saved_buffers(tiny).values():  # which are neutral, as those of a trained model are not
            buffer += torch.ones(()).to(buffer.dtype)
        folder = saved(tiny, tmp_path / "model")
        config = text_config_of(AutoConfig.from_pretrained(folder))
        expected, found = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, key_mapping=KEY_MAPPING, output_loading_info=True
        )
    except Exception as error:
        pytest.skip(f"transformers cannot save or load it: {error}")
    model = skeleton(expected.config, dtype)
    files = Checkpoint(folder, family, model)
    if found["missing_keys"] or not all(name in files for name, _ in model.named_parameters()):
        with pytest.raises(StartupError, match="does not contain"):
            files.fill(model)
        return
    files.fill(model)
    if family == "youtu":  # of which transformers forgets the embedding of the padding token
        table = expected.get_input_embeddings()
        table.weight.data[table.padding_idx] = model.get_input_embeddings().weight[table.padding_idx]
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert {name: each.dtype for name, each in ours.items()} == {name: each.dtype for name, each in theirs.items()}
    assert [name for name, each in ours.items() if not torch.equal(each, theirs[name])] == []


@pytest.mark.parametrize(
    ("family", "equal"),
    [
        *((each, True) for each in SHORT),
        *(pytest.param(each, False, marks=() if each in SHORT else pytest.mark.long) for each in CASES),
    ],
)
def test_weights_that_differ_are_not_tied_whatever_the_configuration_says(tmp_path, family, equal):
    """As in `from_pretrained`: tied weights are one only if the files have both of them with equal values, or one."""
    try:
        config = tiny_config(family)
        for each in (config, config.get_text_config()):
            each.tie_word_embeddings = False
        tiny = tiny_model(config)
        table, output = tiny.get_input_embeddings().weight, tiny.get_output_embeddings().weight
        if equal:
            output.data.copy_(table.data)
        folder = saved(tiny, tmp_path / "model")
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
        config = text_config_of(AutoConfig.from_pretrained(folder))
        assert config.tie_word_embeddings
        expected = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, key_mapping=KEY_MAPPING
        )
        expected.get_output_embeddings().weight.data_ptr()
    except Exception as error:
        pytest.skip(f"transformers cannot save or load it: {error}")
    model = skeleton(config, torch.float32)
    files = Checkpoint(folder, family, model)
    try:
        files.fill(model)
    except StartupError:  # a refusal is as good
        assert family not in {"gemma4_text", "llama"}
        return
    for loaded in (model, expected):
        alike = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        assert alike == (equal and bool(model._tied_weights_keys))
    ours, theirs = model.get_output_embeddings().weight, expected.get_output_embeddings().weight
    assert torch.equal(ours, theirs)


def test_an_output_layer_of_its_own_gives_its_logits_however_the_model_is_loaded(tmp_path):
    folder = saved(tiny_model(tiny_config("llama", tie_word_embeddings=False)), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    plain, offloaded = (
        load_engine(ModelSettings(str(folder), sessions=1, layer_cache=tmp_path, **more))
        for more in ({}, {"resident_layers": 1})
    )
    assert torch.equal(logits(plain), logits(offloaded))
    rounded = load_engine(ModelSettings(str(folder), sessions=1, weights="int8"))
    assert (logits(rounded) - logits(plain)).abs().max() < 0.1 * logits(plain).abs().max()


def test_a_single_file_comes_before_an_index_as_in_transformers(tmp_path):
    folder = saved(tiny_model(tiny_config("llama")), tmp_path / "model")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load_engine(ModelSettings(str(folder), sessions=1))
    load_engine(ModelSettings(str(folder), sessions=1, resident_layers=1, layer_cache=tmp_path))


@pytest.mark.parametrize("more", [{}, {"weights": "int8"}, {"resident_layers": 1}], ids=str)
def test_without_a_dtype_in_the_configuration_that_of_the_weights_counts(tmp_path, more):
    folder = saved(tiny_model(tiny_config("llama")).to(torch.bfloat16), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    settings = ModelSettings(str(folder), sessions=1, layer_cache=tmp_path, **more)
    assert examined(settings).config.dtype == torch.bfloat16
    assert load_engine(settings).info.dtype == "bfloat16"


@pytest.mark.parametrize("more", [{}, {"weights": "int8"}, {"resident_layers": 1}], ids=str)
@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "qzeros"])
def test_scales_of_which_the_configuration_knows_nothing_are_refused(tmp_path, more, scale):
    folder = saved(tiny_model(tiny_config("llama")), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.0.mlp.up_proj.{scale}"] = torch.ones(1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=f"its checkpoint has .*{scale}, but its config.json has no"):
        load_engine(ModelSettings(str(folder), sessions=1, layer_cache=tmp_path, **more))


def test_a_quant_method_that_transformers_does_not_know_is_refused(tmp_path):
    folder = saved(tiny_model(tiny_config("llama")), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    (folder / "config.json").write_text(json.dumps(config))
    for examine in (load_engine, served):
        with pytest.raises(StartupError, match="transformers does not know its quant_method, 'modelopt'"):
            examine(ModelSettings(str(folder), sessions=1))


@pytest.mark.parametrize(
    "named",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "fp8"},
        {"quant_method": "mxfp4"},
        {"quant_method": "torchao", "quant_type": "int8_weight_only"},
    ],
    ids=str,
)
def test_a_quant_method_that_transformers_knows_is_left_to_it(tmp_path, named):
    folder = saved(tiny_model(tiny_config("llama")), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": named}))
    found = served(ModelSettings(str(folder), sessions=1))
    assert found.computed_by == f"transformers with {named['quant_method']} (not tested)"


def test_a_cache_without_its_first_file_is_left_to_the_loader(tmp_path):
    folder = saved(tiny_model(tiny_config("llama")), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert examined(ModelSettings(str(folder), sessions=1)).config.dtype is None


def logits(engine):
    """The logits of an engine for a few tokens."""
    kv = engine.kv_cache.reserve(20)
    with torch.inference_mode():
        return engine.forward([Segment(kv, 0, range(2, 22), range(20))])[0].float()
