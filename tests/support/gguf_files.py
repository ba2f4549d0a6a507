"""GGUF files and blocks for tests."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from dynatree import embedded
from dynatree.engine.model.gguf_header import BLOCKS

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Where each type keeps its float16 numbers, in bytes of a block.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}
HALVES |= {"Q6_K": [208]}
# The spread of a type's codes times that of its scales of 8 or 6 bits.
SPREADS = {"Q8_0": 74, "Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9.2, "Q5_1": 9.2, "Q4_K": 166, "Q5_K": 332, "Q6_K": 1367}
SPREAD = 0.06  # of a model's weights
MIDDLES = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}  # of a minimum in steps of the scale
_GEMMA = {"head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": 24}
_SCALED = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
# Families by llama.cpp's names of architectures, with sizes of their own. Mixtral's architecture is llama.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 128},
    "gemma": {"head_dim": 128},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0},
    "gemma3": _GEMMA | {"num_hidden_layers": 6, "rope_parameters": {"full_attention": _SCALED}},  # the sixth is global
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "smollm3": {"num_hidden_layers": 4},  # the fourth has no rotary embedding
    "mixtral": {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2moe": _EXPERTS | {"shared_expert_intermediate_size": 512},
    "qwen3moe": _EXPERTS | {"head_dim": 128, "norm_topk_prob": True},
}
GEMMAS = {"gemma", "gemma2", "gemma3"}  # their tables are tied, and their norms are stored plus 1
TYPES = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}  # of transformers


def random_blocks(kind: str, features: int, inputs: int, generator: torch.Generator) -> Tensor:
    """Return uint8 `[features, blocks, bytes]` of random codes; the weights' spread is a model's."""
    values, size = BLOCKS[kind]
    raw = torch.randint(0, 256, (features, inputs // values, size), dtype=torch.uint8, generator=generator)
    scales = torch.randn(features, inputs // values, 1, generator=generator) * (SPREAD / SPREADS[kind])
    for at, factor in zip(HALVES[kind], (1.0, MIDDLES.get(kind)), strict=False):
        raw[..., at : at + 2] = (scales * factor).half().view(torch.uint8)
    return raw


def save_gguf(path: Path, kinds: Sequence[str], seed: int, **options: Any) -> Path:
    """Save a small model as `written_gguf` does; return the path."""
    path.write_bytes(_content(tuple(kinds), seed, **options))
    return path


@cache
def _tokenizer() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((embedded.target_path() / "tokenizer.json").read_text())
    return content


@cache
def _content(kinds: tuple[str, ...], seed: int, **options: Any) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        written_gguf(path, kinds, seed, **options)
        return path.read_bytes()


@torch.no_grad()
def written_gguf(
    path: Path,
    kinds: Sequence[str],
    seed: int,
    context: int = 160,
    tied: bool = False,
    family: str = "llama",
    values: Mapping[str, Any] | None = None,
    words: int | None = None,
    **changes: object,
) -> PreTrainedModel:
    """Save a small model of random blocks as a GGUF file, as llama.cpp's converter does; return the model in float32.

    Args:
        path: The file, with the embedded pair's tokenizer.
        kinds: Types of the weights, which the layers take in turn.
        seed: Seed of the blocks.
        context: Context length in tokens.
        tied: Whether the output layer reads the embedding table, so that the file has no output tensor, as Gemma's.
        family: A key of `FAMILIES`.
        values: More values of the file's header.
        words: Number of the tokenizer's first tokens that are kept; None means all.
        changes: Changes of the configuration.
    """
    tokenizer = _tokenizer()
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda pair: pair[1])[:words]
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 3, "vocab_size": len(vocabulary), "max_position_embeddings": context}
    others = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": tied or family in GEMMAS}
    config = CONFIG_MAPPING[TYPES.get(family, family)](**sizes | others | FAMILIES[family] | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    writer = gguf.GGUFWriter(str(path), "llama" if family == "mixtral" else family)
    _add_sizes(writer, config)
    _add_tokenizer(writer, tokenizer, vocabulary)
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_factors(config).numpy())
    if config.rope_parameters.get("rope_type") == "longrope":
        _add_longrope(writer, config)
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    for key, value in (values or {}).items():
        add[type(value)](key, value)
    [architecture] = [each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == writer.arch]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    generator = torch.Generator().manual_seed(seed)
    count = 0
    for full, parameter in model.named_parameters():
        name = names.get_name(full, try_suffixes=(".weight", ".bias"))
        if parameter.dim() == 1:
            norm = 1.0 + 0.1 * torch.randn(parameter.shape, generator=generator)
            writer.add_tensor(name, norm.numpy())
            parameter.copy_(norm - 1.0 if family in GEMMAS else norm)
            continue
        kind, count = kinds[count % len(kinds)], count + 1
        if full.endswith((".mlp.gate.weight", ".shared_expert_gate.weight")):  # in float32, and without a side of 1
            parameter.copy_(_add_weight(writer, name, "F32", [each for each in parameter.shape if each > 1], generator))
            continue
        if ".experts." in full:
            names_of = ("ffn_gate_exps", "ffn_up_exps") if full.endswith("gate_up_proj") else ("ffn_down_exps",)
            experts, features, inputs = parameter.shape
            shape = (experts, features // len(names_of), inputs)
            layer = f"blk.{full.split('.')[2]}"
            parts = [_add_weight(writer, f"{layer}.{each}.weight", kind, shape, generator) for each in names_of]
            parameter.copy_(torch.cat(parts, 1))
            continue
        weight = _add_weight(writer, name, kind, parameter.shape, generator)
        if family in ("llama", "mixtral", "smollm3") and (".q_proj." in full or ".k_proj." in full):
            heads = config.num_attention_heads if ".q_proj." in full else config.num_key_value_heads
            # the two halves of a head's dimensions alternate in the file
            weight = weight.view(heads, -1, 2, parameter.shape[1]).transpose(1, 2).reshape(parameter.shape)
        parameter.copy_(weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if writer.arch in {"qwen3", "qwen3moe"} | GEMMAS:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    else:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if writer.arch not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if writer.arch in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if writer.arch.endswith("moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if writer.arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if hasattr(config, "num_experts"):  # also Mixtral's, by another name
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if writer.arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if writer.arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_longrope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope, original = config.rope_parameters, config.original_max_position_embeddings
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    scale = config.max_position_embeddings / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", torch.tensor(rope[f"{name}_factor"]).numpy())


def _rope_factors(config: Any) -> Tensor:
    """Return the factors that llama.cpp's converter computes for `llama3` scaling, one for each pair of dimensions."""
    rope = config.rope_parameters
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for frequency in 1.0 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim):
        wavelength = 2 * math.pi / frequency
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors, dtype=torch.float32)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], vocabulary: list[tuple[str, int]]) -> None:
    special = {each["content"] for each in tokenizer["added_tokens"]}
    kept = {token for token, _ in vocabulary}
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    merges = [each for each in merges if each.replace(" ", "") in kept]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)


def _add_weight(
    writer: gguf.GGUFWriter, name: str, kind: str, shape: Sequence[int], generator: torch.Generator
) -> Tensor:
    """Add a random weight; return it as float32 in the file's order of rows."""
    kept = gguf.GGMLQuantizationType[kind]
    if kind in FLOATS:
        weight = (torch.randn(shape, generator=generator) * SPREAD).to(FLOATS[kind])
        writer.add_tensor(name, weight.view(torch.uint8).numpy(), raw_dtype=kept)
        return weight.float()
    raw = random_blocks(kind, math.prod(shape[:-1]), shape[-1], generator).view(*shape[:-1], -1).numpy()
    writer.add_tensor(name, raw, raw_dtype=kept)
    return torch.from_numpy(gguf.quants.dequantize(raw, kept))
