"""Tests that a target's generation_config is adopted, so that output equals its `generate()`, or refused by name."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from dynatree.client import Client
from dynatree.common.errors import StartupError
from dynatree.engine.loading import load_engine
from dynatree.engine.model.generation_defaults import ADOPTED, WITHOUT_EFFECT, GenerationDefaults
from dynatree.engine.served import served
from dynatree.engine.settings import ModelSettings
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

# Fields that a checkpoint may set, each with a value that changes greedy tokens or their end.
REFUSED = {
    "bad_words_ids": [[5]],
    "begin_suppress_tokens": [5],
    "cache_implementation": "quantized",
    "constraints": [1],
    "dola_layers": "high",
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "exponential_decay_length_penalty": [5, 1.1],
    "force_words_ids": [[5]],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "guidance_scale": 1.5,
    "is_assistant": True,
    "max_time": 1.0,
    "min_length": 5,
    "min_new_tokens": 5,
    "no_repeat_ngram_size": 2,
    "num_beams": 2,
    "penalty_alpha": 0.6,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "sequence_bias": [[[5], 1.0]],
    "stop_strings": ["x"],
    "suppress_tokens": [5],
    "token_healing": True,
    "watermarking_config": {"bias": 2.0},
}


def ship(folder, **fields):
    """Write fields into the checkpoint's generation_config."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    "shipped",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.8},
        {"do_sample": True, "temperature": 0.6, "no_repeat_ngram_size": 0, "num_beams": 1},
    ],
    ids=["penalty", "reward and sampling", "sampling"],
)
@pytest.mark.parametrize("seeds", [[1], pytest.param([0, 2, 3], marks=pytest.mark.long)], ids=["one", "others"])
def test_a_request_without_options_equals_the_targets_own_generate(tmp_path, shipped, seeds):
    target = save_random_model(tmp_path / "target", "llama", seed=1, num_hidden_layers=2)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=2, noise=0.2)
    model = AutoModelForCausalLM.from_pretrained(ship(target, **shipped), dtype=torch.float32).eval()
    accepted, effects = 0, set()
    with running_services(tmp_path, target, draft) as services, Client(services.draft_address) as client:
        for seed in seeds:
            prompt = random.Random(seed).choices(range(2, 2048), k=1 + 6 * seed)
            for asked in ({}, {"repetition_penalty": 1.0}, {"repetition_penalty": 1.6}):
                expected = generate(model, prompt, **asked)
                for policy in (None, "linear", "autoregressive"):
                    completion = client.generate(prompt, policy=policy, max_new_tokens=24, **asked)
                    assert completion.token_ids == expected, (policy, asked)
                    accepted += completion.stats.draft_n_accepted
            effects.add(generate(model, prompt) != generate(model, prompt, repetition_penalty=1.0))
    assert accepted > 0
    assert (True in effects) == ("repetition_penalty" in shipped), "or the test tests nothing"


def generate(model, prompt, **options):
    """Return the new tokens of greedy `generate()` with the checkpoint's own generation_config."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24, pad_token_id=0, **options)
    return tuple(output[0, len(prompt) :].tolist())


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("m") / "model", "gpt2", seed=1)


def test_what_generate_would_do_and_we_do_not_is_refused_by_name(model):
    own = (model / "generation_config.json").read_text()
    ship(model, suppress_tokens=[5], no_repeat_ngram_size=3, temperature=0.5)
    settings = ModelSettings(str(model), sessions=1)
    try:
        message = (
            "model model cannot be served exactly: its generation_config sets no_repeat_ngram_size, suppress_tokens,"
        )
        with pytest.raises(StartupError, match=message):
            load_engine(settings)
        guessing = load_engine(ModelSettings(str(model), sessions=1, chooses_tokens=False))
        assert guessing.info.repetition_penalty == 1.0, "a draft only guesses"
    finally:
        (model / "generation_config.json").write_text(own)
    assert load_engine(settings).eos_token_ids == {0}


@pytest.mark.parametrize("settings", [{}, {"weights": "int8"}, {"resident_layers": 1}], ids=str)
def test_without_a_generation_config_the_fields_of_config_json_count(tmp_path, settings):
    folder = save_random_model(tmp_path / "model", "llama", seed=1, num_hidden_layers=2)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"repetition_penalty": 1.3}))
    settings = ModelSettings(str(folder), sessions=1, layer_cache=tmp_path, **settings)
    assert load_engine(settings).info.repetition_penalty == 1.3
    (folder / "config.json").write_text(json.dumps(config | {"no_repeat_ngram_size": 2}))
    for examine in (load_engine, served):
        with pytest.raises(StartupError, match="its generation_config sets no_repeat_ngram_size"):
            examine(settings)


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_each_field_that_changes_tokens_is_refused(name, value):
    config = GenerationConfig()
    setattr(config, name, value)
    with pytest.raises(StartupError, match=f"sets {name},"):
        GenerationDefaults.of(config)


@pytest.mark.parametrize("penalty", [0.0, -1.0, 101.0, float("nan"), "high"])
def test_a_penalty_that_no_request_may_have_is_refused(penalty):
    config = GenerationConfig()
    config.repetition_penalty = penalty
    with pytest.raises(StartupError, match="repetition_penalty to"):
        GenerationDefaults.of(config)


def test_every_field_of_a_generation_config_is_accounted_for():
    """Fields that a new version of transformers adds are refused until somebody has examined them."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - ADOPTED - WITHOUT_EFFECT == set(REFUSED) & fields


def test_neutral_values_are_no_reason_to_refuse():
    config = GenerationConfig(
        **{"min_length": 0, "num_beams": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0},
        **{"repetition_penalty": 1.0, "length_penalty": 1.0, "remove_invalid_values": False, "guidance_scale": 1},
        **{"eos_token_id": [3, 4], "suppress_tokens": []},
    )
    assert GenerationDefaults.of(config) == GenerationDefaults(frozenset({3, 4}), 1.0)
    assert GenerationDefaults.of(None) == GenerationDefaults()
    for cache in ("dynamic", "static", "offloaded"):
        assert GenerationDefaults.of(GenerationConfig(cache_implementation=cache)) == GenerationDefaults()
