"""Where kernels of our own, and Triton's, can be had; the fixture `build` runs a test with each build for this CPU.

Asked of the machine, not of the code under test: if that found no kernels where there are some, tests would fail and
not be skipped.
"""

import os
import platform
import shutil

import pytest
import torch

CAN_COMPILE = (
    (platform.system(), platform.machine()) == ("Linux", "x86_64")
    and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    and any(map(shutil.which, (os.environ.get("CC", "cc").split()[0], "gcc")))
)
compiled = pytest.mark.skipif(not CAN_COMPILE, reason="this machine has no C compiler, or no kernels of our own")


def needs_triton() -> None:
    """Skip what runs Triton's kernels where there are no builds of it; where there are, a missing one fails."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("Triton has no builds for this machine", allow_module_level=True)
