"""Tests docs/reference/models.md's table of models: each row's families load with tiny weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from dynatree.common.errors import StartupError
from dynatree.engine.adapters.registry import RECURRENT
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.loading import load_engine
from dynatree.engine.model.composite import COMPOSITES
from dynatree.engine.settings import ModelSettings
from tests.cli.test_reference import rows_of
from tests.support.door import saved
from tests.support.families import tiny_config, tiny_model
from tests.support.kernel_builds import CAN_COMPILE
from tests.support.model_zoo import save_tokenizer

CONTEXT = 4096
WINDOW = 512  # window of layers that do not see the whole context
TINY: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.06,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}

# First column of the table -> (model_type, settings of its checkpoints).
ROWS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "Llama 3.1, 3.2 (text), 3.3": [
        ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 1024}}),
    ],
    "Llama 4 (text)": [
        ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 128, "attention_chunk_size": WINDOW}),
    ],
    "Qwen2.5": [("qwen2", {"sliding_window": 1024, "use_sliding_window": False})],
    "Qwen3": [("qwen3", {})],
    "Qwen3 MoE": [("qwen3_moe", EXPERTS | {"num_experts": 4})],
    "Qwen2-VL, Qwen2.5-VL, Qwen3-VL (text)": [("qwen2_vl", {}), ("qwen2_5_vl", {}), ("qwen3_vl", {})],
    "Qwen3-Next, Qwen3.5, LFM2, OLMo hybrid": [
        ("qwen3_next", {}),
        ("qwen3_5_text", {}),
        ("lfm2", {}),
        ("olmo_hybrid", {}),
    ],
    "SmolLM2": [("llama", {})],
    "SmolLM3": [("smollm3", {})],
    "Gemma (1)": [("gemma", {})],
    "Gemma 2": [("gemma2", {"sliding_window": WINDOW})],
    "Gemma 3 (text)": [("gemma3_text", {"sliding_window": WINDOW})],
    "Gemma 3n, 4": [
        (
            "gemma3n_text",
            {"vocab_size_per_layer_input": 2048, "sliding_window": WINDOW, "num_kv_shared_layers": 2}
            | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        ),
        ("gemma4_text", {"vocab_size_per_layer_input": 2048, "sliding_window": WINDOW}),
    ],
    "gpt-oss": [("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2})],
    "Mistral 7B v0.2, v0.3; Mistral Nemo, Small 24B (text)": [("mistral", {"sliding_window": None})],
    "Mistral 7B v0.1, Ministral 8B": [
        ("mistral", {"sliding_window": WINDOW}),
        ("ministral", {"sliding_window": WINDOW}),
    ],
    "Mistral Small 3.1, 3.2 24B (text)": [("mistral3", {})],
    "Mixtral": [("mixtral", {"num_local_experts": 4, "sliding_window": None})],
    "Phi-3-mini-4k": [("phi3", {"sliding_window": WINDOW})],
    "Phi-3 128k, Phi-3.5-mini, Phi-4-mini": [
        ("phi3", {"sliding_window": 262144, "original_max_position_embeddings": 1024, "rope_parameters": LONG}),
    ],
    "Phi-4 (14B)": [("phi3", {"sliding_window": None})],
    "Granite 3": [("granite", {})],
    "Granite 4 hybrids, Falcon-H1": [("granitemoehybrid", {}), ("falcon_h1", {})],
    "Nemotron-H": [("nemotron_h", {})],
    "OLMo 2": [("olmo2", {})],
    "OLMo 3": [("olmo3", {"sliding_window": WINDOW})],
    "DeepSeek-V2, V3, R1": [("deepseek_v3", EXPERTS | GROUPS | LATENT | {"num_key_value_heads": 4, "head_dim": 8})],
    "DeepSeek-R1-Distill-Qwen": [("qwen2", {})],
    "DeepSeek-R1-Distill-Llama": [("llama", {})],
    "Falcon 3": [("llama", {})],
    "Falcon 7B, 40B, 180B": [
        ("falcon", {}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ],
    "Falcon RW": [("falcon", {"alibi": True, "multi_query": False})],
    "StableLM 2, StableLM 3B": [("stablelm", {})],
    "Nemotron-4, Minitron": [("nemotron", {})],
    "GPT-J": [("gptj", {"rotary_dim": 8})],
    "GLM-4 (9B, 32B)": [("glm4", {})],
    "LLaVA, InternVL, Idefics 3, SmolVLM (text)": [("llava", {}), ("internvl", {}), ("idefics3", {}), ("smolvlm", {})],
    "Pythia, GPT-NeoX": [("gpt_neox", {})],
}
SHOWN = {row[0]: row[1] for row in rows_of("reference/models.md", "models", "served")}


def test_every_row_has_its_configurations() -> None:
    assert list(SHOWN) == list(ROWS)


def save(folder: Path, model_type: str, changes: dict[str, Any]) -> Path:
    """Save a random model of the family."""
    if model_type in COMPOSITES | RECURRENT | {"falcon", "nemotron_h"}:  # which have other fields
        return saved(tiny_model(tiny_config(model_type, **{"max_position_embeddings": CONTEXT} | changes)), folder)
    config: PretrainedConfig = CONFIG_MAPPING[model_type](**TINY | changes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(("row", "family"), [(row, family) for row, families in ROWS.items() for family in families])
def test_a_row_says_what_the_loader_does(row: str, family: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    settings = ModelSettings(str(save(tmp_path, *family)), device="cpu", dtype="float32", sessions=1, kv_tokens=6000)
    if SHOWN[row].startswith("yes"):
        engine = load_engine(settings)
        if CAN_COMPILE:
            assert isinstance(engine.runner, NativeRunner) == SHOWN[row].endswith("native")
        return
    with pytest.raises(StartupError, match="cannot be served"):
        load_engine(settings)
    within = replace(settings, max_context=WINDOW)
    if SHOWN[row].startswith("up to"):
        native = isinstance(load_engine(within).runner, NativeRunner)
        assert native or not CAN_COMPILE or not SHOWN[row].endswith("native")
    else:
        assert SHOWN[row] == "no"
        with pytest.raises(StartupError, match="cannot be served"):
            load_engine(within)
