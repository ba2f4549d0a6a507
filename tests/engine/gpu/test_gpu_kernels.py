"""Tests that the GPU kernels compile, without a GPU, for all supported GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.kernel_builds import needs_triton
from tests.support.paths import ROOT

LEAST_SHARED = 99 * 1024  # shared memory of a program on desktop GPUs (compute capability 8.6 and 8.9), in bytes


@pytest.fixture(scope="module", name="compiled", params=[80, 90, 100], ids=["sm_80", "sm_90", "sm_100"])
def compiled_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    needs_triton()
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("kernels"))}
    script = ROOT / "tests" / "support" / "compile_gpu_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script), str(request.param)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.long
def test_both_launches_of_tree_attention_multiply_alike(compiled: dict[str, Any]) -> None:
    """Both use the same instructions, and the same products are fused with sums."""
    for name, launches in compiled["attention"].items():
        assert launches["own"]["products"] == launches["shared"]["products"], name
        assert len(launches["own"]["products"]) == (0 if name.startswith("fp32") else 1), name
        if not name.startswith("fp32"):
            assert launches["own"]["fused"] == launches["shared"]["fused"] == 0, name


@pytest.mark.long
def test_kernels_fit_into_a_small_gpu(compiled: dict[str, Any]) -> None:
    every = [*compiled["fused"].values(), *compiled["attention"].values(), *compiled["choosing"].values()]
    kernels = {name: kernel for each in every for name, kernel in each.items()}
    assert len(kernels) >= 10
    for each in every:
        for name, kernel in each.items():
            assert kernel["shared"] <= LEAST_SHARED, name
            assert not kernel["local"], f"{name} keeps numbers in memory that belong into registers"
