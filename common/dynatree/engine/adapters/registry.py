"""Finds the adapter of a family, and hands the `AttentionCall` to layers that pass no keyword arguments on."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# Families with an adapter, and families that need none but whose layers pass no keyword arguments on.
_ADAPTERS = frozenset({"falcon", "gptj"})
ADAPTED = _ADAPTERS | {"nemotron", "stablelm"}


def prepare(model_type: str) -> None:
    """Let transformers make a model of a family with an adapter."""
    if model_type in _ADAPTERS:
        _adapter(model_type)


def adapt(model: PreTrainedModel) -> None:
    """Let each attention of an adapted family call the registered attention function.

    Without an `AttentionCall`, the model computes its own attention.
    """
    model_type = model.config.model_type
    if model_type not in ADAPTED:
        return
    if model_type in _ADAPTERS:
        _adapter(model_type).adapt(model)
    current: dict[str, Any] = {}

    def take(_: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        current["dynatree_call"] = options.pop("dynatree_call", None)
        return args, options

    def give(_: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, options | current

    model.register_forward_pre_hook(take, with_kwargs=True)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.register_forward_pre_hook(give, with_kwargs=True)
    model._can_set_attn_implementation = lambda: True  # type: ignore[method-assign]  # for the probe's comparison


def _adapter(model_type: str) -> Any:
    return import_module(f"dynatree.engine.adapters.{model_type}")
