"""The name of a model's numerics: replicas with equal names compute forward passes with equal bits."""

from __future__ import annotations

import torch

from dynatree.engine.cpu.native import is_native, multiplies_pairs
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.engine import Engine
from dynatree.engine.gpu.row_runner import RowRunner
from dynatree.engine.weights.quantized_weight import format_names


def numerics_of(engine: Engine, devices: int = 1, weights: str = "auto") -> str:
    """Return a readable name of the kernels, the processor, and the fixed rows of the engine's forward passes.

    The AVX2 and AVX-512 builds of the project's kernels share one name. Software versions are not part of the name.

    Args:
        engine: Engine whose numerics are named.
        devices: Number of devices over which every layer is split.
        weights: `ModelSettings.weights`.
    """
    device, dtype = engine.model.device, engine.model.dtype
    layers = (each for each in engine.model.modules() if isinstance(each, QuantizedLinear))
    formats = format_names(each.format_name for each in layers)
    if not formats and weights != "auto":
        formats = f"dequantised {weights}"
    names = [f"{formats} weights"] if formats else []
    if device.type == "cuda":
        names += [torch.cuda.get_device_name(device)]
    elif device.type != "cpu":
        names += [device.type]
    else:
        if is_native(device, dtype):
            pairs = dtype == torch.bfloat16 and multiplies_pairs()
            names += ["x86 kernels with bfloat16 pairs" if pairs else "x86 kernels"]
        if not isinstance(engine.runner, NativeRunner):
            amx = dtype != torch.float32 and torch.cpu._is_amx_tile_supported()
            names += [f"torch with {'AMX' if amx else torch.backends.cpu.get_cpu_capability()}"]
            # with AMX, oneDNN multiplies by the resident weights, and the project's kernels by the offloaded ones
            names += [f"{engine.info.streamed_bytes} streamed bytes"] if amx and engine.source else []
    if isinstance(engine.runner, RowRunner):
        names += [f"{'/'.join(str(each.sizes.rows) for each in engine.runner.forwards)} rows"]
    names += [f"{devices} devices"] if devices > 1 else []
    return ", ".join(names)
