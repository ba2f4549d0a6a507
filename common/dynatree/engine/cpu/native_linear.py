"""Linear layers by the project's own CPU kernel (`native/linear.c`).

One weight layout serves every number of rows. A single row takes the time of reading the weights, and up to a dozen
rows take little more. From about 16 rows on, the CPU's multiplications determine the time.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dynatree.engine.cpu.native import DTYPES, address, call

PANEL = 64  # features whose weights are stored together


class Weights(ctypes.Structure):
    """`struct weights` of `native/kernels.h`."""

    _fields_ = (
        ("bits", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("super", ctypes.c_int64),
        ("scales", ctypes.c_int64),
        ("minimums", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("narrow", ctypes.c_int64),
    )


class Linear(ctypes.Structure):
    """`struct linear` of `native/kernels.h`."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("features", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("combination", ctypes.c_int64),
        ("weights", Weights),
        ("cap", ctypes.c_float),
        ("slope", ctypes.c_float),
    )


class NativeLinear(nn.Module):
    """A linear layer whose weight `[out_features, in_features]` is kept only in the kernel's layout.

    Args:
        weight: `[out_features, in_features]`; bfloat16 requires an even number of inputs.
        bias: `[out_features]`.

    Attributes:
        weight: Weight in the kernel's layout.
        bias: Bias in the kernel's layout; None if the layer has no bias.
        dtype: Data type of rows, bias and outputs.
        structure: The layer as the kernels' structure.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        beyond = -self.out_features % PANEL
        panels = pad(weight, (0, 0, 0, beyond)).view(-1, PANEL, self.in_features)
        if weight.dtype == torch.bfloat16:  # [panels, inputs / 2, PANEL, 2]
            self.weight = panels.view(len(panels), PANEL, -1, 2).permute(0, 2, 1, 3).contiguous()
        else:  # [panels, inputs, PANEL]
            self.weight = panels.permute(0, 2, 1).contiguous()
        self.bias = None if bias is None else pad(bias.detach().to(weight.dtype), (0, beyond)).contiguous()
        self._point()

    @classmethod
    def bound(cls, weight: Tensor, bias: Tensor | None, out_features: int, in_features: int) -> NativeLinear:
        """Make a layer over memory that already has the kernel's layout; its contents may be replaced later."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.out_features, layer.in_features = out_features, in_features
        layer.dtype, layer.weight, layer.bias = weight.dtype, weight, bias
        layer._point()
        return layer

    def _point(self) -> None:
        panels, inputs = -(-self.out_features // PANEL), self.in_features
        layout = (inputs // 2, PANEL, 2) if self.dtype == torch.bfloat16 else (inputs, PANEL)
        self.structure = Linear(
            address(self.weight, self.dtype, panels, *layout),
            None if self.bias is None else address(self.bias, self.dtype, panels * PANEL),
            self.in_features,
            self.out_features,
            DTYPES[self.dtype],
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Map `[..., in_features]` to `[..., out_features]`.

        Raises:
            MemoryError: The kernel cannot allocate its working memory.
            ValueError: The rows have the wrong number of features.
        """
        rows, outside = rows.to(self.dtype).contiguous(), rows.shape[:-1]
        output = torch.empty(*outside, self.out_features, dtype=self.dtype)
        where = address(rows, self.dtype, *outside, self.in_features)
        to = address(output, self.dtype, *outside, self.out_features)
        call("dynatree_linear", ctypes.byref(self.structure), where, outside.numel(), to)
        return output


def fits(weight: Tensor) -> bool:
    """Whether the kernel supports a weight `[out_features, in_features]`."""
    return weight.dtype in DTYPES and (weight.dtype != torch.bfloat16 or weight.shape[1] % 2 == 0)
