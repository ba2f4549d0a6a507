"""Tests which kernels are used: the best build for this CPU, or torch's; they run on torch's threads."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dynatree.engine.cpu import native
from dynatree.engine.cpu.native_linear import NativeLinear
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.forward.eager import EagerRunner
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import ARCHITECTURES, save_random_model

FOLDER = native.FOLDER


@pytest.fixture(name="folder")
def folder_fixture(monkeypatch, tmp_path):
    """A folder without builds in place of the package's."""
    (tmp_path / "builds.json").write_bytes((FOLDER / "builds.json").read_bytes())
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    native.kernels.cache_clear()
    yield tmp_path
    native.kernels.cache_clear()


def test_without_compiled_kernels_there_are_none(folder):
    assert native.kernels() is None
    assert not native.is_native(torch.device("cpu"), torch.float32)


@compiled
def test_the_next_build_is_used_where_the_best_does_not_load(folder, monkeypatch, caplog):
    for file in FOLDER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "kernels_avx512.so").write_bytes(b"no library")
    monkeypatch.setattr(native, "builds", lambda: ["kernels_avx512.so", "kernels_avx2.so"])
    assert native.kernels()._name == str(folder / "kernels_avx2.so")
    assert "kernels_avx512.so do not load" in caplog.text


@compiled
@pytest.mark.parametrize("other", ["kernels.h", "builds.json"])
def test_a_build_of_other_sources_or_flags_is_not_used(other, folder, monkeypatch, caplog):
    monkeypatch.setattr(native, "builds", lambda: ["kernels_avx2.so"])
    for file in FOLDER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert native.kernels() is not None
    native.kernels.cache_clear()
    (folder / other).write_text((folder / other).read_text() + "\n")
    assert native.kernels() is None
    assert "other sources" in caplog.text


def test_a_cpu_runs_the_builds_whose_instructions_it_has(monkeypatch):
    def builds(instructions, capability="AVX512"):
        monkeypatch.setattr(native, "_instructions", lambda: set(instructions.split()))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        return native.builds()

    avx2, avx512 = "avx2 fma f16c", "avx512f avx512bw avx512dq avx512vl"
    assert builds(f"{avx2} {avx512} avx512_bf16 avx512_vnni avx_vnni") == [
        "kernels_avx512_bf16.so",
        "kernels_avx512_vnni.so",
        "kernels_avx512.so",
        "kernels_avx_vnni.so",
        "kernels_avx2.so",
    ]
    assert builds(f"{avx2} avx_vnni") == ["kernels_avx_vnni.so", "kernels_avx2.so"]
    assert builds(f"{avx2} {avx512}") == ["kernels_avx512.so", "kernels_avx2.so"]
    assert builds(f"{avx2} {avx512} avx512_bf16", "AVX2") == ["kernels_avx2.so"]
    assert builds(f"{avx2} {avx512} avx512_bf16", "DEFAULT") == []
    assert builds("avx2 fma") == [], "a hypervisor hides F16C"
    assert builds("avx2 f16c fma avx512f avx512bw avx512dq") == ["kernels_avx2.so"]
    assert builds("") == []


def test_without_compiled_kernels_a_model_is_served_by_torchs(folder, tmp_path, caplog):
    path = save_random_model(tmp_path / "model", "llama", seed=5)
    engine = load_engine(ModelSettings(str(path), sessions=1))
    assert isinstance(engine.runner, EagerRunner)
    assert not any(isinstance(layer, NativeLinear) for layer in engine.model.modules())
    assert "using torch's kernels" in caplog.text


@compiled
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_linear_layer_is_native_and_most_families_have_a_program(architecture, tmp_path):
    engine = load_engine(ModelSettings(str(save_random_model(tmp_path / "model", architecture, seed=1)), sessions=1))
    layers = list(engine.model.modules())
    assert any(isinstance(layer, NativeLinear) for layer in layers)
    assert not any(isinstance(layer, (nn.Linear, Conv1D)) for layer in layers)
    assert isinstance(engine.runner, EagerRunner if architecture == "gpt2" else NativeRunner)


@compiled
def test_the_kernels_run_on_torchs_threads(tmp_path):
    """With a second OpenMP library, a second team of threads would keep the same cores busy."""
    engine = load_engine(ModelSettings(str(save_random_model(tmp_path / "model", "llama", seed=1)), sessions=1))
    engine.forward([Segment(KVRange(0, 3), 0, [1, 2, 3], range(3))])
    with open("/proc/self/maps") as mapped:
        libraries = {line.split()[-1] for line in mapped if "gomp" in line}
    assert len(libraries) == 1
