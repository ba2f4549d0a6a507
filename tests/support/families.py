"""A tiny model of every family of causal language models in the installed transformers.

Every window, chunk, block and number of selected keys in its configuration is 16 to 32 tokens, far below its context.
"""

import re

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dynatree.engine.model.composite import COMPOSITES, loader_of

CONTEXT = 256
VOCAB_SIZE = 2048
FAMILIES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | COMPOSITES)
# No tiny checkpoint of these families can be built from a configuration alone: parts cannot be made small, values
# depend on each other, packages are not installed, or transformers builds a part of the model only.
# fmt: off
NOT_TINY = {
    "blt", "dots3_note", "dots3_note_text", "emu3", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "git",
    "mllama", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal", "qwen4_exp",
    "qwen4_exp_text", "reformer", "zamba", "zamba2",
}
# fmt: on
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_ROTARY = {"rope_type": "default", "rope_theta": 1e4}
# What the default configuration leaves out: values of the families' checkpoints, and those that a tiny model needs.
_VALUES: dict[str, dict[str, object]] = {
    "bamba": _MAMBA2 | {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": _WINDOWS | {"rope_parameters": {"sliding_attention": _ROTARY, "full_attention": None}},
    "dbrx": {
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 128, "moe_num_experts": 2, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 2, "max_window_layers": 2},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 128, "mamba_n_groups": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _MAMBA2 | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2},
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 16},
    "laguna": _WINDOWS,
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "llama4_text": {"num_experts_per_tok": 2},  # of two; in 16 bits a choice between them would have near-ties
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 16},
    "mellum": _WINDOWS,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
}
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "n_ctx": CONTEXT,
    "max_seq_len": CONTEXT,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    "hidden_size_per_layer_input": 16,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_head_dim": 16,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "n_head": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "decoder_layers": 4,
    "num_layers": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 24,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_kv_shared_layers": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Sizes of the vision model in a composite model.
_TOWER = {
    "depth": 2,
    "num_hidden_layers": 2,
    "embed_dim": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "output_dim": 64,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "image_size": 28,
    "patch_size": 14,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [1],
}
_SPAN = re.compile(
    r"^(?!.*(dim|heads|expert|layer|group)).*(window|chunk|top_?k$|local|block|span|stride|sparse|floor_scale)"
)


def default_config(family: str) -> PretrainedConfig:
    """Return the family's default configuration."""
    text = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 30}
    needed = {"text_config": {"model_type": "gemma4_text"} | text} if family == "gemma4_assistant" else {}
    return CONFIG_MAPPING[family](**needed)


def tiny_config(family: str, **changes: object) -> PretrainedConfig:
    """A configuration with four narrow layers that is otherwise as close as possible to the family's default.

    Raises:
        Exception: An exception of transformers, if the family cannot be built this way.
    """
    default = CONFIG_MAPPING[family]()
    text = default.get_text_config()
    if text is default:
        return CONFIG_MAPPING[family](**(_fields(default) | _VALUES.get(family, {}) | changes))
    parts = {name: part for name, part in vars(default).items() if isinstance(part, PretrainedConfig)}
    given = {name: {"model_type": part.model_type} | _fields(part) for name, part in parts.items()}
    (name,) = [name for name, part in parts.items() if part is text]
    for other in set(parts) - {name}:
        there = vars(parts[other])
        given[other] |= {field: size for field, size in _TOWER.items() if type(there.get(field)) is type(size)}
        given[other].pop("layer_types", None)
    if "_vl_" in text.model_type:  # pairs of a head's dimensions that turn by time, height and width
        given[name]["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    return CONFIG_MAPPING[family](**(given | {name: given[name] | _VALUES.get(text.model_type, {}) | changes}))


def _fields(config: PretrainedConfig) -> dict[str, object]:
    given = {name: value for name, value in vars(config).items() if isinstance(name, str)}
    fields = {name: size for name, size in _SIZES.items() if name in given or name in config.attribute_map}
    for name, value in given.items():
        if name in fields or isinstance(value, bool):
            continue
        if re.search(r"experts$", name) and isinstance(value, int) and value > 2:
            fields[name] = 2  # the router takes both: in 16 bits a choice between experts would have near-ties
        elif re.search(r"experts_per_tok|moe_(top_?)?k$|top_k_experts|experts_topk", name) and isinstance(value, int):
            fields[name] = min(value, 2)
        elif re.search(r"intermediate|_ffn_", name) and isinstance(value, int):
            fields[name] = 128
        elif _SPAN.search(name) and isinstance(value, int) and value > 32:
            fields[name] = 16 if "window" in name else 32
    if given.get("num_experts_per_tok", 1) is None:
        fields["num_experts_per_tok"] = 2
    if "kv_lora_rank" in given:  # latent attention has a key head for each query head
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    kinds = given.get("layer_types")
    if isinstance(kinds, list) and kinds:  # each kind at least once, up to four kinds
        several = list(dict.fromkeys(kinds))
        fields["layer_types"] = (several * 4)[:4] if len(several) <= 4 else several[:4]
    return fields


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, spread widely enough that attention is uneven.

    Raises:
        ValueError: The model has more than 20 million parameters.
    """
    with torch.device("meta"):
        size = sum(each.numel() for each in loader_of(config).from_config(config).parameters())
    if size > 2e7:
        raise ValueError(f"{size / 1e6:.0f} million parameters are not tiny")
    torch.manual_seed(seed)
    model = loader_of(config).from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            else:
                weight += 0.1 * noise
    return model
