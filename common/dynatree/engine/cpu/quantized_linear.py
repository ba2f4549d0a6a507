"""Linear layers over weights of 8 and 4 bits, by the project's own CPU kernel (`native/quantized.c`).

The kernel quantises each row to 8 bits and multiplies integers. A scale serves 32 inputs of a row, or 64 if a group of
weights has as many. A row's result has the same bits beside any other rows, and on every build of the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dynatree.engine.cpu.native import DTYPES, address
from dynatree.engine.cpu.native_linear import PANEL, Linear, NativeLinear, Weights
from dynatree.engine.weights.quantized_weight import QuantizedWeight, format_name

_HALVES, _FLOATS, _STEPS = range(3)  # `enum scales` of `native/kernels.h`
_SCALE_BYTES = (2, 4, 1)  # by these kinds
_STEP_BYTES = 2
_SUPER = 256  # inputs that share a step


class QuantizedLinear(NativeLinear):
    """A linear layer whose weight is kept only in the kernel's layout.

    Args:
        quantized: Weight `[out_features, in_features]`.
        bias: `[out_features]`.
        dtype: Data type of rows, bias and outputs.

    Attributes:
        kind: Name of the weight's format.
    """

    def __init__(self, quantized: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = quantized.codes.shape
        self.dtype = dtype
        self.kind = quantized.kind
        padded = None if bias is None else pad(bias.detach().to(dtype), (0, -len(bias) % PANEL)).contiguous()
        self.register_buffer("weight", _panels(quantized))  # part of the model's state, and of its fingerprint
        self.register_buffer("bias", padded)
        self._format = _format(quantized)
        self._point()

    @classmethod
    def reloaded(
        cls,
        form: str,
        dtype: torch.dtype,
        weight: Tensor,
        bias: Tensor | None,
        out_features: int,
        in_features: int,
    ) -> QuantizedLinear:
        """Make a layer over memory that already has the kernel's layout; `form` is the `format` of the layer before."""
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer.out_features, layer.in_features, layer.dtype = out_features, in_features, dtype
        layer.kind, *numbers = form.split()
        layer._format = Weights(*map(int, numbers))
        layer.register_buffer("weight", weight)
        layer.register_buffer("bias", bias)
        layer._point()
        return layer

    @property
    def format(self) -> str:
        """Name of the weight's format and the numbers of `struct weights`, for files of layers."""
        numbers = (str(getattr(self._format, name)) for name, _ in Weights._fields_)
        return " ".join((self.kind, *numbers))

    @property
    def format_name(self) -> str:
        """Name of the weight's format, for people."""
        return format_name(self.kind, self._format.bits)

    def _point(self) -> None:
        panels = -(-self.out_features // PANEL)
        self.structure = Linear(
            address(self.weight, torch.uint8, panels, self._panel_bytes()),
            None if self.bias is None else address(self.bias, self.dtype, panels * PANEL),
            self.in_features,
            self.out_features,
            DTYPES[self.dtype],
            weights=self._format,
        )

    def _panel_bytes(self) -> int:
        """Return the bytes of a panel, as the kernel computes them."""
        form = self._format
        scales = PANEL * _SCALE_BYTES[form.scales] * (1 + form.minimums)
        groups: int = self.in_features // form.group * (form.group * PANEL * form.bits // 8 + scales)
        supers: int = -(-self.in_features // form.super) if form.scales == _STEPS else 0
        return groups + supers * PANEL * _STEP_BYTES * int(1 + form.minimums)


def _format(quantized: QuantizedWeight) -> Weights:
    kind = _STEPS if quantized.steps is not None else _HALVES if quantized.scales.dtype == torch.float16 else _FLOATS
    return Weights(
        quantized.bits,
        quantized.group,
        _SUPER,
        kind,
        quantized.minimums is not None,
        quantized.offset,
        quantized.narrow,
    )


def _panels(quantized: QuantizedWeight) -> Tensor:
    """Return uint8 `[panels, bytes]` in the layout of `struct weights`."""
    group, bits = quantized.group, quantized.bits
    codes = _by_panel(quantized.codes.view(len(quantized.codes), -1, group // 4, 4))  # [panels, PANEL, groups, .., 4]
    codes = codes.permute(0, 2, 3, 1, 4)
    if bits == 4:
        codes = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
    parts = [codes.flatten(2), _bytes(quantized.scales)]
    if quantized.minimums is not None:
        parts.append(_bytes(quantized.minimums))
    groups = torch.cat(parts, 2)  # [panels, groups, bytes]
    if quantized.steps is None:
        return groups.flatten(1).contiguous()
    headers = [_bytes(quantized.steps)]
    if quantized.minimum_steps is not None:
        headers.append(_bytes(quantized.minimum_steps))
    supers = quantized.steps.shape[1]
    return torch.cat([*headers, groups.reshape(len(groups), supers, -1)], 2).flatten(1).contiguous()


def _bytes(numbers: Tensor) -> Tensor:
    """Return `[features, count]` as the bytes `[panels, count, ...]` of each panel's features side by side."""
    return _by_panel(numbers).transpose(1, 2).contiguous().view(torch.uint8)


def _by_panel(numbers: Tensor) -> Tensor:
    """Return `[features, ...]` as `[panels, PANEL, ...]`, with zeros for the features of the last panel that lack."""
    beyond = -len(numbers) % PANEL
    whole = torch.cat([numbers, numbers.new_zeros(beyond, *numbers.shape[1:])]) if beyond else numbers
    return whole.view(-1, PANEL, *numbers.shape[1:])
