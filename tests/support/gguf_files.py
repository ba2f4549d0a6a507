"""GGUF files and blocks for tests."""

import json
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

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


def random_blocks(kind: str, features: int, inputs: int, generator: torch.Generator) -> Tensor:
    """Return uint8 `[features, blocks, bytes]` of random codes; the weights' spread is a model's."""
    values, size = BLOCKS[kind]
    raw = torch.randint(0, 256, (features, inputs // values, size), dtype=torch.uint8, generator=generator)
    scales = torch.randn(features, inputs // values, 1, generator=generator) * (SPREAD / SPREADS[kind])
    for at, factor in zip(HALVES[kind], (1.0, MIDDLES.get(kind)), strict=False):
        raw[..., at : at + 2] = (scales * factor).half().view(torch.uint8)
    return raw


def save_gguf(
    path: Path,
    kinds: Sequence[str],
    seed: int,
    context: int = 160,
    tied: bool = False,
    sizes: tuple[int, int, int] = (256, 512, 3),
    words: int | None = None,
) -> Path:
    """Save a small Llama of random blocks as a GGUF file, with the embedded pair's tokenizer.

    Args:
        path: The file.
        kinds: Types of the weights, which the layers take in turn.
        seed: Seed of the blocks.
        context: Context length in tokens.
        tied: Whether the output layer reads the embedding table, so that the file has no output tensor.
        sizes: Width, width of the feed-forward layers, and number of layers.
        words: Number of the tokenizer's first tokens that are kept; None means all.
    """
    tokenizer = json.loads((embedded.target_path() / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda pair: pair[1])[:words]
    kept = {token for token, _ in vocabulary}
    special = {each["content"] for each in tokenizer["added_tokens"]}
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    merges = [each for each in merges if each.replace(" ", "") in kept]
    (hidden, middle, layers), heads, kv_heads = sizes, 4, 2
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(middle)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    generator = torch.Generator().manual_seed(seed)
    count = 0

    def add(name: str, features: int, inputs: int) -> None:
        nonlocal count
        kind = kinds[count % len(kinds)]
        count += 1
        if kind in FLOATS:
            values = torch.randn(features, inputs, generator=generator) * 0.06
            raw = values.to(FLOATS[kind]).view(torch.uint8)
        else:
            raw = random_blocks(kind, features, inputs, generator).flatten(1)
        writer.add_tensor(f"{name}.weight", raw.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])

    norm = np.ones(hidden, dtype=np.float32)
    add("token_embd", len(vocabulary), hidden)
    for layer in range(layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", norm)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", norm)
        add(f"blk.{layer}.attn_q", hidden, hidden)
        add(f"blk.{layer}.attn_k", hidden // heads * kv_heads, hidden)
        add(f"blk.{layer}.attn_v", hidden // heads * kv_heads, hidden)
        add(f"blk.{layer}.attn_output", hidden, hidden)
        add(f"blk.{layer}.ffn_gate", middle, hidden)
        add(f"blk.{layer}.ffn_up", middle, hidden)
        add(f"blk.{layer}.ffn_down", hidden, middle)
    writer.add_tensor("output_norm.weight", norm)
    if not tied:
        add("output", len(vocabulary), hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
