"""Elementwise functions whose bits do not depend on how many elements are computed at once.

In float32, torch's vector loop and the loop over the elements that it leaves differ in last bits. With few heads, the
number of rows decides which loop computes a head's gate. float64 rounds to one float32 number in either loop, unless a
result lies within 1e-16 of a rounding boundary. 16-bit results agree for every input, as a test tries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rounded(function: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Compute an elementwise function, of float32 numbers in float64."""
    if x.dtype != torch.float32:
        return function(x, *args, **options)
    return function(x.double(), *args, **options).float()


def softplus(x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Compute log(1 + exp(x)) of each element by `rounded`."""
    return rounded(functional.softplus, x, *args, **options)
