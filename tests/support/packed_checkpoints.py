"""Checkpoints of GPTQ, AWQ and compressed-tensors for tests."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.model_zoo import save_random_model

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where a feature's 4 bits lie in a word


def packed(codes: Tensor, bits: int, places: list[int] | None = None) -> Tensor:
    """Pack `[..., codes]` into int32 words `[..., words]`, the first code lowest."""
    many = 32 // bits
    words = codes.long().unflatten(-1, (-1, many))
    shifts = torch.tensor(places or range(many)) * bits
    total = (words << shifts).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def stored(
    method: str,
    bits: int,
    group: int,
    features: int,
    inputs: int,
    generator: torch.Generator,
    scale_dtype: torch.dtype = torch.float16,
) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """Return a layer's tensors as the method stores them, its settings, and the weight in float32."""
    groups = inputs // group
    codes = torch.randint(0, 1 << bits, (features, inputs), generator=generator)
    scales = (torch.rand(features, groups, generator=generator) + 0.5).to(scale_dtype) * (0.32 / (1 << bits))
    middle = 1 << (bits - 1)
    zeros = middle + torch.randint(-2, 3, (features, groups), generator=generator)
    if method.startswith("gptq"):
        first = 1 if method == "gptq" else 0
        tensors = {
            "qweight": packed(codes, bits).T.contiguous(),
            "qzeros": packed((zeros - first).T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": (torch.arange(inputs) // group).int(),
        }
        settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": method}
    elif method == "awq":
        tensors = {
            "qweight": packed(codes.T, bits, AWQ_PLACES),
            "qzeros": packed(zeros.T, bits, AWQ_PLACES),
            "scales": scales.T.contiguous(),
        }
        settings = {"quant_method": "awq", "bits": bits, "group_size": group, "version": "gemm"}
    else:
        form = "pack-quantized" if method == "packed" else "int-quantized"
        tensors = {"weight_scale": scales}
        if method == "packed":
            tensors["weight_packed"] = packed(codes, bits)
            tensors["weight_shape"] = torch.tensor([features, inputs])
        else:
            tensors["weight"] = (codes - (1 << (bits - 1))).to(torch.int8)
        zeros = torch.full_like(zeros, 1 << (bits - 1))
        scheme = {"weights": {"num_bits": bits, "strategy": "group", "group_size": group, "type": "int"}}
        settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme}}
    weight = (codes.view(features, groups, group) - zeros[..., None]) * scales.float()[..., None]
    return tensors, settings, weight.view(features, inputs)


def save_packed(folder: Path, method: str, bits: int, architecture: str = "llama", seed: int = 3) -> tuple[Path, Path]:
    """Save a small model with packed weights, and one with the same weights in float32; return their folders."""
    whole = save_random_model(folder / "whole", architecture, seed)
    state, generator = load_file(whole / "model.safetensors"), torch.Generator().manual_seed(seed + 1)
    plain = dict(state)
    settings: dict[str, Any] = {}
    for name in list(state):
        if "proj" in name and name.endswith(".weight"):
            features, inputs = state.pop(name).shape
            tensors, settings, plain[name] = stored(method, bits, 32, features, inputs, generator)
            state |= {f"{name.removesuffix('.weight')}.{key}": value for key, value in tensors.items()}
    path = folder / f"{method}-{bits}"
    shutil.copytree(whole, path)
    save_file(plain, whole / "model.safetensors", metadata={"format": "pt"})
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return path, whole
