"""Tests that the language model of a composite checkpoint is served alone."""

import logging
import re
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils.logging import get_verbosity

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.model.composite import KEY_MAPPING, text_config_of, without_report
from dynatree.engine.settings import ModelSettings
from tests.support.door import saved
from tests.support.families import tiny_config, tiny_model
from tests.support.kernel_builds import CAN_COMPILE


def logits(folder, **settings):
    """The engine of a checkpoint, and its logits for a few tokens."""
    engine = load_engine(ModelSettings(str(folder), dtype="float32", sessions=1, **settings))
    kv = engine.kv_cache.reserve(20)
    with torch.inference_mode():
        return engine, engine.forward([Segment(kv, 0, range(2, 22), range(20))])[0]


@pytest.fixture(name="folders", scope="module")
def folders_fixture(request, tmp_path_factory):
    """A composite checkpoint with either names of its tensors, and one of its language model alone."""
    root = tmp_path_factory.mktemp("models")
    whole, alone = saved(tiny_model(tiny_config("mistral3")), root / "whole"), root / "alone"
    if request.param == "as in the model":
        weights = load_file(whole / "model.safetensors")
        assert any(name.startswith("language_model.model.") for name in weights)
        inner = {
            name.replace("language_model.model.", "model.language_model.").replace(
                "language_model.lm_head", "lm_head"
            ): each
            for name, each in weights.items()
        }
        save_file(inner, whole / "model.safetensors", {"format": "pt"})
    config = text_config_of(AutoConfig.from_pretrained(whole))
    loaded = AutoModelForCausalLM.from_pretrained(whole, config=config, key_mapping=KEY_MAPPING)
    language = AutoModelForCausalLM.from_config(config)
    language.load_state_dict(loaded.state_dict())
    saved(language, alone)
    return whole, alone


@pytest.mark.parametrize(
    ("folders", "settings"),
    [
        ("as on the hub", {"weights": "int8"}),
        ("as in the model", {}),
        pytest.param("as on the hub", {}, marks=pytest.mark.long),
        pytest.param("as on the hub", {"resident_layers": 1}, marks=pytest.mark.long),
        pytest.param("as in the model", {"resident_layers": 1}, marks=pytest.mark.long),
    ],
    indirect=["folders"],
    ids=str,
)
def test_a_composite_model_is_its_language_model(folders, tmp_path, settings):
    (whole, found), (alone, expected) = (logits(each, layer_cache=tmp_path, **settings) for each in folders)
    assert torch.equal(found, expected)
    assert whole.info.parameters == alone.info.parameters, "the vision model takes memory"
    assert type(whole.model).__name__ == "MistralForCausalLM"
    assert isinstance(whole.runner, NativeRunner) == CAN_COMPILE


def test_loads_that_overlap_leave_the_reports_of_others_and_the_verbosity_alone(caplog):
    logger = logging.getLogger("transformers.modeling_utils")
    caplog.set_level(logging.WARNING, logger.name)
    before, entered, left = get_verbosity(), threading.Event(), threading.Event()

    def load():
        with without_report():
            entered.set()
            left.wait(60)
            logger.warning("Tiny LOAD REPORT of the second")

    second = threading.Thread(target=load)
    with without_report():
        second.start()
        assert entered.wait(60)
        logger.warning("Tiny LOAD REPORT of the first")
        logger.warning("something else")
    logger.warning("Tiny LOAD REPORT of a third")
    left.set()
    second.join()
    assert [record.getMessage() for record in caplog.records] == ["something else", "Tiny LOAD REPORT of a third"]
    assert get_verbosity() == before


@pytest.mark.parametrize(
    ("family", "language", "parts"),
    [
        ("paligemma", "gemma", {}),
        ("aya_vision", "cohere2", {}),
        ("llava_next", "granite", {"text_config": {"model_type": "granite"}}),
    ],
)
def test_a_composite_model_that_may_compute_more_is_refused(family, language, parts):
    message = f"{family} is a composite model, and it is not known whether its language model of {language} alone"
    with pytest.raises(StartupError, match=message):
        text_config_of(CONFIG_MAPPING[family](**parts))


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("qwen3_vl_moe", {"num_local_experts": 4}),
        ("qwen3_5_moe", {"num_experts": 4}),
        ("llama4", {"num_local_experts": 4}),
    ],
)
def test_routers_weigh_the_chosen_experts_as_in_the_whole_model(tmp_path, family, experts):
    """Two of four: the weights of two of two add up to 1 with and without normalisation."""
    config = tiny_config(family, num_experts_per_tok=2, **experts)
    folder = saved(tiny_model(config), tmp_path / "whole")
    path = folder / "config.json"
    path.write_text(re.sub(r'"norm_topk_prob": (true|false),\s*', "", path.read_text()))
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = whole(torch.arange(2, 22)[None]).logits[0]
    torch.testing.assert_close(logits(folder)[1], expected, rtol=1e-3, atol=1e-3)


def test_a_language_model_takes_over_what_transformers_reads_from_the_whole():
    config = tiny_config("qwen2_5_vl")
    config.tie_word_embeddings, config.eos_token_id, config.dtype = True, [5, 6], torch.bfloat16
    text = text_config_of(config)
    assert (text.model_type, text.tie_word_embeddings, text.eos_token_id) == ("qwen2", True, [5, 6])
    assert text.dtype is torch.bfloat16


def test_a_checkpoint_without_one_of_its_tensors_is_refused(tmp_path):
    folder = saved(tiny_model(tiny_config("llama")), tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=r"its checkpoint lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_engine(ModelSettings(str(folder)))
