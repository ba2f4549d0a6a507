"""A causal convolution of each channel over a token and its last ancestors (LFM2; inside other recurrent layers)."""

from __future__ import annotations

import torch
from torch import Tensor

from dynatree.engine.recurrent.linear_attention import seen


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor, ancestors: Tensor | None, state: Tensor
) -> Tensor:
    """Compute the convolution of `n` new tokens in float64; their records are their inputs `x`.

    Args:
        x: Inputs `[n, channels]`.
        weight: `[channels, width]`; the last column is for a token itself.
        bias: `[channels]`.
        kept: Inputs of `m` earlier tokens that are not in the state, `[m, channels]`.
        ancestors: Bool `[n, m + n]`, true where a token descends from a kept or new token; parents come before their
            children. None means a chain: every token descends from all before it.
        state: Inputs of the last `width - 1` tokens before the kept ones, `[width - 1, channels]`; zeros before the
            first token.

    Returns:
        `[n, channels]`, in the dtype of `x`.
    """
    m = len(kept)
    if ancestors is None or ancestors[:, :m].all():  # the kept tokens are a chain before all new ones
        state, kept, ancestors = fold(state, kept), kept[:0], None if ancestors is None else ancestors[:, m:]
    n, m, width = len(x), len(kept), weight.shape[1]
    inputs, weight = torch.cat((state, kept, x)).double(), weight.double()
    places = torch.arange(len(inputs), device=x.device)
    if ancestors is None:
        taps = places[m : m + n, None] + places[:width]
    else:
        taps = places[width - 1 :].where(seen(ancestors), -1)
        taps = torch.cat((places[: width - 1].expand(n, -1), taps), 1).topk(width).values.flip(1)  # [n, width]
    output = inputs[taps[:, 0]] * weight[:, 0]
    for tap in range(1, width):
        output += inputs[taps[:, tap]] * weight[:, tap]
    return (output if bias is None else output + bias.double()).to(x.dtype)


def fold(state: Tensor, kept: Tensor) -> Tensor:
    """Compute the state after a chain of tokens with the inputs `kept`: `[width - 1, channels]`."""
    return torch.cat((state, kept))[len(kept) :].clone()  # a view would hold the memory of all inputs
