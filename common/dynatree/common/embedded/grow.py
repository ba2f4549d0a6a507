"""Widen the embedded pair to Pythia's shapes without changing the function it computes.

    python -m dynatree.common.embedded.grow pythia-2.8b OUT     # from the embedded target
    python -m dynatree.common.embedded.grow pythia-70m OUT      # from the embedded draft

What comes out has the real shape's parameters and costs what the real shape costs, and still answers as the small
model does: honest benchmarks of large models where none can be downloaded. It is Pythia-shaped; it is not Pythia.

Every hidden unit and every head is repeated `r` times. A linear layer that reads repeated units gets its weights
divided by `r`, a power of two, so nothing is rounded; layer norms see the same mean and variance. Further layers write
nothing to the residual stream: their output projections are zero. Further vocabulary rows copy the padding token's,
which is never predicted. (The idea is Net2WiderNet's: Chen, Goodfellow and Shlens, 2016, section 2.)
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GPTNeoXForCausalLM

from dynatree.common import embedded

PADDING_ID = 1
Model: Any = GPTNeoXForCausalLM  # its annotations do not admit what from_pretrained returns


@dataclass(frozen=True)
class GrownShape:
    """A published Pythia shape and the embedded model that grows into it."""

    source: Path
    hidden_size: int
    layers: int
    heads: int
    vocab_size: int


SHAPES = {
    "pythia-2.8b": GrownShape(embedded.target_path(), hidden_size=2560, layers=32, heads=32, vocab_size=50304),
    "pythia-70m": GrownShape(embedded.draft_path(), hidden_size=512, layers=6, heads=8, vocab_size=50304),
}


def grow(shape: GrownShape, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a model of `shape` that computes what `shape.source` computes, with its tokenizer, to the folder `out`."""
    source = Model.from_pretrained(shape.source, dtype=dtype)
    config = AutoConfig.from_pretrained(shape.source)
    factor = shape.hidden_size // config.hidden_size
    if shape.hidden_size % config.hidden_size or factor != shape.heads // config.num_attention_heads:
        raise ValueError(f"{config.hidden_size} wide does not grow to {shape.hidden_size} with {shape.heads} heads")
    config.update(
        {
            "hidden_size": shape.hidden_size,
            "intermediate_size": 4 * shape.hidden_size,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "vocab_size": shape.vocab_size,
            "dtype": str(dtype).removeprefix("torch."),
        }
    )
    with torch.device("meta"):
        model = Model._from_config(config, dtype=dtype)
    model.load_state_dict(_grown_weights(source.state_dict(), shape, factor), assign=True)
    model.generation_config = source.generation_config
    model.save_pretrained(out, max_shard_size="2GB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shape.source / name, out / name)


def _grown_weights(small: dict[str, Tensor], shape: GrownShape, factor: int) -> dict[str, Tensor]:
    layers = 1 + max(int(name.split(".")[2]) for name in small if name.startswith("gpt_neox.layers."))
    head_rows = 3 * shape.hidden_size // shape.heads
    grown = {}
    for name, weight in small.items():
        if ".layers." in name:
            index = int(name.split(".")[2])
            copies = range(index, shape.layers, layers)
            for copy in copies:
                wide = _widen(name, weight, factor, head_rows)
                if copy >= layers and _writes_residual(name):
                    wide = torch.zeros_like(wide)
                grown[name.replace(f".layers.{index}.", f".layers.{copy}.")] = wide
        else:
            grown[name] = _pad_vocabulary(name, _widen(name, weight, factor, head_rows), shape.vocab_size)
    return grown


def _widen(name: str, weight: Tensor, factor: int, head_rows: int) -> Tensor:
    """Repeat the output units of one weight or bias, and repeat and share out its input units."""
    if "query_key_value" in name:  # output units come in heads, which are repeated whole
        heads = weight.reshape(-1, head_rows, *weight.shape[1:]).repeat_interleave(factor, dim=0)
        weight = heads.flatten(0, 1)
    elif not name.startswith(("lm_head", "gpt_neox.embed_in")):
        weight = weight.repeat_interleave(factor, dim=0)
    if weight.dim() == 1:
        return weight
    if "embed_in" in name:  # an embedding has no input units to share
        return weight.repeat_interleave(factor, dim=1)
    if "attention.dense" in name:  # input units come in heads, in the order in which query_key_value makes them
        head_size = head_rows // 3
        heads = weight.reshape(weight.shape[0], -1, head_size).repeat_interleave(factor, dim=1)
        return heads.flatten(1, 2) / factor
    return weight.repeat_interleave(factor, dim=1) / factor


def _writes_residual(name: str) -> bool:
    return "attention.dense" in name or "dense_4h_to_h" in name


def _pad_vocabulary(name: str, weight: Tensor, vocab_size: int) -> Tensor:
    if not name.startswith(("lm_head", "gpt_neox.embed_in")):
        return weight
    padding = weight[PADDING_ID].expand(vocab_size - weight.shape[0], -1)
    return torch.cat([weight, padding])


def main(arguments: Sequence[str] | None = None) -> None:
    """Grow one shape."""
    parser = argparse.ArgumentParser(description="Widen the embedded pair to Pythia's shapes.", allow_abbrev=False)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path, help="folder that receives the model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    options = parser.parse_args(arguments)
    grow(SHAPES[options.shape], options.out, getattr(torch, options.dtype))


if __name__ == "__main__":
    main()
