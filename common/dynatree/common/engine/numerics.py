"""What computes a model's forwards, as far as it decides bits: two replicas of one name give equal ones."""

from __future__ import annotations

import torch

from dynatree.common.engine.engine import Engine
from dynatree.common.engine.native import is_native, multiplies_pairs
from dynatree.common.engine.native_runner import NativeRunner


def numerics_of(engine: Engine, devices: int = 1) -> str:
    """The name, for people too: kernels of which kind, on what kind of processor, in forwards of how many rows.

    AVX2's and AVX-512's builds of the project's kernels have one name. Versions are not part of it.

    Args:
        engine: Whose forwards are named.
        devices: Over which every layer is cut.
    """
    device, dtype = engine.model.device, engine.model.dtype
    if device.type == "cuda":
        names = [torch.cuda.get_device_name(device)]
    elif device.type != "cpu":
        names = [device.type]
    else:
        names = []
        if is_native(device, dtype):
            pairs = dtype == torch.bfloat16 and multiplies_pairs()
            names += ["x86 kernels with bfloat16 pairs" if pairs else "x86 kernels"]
        if not isinstance(engine.runner, NativeRunner):
            amx = dtype != torch.float32 and torch.cpu._is_amx_tile_supported()
            names += [f"torch with {'AMX' if amx else torch.backends.cpu.get_cpu_capability()}"]
            # with AMX oneDNN multiplies by the weights in memory, and the project's kernels by those that are streamed
            names += [f"{engine.info.streamed_bytes} streamed bytes"] if amx and engine.stream else []
    names += [f"{engine.most_rows} rows"] if engine.most_rows else []
    names += [f"{devices} devices"] if devices > 1 else []
    return ", ".join(names)
