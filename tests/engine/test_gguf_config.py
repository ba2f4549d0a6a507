"""Tests of configurations of GGUF files whose keys or tensors do not say everything."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import Starcoder2Config

from dynatree.common.errors import StartupError
from dynatree.engine.model import gguf_config
from dynatree.engine.model.gguf_config import config_of
from dynatree.engine.model.gguf_families import FAMILIES, Values
from dynatree.engine.model.gguf_header import GGUFTensor, Length
from dynatree.engine.model.rope_factors import add_factors
from tests.support.gguf_files import written_gguf

WORDS = 300


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rope.freq_base", 999999.0, 10000.0),
        ("rope.freq_base", 10000.0, None),
        ("attention.layer_norm_epsilon", 1e-6, 1e-5),
        ("attention.layer_norm_epsilon", float(np.float32(1e-5)), None),
    ],
)
def test_a_number_that_transformers_does_not_map_is_compared_with_its_default(key, value, expected):
    """StarCoder2's files have such numbers, and its tensors no place for them."""
    values = {"general.architecture": "starcoder2", f"starcoder2.{key}": value}
    header = SimpleNamespace(values=values, tensors=[])
    with nullcontext() if expected is None else pytest.raises(StartupError, match=f"{key} is .*, expected {expected}"):
        gguf_config._check_keys("model.gguf", header, Starcoder2Config(rope_theta=10000.0), set())


@pytest.mark.parametrize("family", ["qwen2moe", "qwen3moe"])
@pytest.mark.parametrize("norm", [None, True, False])
def test_the_weights_of_experts_are_normalised_as_a_file_says_or_its_family_does(tmp_path, family, norm):
    values = {} if norm is None else {f"{family}.expert_weights_norm": norm}
    written_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1, family=family, values=values, words=WORDS)
    expected = family == "qwen3moe" if norm is None else norm
    assert config_of(str(tmp_path / "model.gguf")).norm_topk_prob is expected


def test_a_file_may_say_that_the_weights_of_mixtrals_experts_are_normalised(tmp_path):
    path = tmp_path / "model.gguf"
    written_gguf(path, ("Q8_0",), seed=1, family="mixtral", values={"llama.expert_weights_norm": True}, words=WORDS)
    assert config_of(str(path)).num_local_experts == 4


@pytest.mark.parametrize(("context", "window"), [(4096, 2047), (131072, None)])
def test_a_window_that_old_files_of_phi_3_do_not_name_is_told_from_the_context(context, window):
    fields = {"head_dim": 96, "rope_parameters": {}, "max_position_embeddings": context}
    of_phi3 = FAMILIES["phi3"][1]
    assert of_phi3(fields, Values({}))["sliding_window"] == window
    assert of_phi3(fields, Values({"attention.sliding_window": 0}))["sliding_window"] is None


@pytest.mark.parametrize("there", [True, False])
def test_files_of_llama_3_1_without_the_factors_of_their_rotary_embeddings_are_refused(tmp_path, there):
    values = {"general.architecture": "llama", "llama.context_length": 131072, "llama.rope.freq_base": 500000.0}
    values |= {"tokenizer.ggml.tokens": Length(128257)}
    tensors = [GGUFTensor("rope_freqs.weight", "F32", (64,), 0, 256)] if there else []
    path = tmp_path / "model.gguf"
    path.write_bytes(np.ones(64, np.float32).tobytes())
    config = SimpleNamespace(head_dim=128, rope_parameters={"rope_theta": 500000.0})
    with nullcontext() if there else pytest.raises(StartupError, match=r"later, but it lacks rope_freqs\.weight"):
        add_factors(path, SimpleNamespace(values=values, tensors=tensors), config)
