"""Finds the adapters of a model, and hands the `AttentionCall` to layers that pass no keyword arguments on."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from dynatree.engine.adapters import routers

# Families whose attention has an adapter, and families that need none but whose layers get no keyword arguments.
ADAPTED = frozenset({"falcon", "falcon_mamba", "gptj", "jamba", "mamba", "mamba2", "nemotron", "stablelm"})
# Families with recurrent layers. Nemotron-H is none of them: in its prompt only, generate() bounds the time steps.
RECURRENT = frozenset(
    {
        *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"),
        *("mamba", "mamba2", "minimax", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    }
)
_OWN = ("falcon", "gptj", "minimax")  # families with a module of this package
_ADAPTERS = dict.fromkeys(RECURRENT, "recurrent") | {family: family for family in _OWN} | {"llama4_text": "llama4"}


def prepare(model_type: str) -> None:
    """Let transformers make a model of a family with an adapter."""
    if model_type in _ADAPTERS:
        _adapter(model_type)


def adapt(model: PreTrainedModel) -> None:
    """Let each attention of an adapted family call the registered attention function, and recurrent layers ours.

    Without an `AttentionCall`, the model computes its own layers. Routers of mixtures round once; see `routers`.
    """
    routers.adapt(model)
    model_type = model.config.model_type
    if model_type in _ADAPTERS:
        _adapter(model_type).adapt(model)
    if model_type not in ADAPTED:
        return
    current: dict[str, Any] = {}

    def take(_: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        current["dynatree_call"] = options.pop("dynatree_call", None)
        return args, options

    def give(_: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, options | current

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.register_forward_hook(lambda *_: current.clear(), always_call=True)  # it holds what a pass computed
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.register_forward_pre_hook(give, with_kwargs=True, prepend=True)
    model._can_set_attn_implementation = lambda: True  # type: ignore[method-assign]  # for the probe's comparison


def mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the recurrent mixers of an adapted model."""
    model_type = model.config.model_type
    found: list[nn.Module] = _adapter(model_type).mixers(model) if model_type in RECURRENT else []
    return found


def _adapter(model_type: str) -> Any:
    return import_module(f"dynatree.engine.adapters.{_ADAPTERS[model_type]}")
