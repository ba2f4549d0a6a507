"""Widen the embedded pair to Pythia's shapes without changing the function it computes.

    python -m dynatree.bench.shipped_pair.grow pythia-12b OUT      # from the embedded target; 24 GB
    python -m dynatree.bench.shipped_pair.grow pythia-2.8b OUT     # from the embedded target
    python -m dynatree.bench.shipped_pair.grow pythia-70m OUT      # from the embedded draft

The result has the parameters and the cost of the real shape, and still answers as the small model does. So it allows
honest benchmarks of large models where none can be downloaded. It is Pythia-shaped; it is not Pythia.

Every hidden unit and every head is repeated `r` times. A linear layer that reads repeated units has its weights
divided by `r`, a power of two, so nothing is rounded; layer norms see the same mean and variance. Added layers write
nothing to the residual stream: their output projections are zero. Added vocabulary rows copy the padding token's,
which is never predicted. (The idea is Net2WiderNet's: Chen, Goodfellow and Shlens, 2016, section 2.)

Weights are computed and written one file at a time, so that a model may be larger than the memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from dynatree import embedded

PADDING_ID = 1


@dataclass(frozen=True)
class GrownShape:
    """A published Pythia shape and the embedded model that grows into it."""

    source: Path
    hidden_size: int
    layers: int
    heads: int
    vocab_size: int


SHAPES = {
    # Heads keep their size when they are repeated: 64 heads of size 80 here, 40 of size 128 in Pythia-12B.
    "pythia-12b": GrownShape(embedded.target_path(), hidden_size=5120, layers=36, heads=64, vocab_size=50304),
    "pythia-2.8b": GrownShape(embedded.target_path(), hidden_size=2560, layers=32, heads=32, vocab_size=50304),
    "pythia-70m": GrownShape(embedded.draft_path(), hidden_size=512, layers=6, heads=8, vocab_size=50304),
}


def grow(
    shape: GrownShape, out: Path, dtype: torch.dtype = torch.bfloat16, *, max_shard_size: int | str = "2GB"
) -> None:
    """Write a model of `shape` that computes what `shape.source` computes, with its tokenizer, to the folder `out`.

    A file holds at most `max_shard_size` of weights, or one tensor. The weights of only one file are in memory at a
    time.
    """
    config = grown_config(shape, dtype)
    out.mkdir(parents=True, exist_ok=True)
    for earlier in out.glob("model*.safetensors*"):  # a loader would prefer an old single file to new shards
        earlier.unlink()
    _write(GrownWeights.of(shape, dtype), out, max_shard_size)
    config.save_pretrained(out)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shape.source / name, out / name)


def grown_config(shape: GrownShape, dtype: torch.dtype = torch.bfloat16) -> PreTrainedConfig:
    """The configuration of a model of `shape`.

    Raises:
        ValueError: The width is not a multiple of the source's, or the number of heads is not the same multiple.
    """
    config: PreTrainedConfig = AutoConfig.from_pretrained(shape.source)
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
    return config


@dataclass(frozen=True)
class GrownWeights:
    """The weights of a grown model by their names in its files, each computed on demand.

    Attributes:
        small: Weights of the source model.
        sources: For each weight, the name in `small` of the weight that it is made from, layer by layer.
        shape: Shape of the grown model.
        factor: Number of times that units and heads are repeated.
    """

    small: Mapping[str, Tensor]
    sources: Mapping[str, str]
    shape: GrownShape
    factor: int

    @classmethod
    def of(cls, shape: GrownShape, dtype: torch.dtype) -> GrownWeights:
        """The weights of a model of `shape` in one dtype."""
        config = AutoConfig.from_pretrained(shape.source)
        small = {name: weight.to(dtype) for name, weight in load_file(shape.source / "model.safetensors").items()}
        sources = {name: name for name in small if ".layers." not in name}
        for layer in range(shape.layers):
            source = f".layers.{layer % config.num_hidden_layers}."
            sources |= {name.replace(source, f".layers.{layer}."): name for name in small if source in name}
        return cls(small, sources, shape, shape.hidden_size // config.hidden_size)

    def make(self, name: str, device: str = "cpu") -> Tensor:
        """Compute one weight; on device "meta", only its shape."""
        source = self.sources[name]
        wide = _widen(name, self.small[source].to(device), self.factor, 3 * self.shape.hidden_size // self.shape.heads)
        if name != source and _writes_residual(name):  # an added layer
            return torch.zeros_like(wide)
        return _pad_vocabulary(name, wide, self.shape.vocab_size)


def _write(weights: GrownWeights, out: Path, max_shard_size: int | str) -> None:
    """Write the files that transformers reads, computing each weight when its file is written."""
    sizes = {name: weights.make(name, "meta") for name in weights.sources}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        save_file({name: weights.make(name) for name in names}, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)  # save_file makes it private, and a container may run as another user
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _widen(name: str, weight: Tensor, factor: int, head_rows: int) -> Tensor:
    """Repeat the output units of one weight or bias; repeat its input units and divide their weights by `factor`."""
    if "query_key_value" in name:  # output units come in heads, which are repeated whole
        heads = weight.reshape(-1, head_rows, *weight.shape[1:]).repeat_interleave(factor, dim=0)
        weight = heads.flatten(0, 1)
    elif not name.startswith(("embed_out", "gpt_neox.embed_in")):
        weight = weight.repeat_interleave(factor, dim=0)
    if weight.dim() == 1:
        return weight
    if "embed_in" in name:  # an embedding has no input units to divide
        return weight.repeat_interleave(factor, dim=1)
    if "attention.dense" in name:  # input units come in heads, in the order in which query_key_value makes them
        head_size = head_rows // 3
        heads = (weight / factor).reshape(weight.shape[0], -1, head_size).repeat_interleave(factor, dim=1)
        return heads.flatten(1, 2)
    return (weight / factor).repeat_interleave(factor, dim=1)


def _writes_residual(name: str) -> bool:
    return "attention.dense" in name or "dense_4h_to_h" in name


def _pad_vocabulary(name: str, weight: Tensor, vocab_size: int) -> Tensor:
    if not name.startswith(("embed_out", "gpt_neox.embed_in")):
        return weight
    padding = weight[PADDING_ID].expand(vocab_size - weight.shape[0], -1)
    return torch.cat([weight, padding])


def main(arguments: Sequence[str] | None = None) -> None:
    """Grow one shape."""
    parser = argparse.ArgumentParser(
        prog="python -m dynatree.bench.shipped_pair.grow",
        description="Widen the embedded pair to Pythia's shapes.",
        allow_abbrev=False,
    )
    parser.add_argument("shape", choices=SHAPES, help="shape of the model to write")
    parser.add_argument("out", type=Path, help="folder that receives the model")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32", "float16"],
        default="bfloat16",
        help="data type of the weights (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.out.exists() and not (options.out.is_dir() and not any(options.out.iterdir())):
        parser.error(f"{options.out} already exists; expected a new or empty folder")
    try:
        grow(SHAPES[options.shape], options.out, getattr(torch, options.dtype))
    except (OSError, SafetensorError) as error:
        parser.exit(1, f"{parser.prog}: error: {options.out} cannot be written: {error}\n")


if __name__ == "__main__":
    main()
