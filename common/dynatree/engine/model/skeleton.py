"""A model of a configuration without weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from dynatree.engine.adapters.registry import adapt, prepare
from dynatree.engine.forward.attention import NAME
from dynatree.engine.model.rotary import fix_rotary


def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model without weights: its parameters are on the meta device, but its computed buffers are not.

    The configuration stays as it is; transformers would write the dtype into it.
    """
    prepare(config.model_type)
    with _parameters_on_meta(), guard_torch_init_functions():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(config), dtype=dtype, attn_implementation=NAME, trust_remote_code=False
        )
    model.tie_weights()
    fix_rotary(model)
    adapt(model)
    model.train(False)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Register all module parameters on the meta device, without memory, while the context lives."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            empty: Tensor = parameter.to("meta")
            parameter = nn.Parameter(empty, requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # no weights are drawn for it
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
