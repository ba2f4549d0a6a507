"""Whether this machine can build our own kernels and run Triton's; fixture `build` runs a test with each CPU build.

The answer depends on the machine, not on the code under test: if that code wrongly found no kernels, tests must fail
and not be skipped.
"""

import os
import platform
import shutil

import pytest
import torch

from tests.support.benchmark_modules import GPU, module

CAN_COMPILE = (
    (platform.system(), platform.machine()) == ("Linux", "x86_64")
    and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    and any(map(shutil.which, (os.environ.get("CC", "cc").split()[0], "gcc")))
)
compiled = pytest.mark.skipif(not CAN_COMPILE, reason="this machine has no C compiler, or no kernels of our own")


def needs_triton() -> None:
    """Skip a test module on machines without builds of Triton; on others, tests fail if Triton is missing.

    Its interpreter runs the kernels, faster than it would by itself.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("Triton has no builds for this machine", allow_module_level=True)
    module("interpreted", GPU).patch_once()
