"""The adapter of families with recurrent layers, whose mixers call functions of their modules for all that recurs.

In forward passes with an `AttentionCall`, other functions take the place of these: they compute trees of tokens of
several sessions. Projections, gates and norms stay those of transformers.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from dynatree.engine.adapters import state_spaces
from dynatree.engine.adapters.layer_call import LayerCall, check_options
from dynatree.engine.adapters.rounded import rounded, softplus
from dynatree.engine.cpu import native_recurrence
from dynatree.engine.recurrent import short_conv
from dynatree.engine.recurrent.linear_attention import Records
from dynatree.engine.recurrent.scan import Scan


class _StepLinear(nn.Linear):
    """A linear layer whose weight the mixer of Mamba-1 reads itself, so that no layout may take its place."""


# What transformers advises where it computes a mixer itself; these packages compute on GPUs only.
_ADVICE = re.compile(
    r"is falling back to its reference .* because `(causal_conv1d|mamba_ssm|flash-linear-attention)` is not installed"
)
# The call of the mixer that runs now. It is a variable because Mamba-1's mixers pass no keyword arguments on.
_CURRENT: ContextVar[LayerCall | None] = ContextVar("_CURRENT", default=None)


def adapt(model: PreTrainedModel) -> None:
    """Let each recurrent mixer of a model compute trees of tokens."""
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_no_advice)
    for mixer in mixers(model):
        step = getattr(mixer, "dt_proj", None)
        if type(step) is nn.Linear:
            step.__class__ = _StepLinear
        _replace_functions(sys.modules[type(mixer).__module__])
        mixer.register_forward_pre_hook(_enter, with_kwargs=True)
        mixer.register_forward_hook(_leave, always_call=True)


def mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the recurrent mixers of a model; each is known by its convolution."""
    return [each for each in model.modules() if any(isinstance(child, nn.Conv1d) for child in each.children())]


def _is_no_advice(record: logging.LogRecord) -> bool:
    return _ADVICE.search(record.getMessage()) is None


def _enter(mixer: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    call = options.pop("dynatree_call", None)
    if call is not None:
        options["attention_mask"] = None  # the placeholder, which Mamba-1 takes for a mask of padding
    _CURRENT.set(None if call is None else LayerCall(call, mixer.layer_idx))  # type: ignore[arg-type]
    return args, options


def _leave(*_: Any) -> None:
    _CURRENT.set(None)


def _replace_functions(modeling: Any) -> None:
    """Replace the functions of a module of transformers while there is a `LayerCall`."""
    for name, ours in _FUNCTIONS.items():
        theirs = getattr(modeling, name, None)
        if theirs is not None and not hasattr(theirs, "dynatree"):
            setattr(modeling, name, _either(ours, theirs))
    if getattr(modeling, "F", None) is functional:  # the gates of delta rules, of few heads in float32
        softened = _either(lambda _, *args, **options: softplus(*args, **options), functional.softplus)
        modeling.F = SimpleNamespace(**vars(functional) | {"softplus": softened})


def _either(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def function(*args: Any, **options: Any) -> Any:
        call = _CURRENT.get()
        return theirs(*args, **options) if call is None else ours(call, *args, **options)

    function.dynatree = True  # type: ignore[attr-defined]
    return function


def _convolution(
    call: LayerCall, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    """Compute the convolution of each channel of `x`, `[1, channels, n]`."""
    check_options(others)
    rows = x[0].T  # [n, channels]
    start = partial(rows.new_zeros, (weight.shape[1] - 1, len(weight)))
    scan = Scan("a convolution", partial(_convolve, weight, bias), _shift, start, (rows[:0],))
    output = call.scan(scan, (rows,)).T[None]
    return output if activation is None else rounded(ACT2FN[activation], output)


def _convolve(
    weight: Tensor, bias: Tensor | None, x: Tensor, kept: Records, ancestors: Tensor | None, state: Tensor
) -> tuple[Tensor, Records]:
    return native_recurrence.short_conv(x, weight, bias, kept[0], ancestors, state), (x,)


def _shift(state: Tensor, records: Records) -> Tensor:
    return short_conv.fold(state, records[0])


def _delta_rule(
    call: LayerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the gated delta rule: query and key `[1, n, G, dk]`, value `[1, n, H, dv]`, g and beta `[1, n, H]`.

    Kimi Linear's g has a decay per channel, `[1, n, H, dk]`.
    """
    check_options(others)
    rows = [each[0].double() for each in (query, key, value, g, beta)]
    if use_qk_l2norm_in_kernel:
        rows[:2] = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in rows[:2])
    rows[0] = rows[0] * query.shape[-1] ** -0.5
    heads, size = value.shape[2:]
    start = partial(rows[0].new_zeros, (heads, key.shape[3], size))
    none = (rows[1][:0], rows[2][:0], rows[3][:0])
    scan = Scan("a gated delta rule", native_recurrence.gated_delta, native_recurrence.fold, start, none)
    return call.scan(scan, rows)[None].to(value.dtype), None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": state_spaces.mamba2,
    "mamba_selective_scan": state_spaces.mamba,
}
