"""The experts of a mixture's layer by the project's own CPU kernel (`native/experts.c`).

A row wakes a few experts, and a forward pass reads the weights of all experts that its rows wake. Each is read once,
however many rows share it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from dynatree.engine.cpu.native import address, call
from dynatree.engine.cpu.native_linear import PANEL, Linear, NativeLinear

# `enum activation` and `enum combination` of `native/kernels.h`
_SILU, _CLAMPED_SWISH, _CLAMPED_PLUS_ONE, _TIMES = 3, 6, 7, 2
_SILU_MODULES = (nn.SiLU, SiLUActivation)
_APPLY_GATE = MixtralExperts._apply_gate  # type: ignore[attr-defined]  # silu(gate) * up, from their decorator
# The attributes that transformers' `use_experts_implementation` gives to experts, in the form that is computed here.
# Version 5.17 has no `has_post_expert_norm`.
_FORM = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}


# gpt-oss: gate and up alternate, with biases, and their values are clamped
_CLAMPED_FORM = _FORM | {"has_bias": True, "is_transposed": True, "is_concatenated": False}


class Experts(ctypes.Structure):
    """`struct experts` of `native/kernels.h`."""

    _fields_ = (
        ("gate", Linear),
        ("up", Linear),
        ("down", Linear),
        ("gate_up_bytes", ctypes.c_int64),
        ("down_bytes", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("chosen", ctypes.c_int64),
        ("scoring", ctypes.c_int64),
    )


class NativeExperts(nn.Module):
    """The experts of a layer: down(silu(gate(row)) * up(row)), summed over a row's experts by the router's weights.

    With a limit, gpt-oss's: down(swish(min(gate(row), limit)) * (clamp(up(row), -limit, limit) + 1)).

    A row's result has the same bits in any company. Its experts are added in the router's order, in float32.

    Args:
        gate_up: Layer of `experts * 2 * intermediate` features: for each expert its gate, then its up projection.
        down: Layer of `experts * hidden` features.
        experts: Number of experts.
        limit: Largest value of gate and of up, and of -up; None: no limit.
        slope: Factor within the swish function beside a limit, x * logistic(slope * x).

    Attributes:
        structure: The experts as the kernels' structure, without the number that a row chooses.

    Raises:
        ValueError: The layers do not belong together.
    """

    def __init__(
        self, gate_up: NativeLinear, down: NativeLinear, experts: int, limit: float | None = None, slope: float = 1.0
    ) -> None:
        super().__init__()
        self.num_experts = experts
        self.hidden_dim, self.intermediate_dim = gate_up.in_features, down.in_features
        features = (gate_up.out_features, down.out_features)
        whole = self.hidden_dim % PANEL == self.intermediate_dim % PANEL == 0  # an expert begins with a panel
        if (gate_up.bias is None) != (down.bias is None):
            raise ValueError("only one of the layers has a bias")
        if not whole or features != (experts * 2 * self.intermediate_dim, experts * self.hidden_dim):
            raise ValueError(f"layers of {features} features are not those of {experts} experts in whole panels")
        self.gate_up, self.down = gate_up, down
        gate, up = (Linear.from_buffer_copy(gate_up.structure) for _ in range(2))
        one = Linear.from_buffer_copy(down.structure)
        gate.features = up.features = self.intermediate_dim
        one.features = self.hidden_dim
        gate.activation, up.combination = _SILU, _TIMES
        each = gate_up.weight.nbytes // experts
        up.weight += each // 2
        if gate_up.bias is not None:
            up.bias += self.intermediate_dim * gate_up.bias.itemsize
        if limit is not None:
            gate.activation, up.activation = _CLAMPED_SWISH, _CLAMPED_PLUS_ONE
            gate.cap, up.cap, gate.slope = limit, limit, slope
        self.structure = Experts(gate, up, one, each, down.weight.nbytes // experts, experts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of each row; see the experts of transformers.

        Args:
            hidden_states: `[rows, hidden]`.
            top_k_index: Experts of each row, `[rows, chosen]`.
            top_k_weights: Their weights, `[rows, chosen]`.

        Raises:
            IndexError: There is no such expert.
            MemoryError: The kernel cannot allocate its working memory.
        """
        dtype, (count, chosen) = self.down.dtype, top_k_index.shape
        rows, chosen_ones = hidden_states.to(dtype).contiguous(), top_k_index.long().contiguous()
        weights = top_k_weights.float().contiguous()
        if count and not 0 <= int(chosen_ones.min()) <= int(chosen_ones.max()) < self.num_experts:
            raise IndexError(f"an expert is not in [0, {self.num_experts})")
        output = torch.empty_like(rows)
        self.structure.chosen = chosen
        call(
            "dynatree_experts",
            ctypes.byref(self.structure),
            address(rows, dtype, count, self.hidden_dim),
            count,
            address(chosen_ones, torch.int64, count, chosen),
            address(weights, torch.float32, count, chosen),
            address(output, dtype, count, self.hidden_dim),
        )
        return output


def are_experts(module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer in any of transformers' forms."""
    return hasattr(module, "is_transposed") and hasattr(module, "is_concatenated")


def is_fused(module: Any) -> bool:
    """Whether a module holds experts in the form that `NativeExperts` computes.

    Its weights are `gate_up_proj` `[experts, 2 * intermediate, hidden]` and `down_proj` `[experts, hidden,
    intermediate]`.
    """
    if not _has_form(module, _FORM):
        return False
    if type(module)._apply_gate is not _APPLY_GATE or type(module.act_fn) not in _SILU_MODULES:
        return False
    return all(size % PANEL == 0 for size in module.down_proj.shape[1:])


def _is_clamped(module: Any) -> bool:
    """Whether a module holds gpt-oss's experts, in widths that `NativeExperts` computes.

    Its weights are `gate_up_proj` `[experts, hidden, 2 * intermediate]` and `down_proj` `[experts, intermediate,
    hidden]`.
    """
    if type(module).__name__ != "GptOssExperts" or not _has_form(module, _CLAMPED_FORM):
        return False
    return all(size % PANEL == 0 for size in module.down_proj.shape[1:])


def _has_form(module: Any, form: dict[str, bool]) -> bool:
    return are_experts(module) and all(getattr(module, name, value) is value for name, value in form.items())


def fused_experts(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the experts within a module that `native_experts` takes: the parent, the name there, and the experts."""
    for parent in module.modules():
        yield from (
            (parent, name, each) for name, each in parent.named_children() if is_fused(each) or _is_clamped(each)
        )


def native_experts(experts: Any) -> NativeExperts:
    """Return the experts in the kernel's layout."""
    count = len(experts.down_proj)
    if is_fused(experts):
        plain = [NativeLinear(matrix(each), None) for each in weights_in(experts)]
        return NativeExperts(plain[0], plain[1], count)
    weight, bias = (_parted(each.detach()) for each in (experts.gate_up_proj, experts.gate_up_proj_bias))
    gate_up = NativeLinear(weight.transpose(-2, -1).flatten(0, 2), bias.flatten())
    down = NativeLinear(matrix(experts.down_proj.transpose(1, 2)), experts.down_proj_bias.detach().flatten())
    return NativeExperts(gate_up, down, count, experts.limit, experts.alpha)


def _parted(alternating: Tensor) -> Tensor:
    """Return `[experts, ..., 2 * width]`, in which gate and up alternate, as `[experts, 2, ..., width]`."""
    return alternating.view(*alternating.shape[:-1], -1, 2).movedim(-1, 1)


def weights_in(experts: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the weights of fused experts."""
    return experts.gate_up_proj, experts.down_proj


def matrix(weights: Tensor) -> Tensor:
    """Return the weights of all experts `[experts, out_features, in_features]` as those of one layer."""
    return weights.detach().flatten(0, 1)
