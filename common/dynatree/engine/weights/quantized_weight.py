"""A weight matrix in 8 or 4 bits: integer codes, and a scale for each group of a row's inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

GROUPS = (128, 64, 32, 16)  # inputs that may share a scale, the cheapest first
MOST_INPUTS = {8: 128, 4: 32}  # that share a scale, by bits
_SMALLEST = torch.finfo(torch.float16).tiny  # below it float16 loses bits
_PIECE = 1 << 20  # weights that are rounded at a time, so that temporary tensors stay small


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight `[features, inputs]`: scale * (code - offset), or with minimums scale * code + minimum.

    With `steps`, scales and minimums are whole numbers that are multiplied by the step of their group of groups.

    Attributes:
        kind: Name of the format, such as "int8" or "Q4_K".
        codes: uint8 `[features, inputs]`.
        scales: float16 or float32 `[features, groups]`; with `steps` int8.
        bits: Bits of a code, 8 or 4.
        offset: Code of the weight 0; 0 if there are minimums.
        minimums: As `scales`; None if there are none.
        steps: float16 `[features, supers]`; None if scales are numbers by themselves.
        minimum_steps: float16 `[features, supers]`; None if there are no minimums or no steps.
        narrow: Whether all codes are below 128.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    bits: int
    offset: int = 0
    minimums: Tensor | None = None
    steps: Tensor | None = None
    minimum_steps: Tensor | None = None
    narrow: bool = False

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes of the codes and of all scales."""
        scales = (self.scales, self.minimums, self.steps, self.minimum_steps)
        return self.codes.numel() * self.bits // 8 + sum(each.nbytes for each in scales if each is not None)

    def dequantized(self) -> Tensor:
        """Return the weight as float32 `[features, inputs]`."""
        scales = _stepped(self.scales, self.steps)
        grouped = self.codes.view(*scales.shape, self.group).float() - self.offset
        weight = grouped * scales[..., None]
        if self.minimums is not None:
            weight += _stepped(self.minimums, self.minimum_steps)[..., None]
        return weight.view(self.codes.shape)


def _stepped(numbers: Tensor, steps: Tensor | None) -> Tensor:
    if steps is None:
        return numbers.float()
    grouped = numbers.view(*steps.shape, -1).float() * steps.float()[..., None]
    return grouped.view(numbers.shape)


def format_name(kind: str, bits: int) -> str:
    """Name a format for people: "Q4_K", or "gptq of 4 bits" where the kind does not tell the bits."""
    return kind if any(map(str.isdigit, kind)) else f"{kind} of {bits} bits"


def format_names(names: Iterable[str]) -> str:
    """Join the names of the formats of a model's weights, such as "Q4_K and Q6_K"; "" if there are none."""
    return " and ".join(sorted(set(names)))


def group_of(inputs: int, most: int) -> int | None:
    """Return the largest size of a group, up to `most`, that divides a number of inputs; None if there is none."""
    return next((group for group in GROUPS if group <= most and inputs % group == 0), None)


def rounded(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    """Round a weight to the nearest codes.

    A scale of 8 bits maps the group's largest magnitude to 127. A scale of 4 bits maps the number of the largest
    magnitude to -8 or to 7, whichever makes the sum of squared errors smaller. Neither cuts off more than one code. A
    smaller scale, which does, can have smaller errors and yet a higher perplexity.

    Args:
        weight: Floating-point `[features, inputs]`, finite.
        bits: 8 or 4.
        group: Inputs that share a scale; it divides the inputs.
    """
    features, inputs = weight.shape
    codes = torch.empty(features, inputs, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(features, inputs // group, device=weight.device)
    rows = max(1, _PIECE // inputs)
    for begin in range(0, features, rows):
        piece = weight[begin : begin + rows].detach().float().view(-1, inputs // group, group)
        own, own_scales = _rounded(piece, bits)
        codes[begin : begin + rows] = own.view(-1, inputs)
        scales[begin : begin + rows] = own_scales.squeeze(2)
    halves = scales.half()
    kept = halves if torch.equal(halves.float(), scales) else scales
    return QuantizedWeight(f"int{bits}", codes, kept, bits, 1 << (bits - 1), narrow=bits == 4)


def _rounded(grouped: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes of `[features, groups, group]`, and the scales `[features, groups, 1]`."""
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))  # signed
    if bits == 8:
        return _nearest(grouped, largest.abs() / 127, 128, 255)
    codes, scales = _nearest(grouped, largest / -8, 8, 15)
    other, others = _nearest(grouped, largest / 7, 8, 15)
    better = _error(grouped, other, others, 8) < _error(grouped, codes, scales, 8)
    return torch.where(better, other, codes), torch.where(better, others, scales)


def _nearest(grouped: Tensor, scales: Tensor, offset: int, most: int) -> tuple[Tensor, Tensor]:
    """Return the codes nearest to `[features, groups, group]`, and the scales as they are stored."""
    half = scales.half().float()
    stored = torch.where(half.isfinite() & (half.abs() >= _SMALLEST), half, scales)
    inverse = torch.where(stored == 0, 0.0, 1.0 / stored)
    return ((grouped * inverse).round_() + offset).clamp_(0 if most == 15 else 1, most).to(torch.uint8), stored


def _error(grouped: Tensor, codes: Tensor, scales: Tensor, offset: int) -> Tensor:
    return ((codes.float() - offset).mul_(scales).sub_(grouped)).square_().sum(2, keepdim=True)
