"""Tests that layers offloaded to disk give the results of layers in memory, and that failures are reported."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from dynatree import embedded
from dynatree.client import Client
from dynatree.common.errors import StartupError
from dynatree.common.limits import ALL_LAYERS
from dynatree.engine import loading, timing
from dynatree.engine.cpu import native
from dynatree.engine.engine import Engine
from dynatree.engine.forward.layer_source import LayerSource
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.engine.loading import load_engine
from dynatree.engine.offload import choice, disk_layers, layer_cache, layer_file, offloaded_model
from dynatree.engine.offload.disk_layers import DiskLayers, OffloadError
from dynatree.engine.offload.host_layers import HostLayers, _CudaOrder, blob_of
from dynatree.engine.offload.layer_file import LayerFile, write_layer
from dynatree.engine.offload.offloaded_model import LayerPlan
from dynatree.engine.served import served
from dynatree.engine.settings import ModelSettings
from dynatree.engine.timing import measure_forwards
from tests.support.gguf_files import save_gguf
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import ARCHITECTURES, save_random_model
from tests.support.packed_checkpoints import save_packed
from tests.support.processes import first_process, service, wait_until

LAYERS = 5
HARMED = "of the layer cache differs from the layer that was written"


def load(model: Path, cache: Path, resident: int | None, **settings: Any) -> Engine:
    return load_engine(ModelSettings(str(model), sessions=2, resident_layers=resident, layer_cache=cache, **settings))


def source_of(engine: Engine) -> DiskLayers:
    assert isinstance(engine.source, DiskLayers)
    return engine.source


@pytest.fixture(name="model", params=ARCHITECTURES)
def model_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    changes = {"n_layer" if request.param == "gpt2" else "num_hidden_layers": LAYERS}
    if request.param in ("qwen2", "qwen3", "smollm3"):
        changes |= {"layer_types": ["full_attention"] * LAYERS}  # type: ignore[dict-item]
    return save_random_model(tmp_path / "model", request.param, 4, **changes)


@torch.inference_mode()
@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(family, dtype, marks=() if dtype == "float32" or family in ("gpt2", "llama") else pytest.mark.long)
        for family in ARCHITECTURES
        for dtype in ("float32", "bfloat16")
    ],
    indirect=["model"],
)
def test_offloaded_layers_have_the_bits_of_layers_in_memory(
    model: Path, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, a tree and a plain step are computed with no, some and nearly all layers in memory.

    Offloaded layers come from the disk, or from the host's memory as for a GPU.
    """

    def outputs_of(engine: Engine) -> tuple[Tensor, ...]:
        kv = engine.kv_cache.reserve(80)
        assert kv is not None
        prompt = engine.forward([Segment(kv, 0, range(5, 45), range(40))])[0]
        mask = ancestor_mask([-1, 0, -1])
        tree = engine.forward([Segment(kv, 40, [7, 8, 9, 10], [40, 41, 42, 41], mask=mask)])[0]
        step = engine.forward([Segment(kv, 41, [8], [41])])[0]
        slots = engine.kv_cache.slots(kv, 42).clone()
        engine.kv_cache.release(kv)
        return prompt, tree, step, slots

    whole = load(model, tmp_path / "cache", LAYERS, dtype=dtype)
    expected = outputs_of(whole)
    for resident, from_memory in ((0, False), (2, False), (1, True), (LAYERS - 1, False)):
        monkeypatch.setattr(choice, "_from_memory", lambda device, answer=from_memory: answer)
        offloaded = load(model, tmp_path / "cache", resident, dtype=dtype)
        assert isinstance(offloaded.source, HostLayers) == from_memory
        assert offloaded.source is not None
        assert offloaded.info.fingerprint == whole.info.fingerprint, "a completion may go on there"
        assert offloaded.info.parameters == whole.info.parameters
        assert all(map(torch.equal, expected, outputs_of(offloaded)))
        offloaded.source.close()


@pytest.fixture(name="with_kernels", params=[pytest.param(True, marks=compiled), False])
def with_kernels_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    if not request.param:
        monkeypatch.setattr(native, "builds", list)
        native.kernels.cache_clear()
    yield request.param
    native.kernels.cache_clear()


def rounded(weights: str) -> tuple[Callable[[Path], Path], dict[str, Any]]:
    return lambda folder: save_random_model(folder / "model", "llama", 4), {"weights": weights}


QUANTISED: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "int8": rounded("int8"),
    "int4": rounded("int4"),
    "GGUF": (
        lambda folder: save_gguf(folder / "model.gguf", ("Q4_K", "Q8_0", "F16"), seed=1, tied=True, words=300),
        {},
    ),
    "GPTQ": (lambda folder: save_packed(folder, "gptq", 4, "qwen2")[0], {}),
    "compressed-tensors": (lambda folder: save_packed(folder, "int", 8)[0], {}),
}


def quantised_cases() -> Iterator[Any]:
    """Every kind with each dtype and with and without kernels; `make test` runs all pairs of two of the three."""
    for place, kind in enumerate(QUANTISED):
        for number, dtype in enumerate(("float32", "bfloat16")):
            for kernels in (True, False):
                marks = [compiled] * kernels + [pytest.mark.long] * ((place + number + kernels) % 2)
                yield pytest.param(kernels, kind, dtype, marks=marks)


def logits_of(engine: Engine) -> Tensor:
    kv = engine.kv_cache.reserve(80)
    assert kv is not None
    (logits,) = engine.forward([Segment(kv, 0, range(5, 45), range(40))])
    engine.kv_cache.release(kv)
    return logits


@pytest.mark.long
@torch.inference_mode()
@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize(("with_kernels", "kind", "dtype"), [*quantised_cases()], indirect=["with_kernels"])
def test_offloaded_quantised_layers_have_the_bits_of_layers_in_memory(
    tmp_path: Path, with_kernels: bool, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers come from the disk, or from the host's memory as for a GPU.

    Without kernels, weights are dequantised, and torch multiplies by resident ones in another order. In 16 bits
    the logits then differ by less than a rounding: by less than those of layers in memory differ from float32's.
    """
    save, given = QUANTISED[kind]
    model, options = save(tmp_path), {**given, "dtype": dtype}
    whole = load_engine(ModelSettings(str(model), sessions=2, **options))
    exact = logits_of(load_engine(ModelSettings(str(model), sessions=2, **given, dtype="float32"))).float()

    def distance(one: Tensor, other: Tensor) -> float:
        return float((one.float() - other.float()).square().mean().sqrt())

    for resident, from_memory in ((0, False), (2, False), (1, True)):
        monkeypatch.setattr(choice, "_from_memory", lambda device, answer=from_memory: answer)
        offloaded = load(model, tmp_path / "cache", resident, **options)
        source = offloaded.source
        assert isinstance(source, HostLayers if from_memory else DiskLayers)
        assert offloaded.info.fingerprint == whole.info.fingerprint, "a completion may go on there"
        assert offloaded.info.step_bytes == whole.info.step_bytes
        assert offloaded.info.parameters == whole.info.parameters
        expected, logits = logits_of(whole), logits_of(offloaded)
        if with_kernels:
            assert torch.equal(logits, expected)
        elif dtype == "float32":
            assert (logits - expected).abs().max() < 1e-3 * expected.std()
        else:
            rounding = distance(expected, exact)
            assert distance(logits, expected) < rounding < 0.1 * exact.std()
            assert distance(logits, exact) < 1.1 * rounding
        source.close()


@compiled
@pytest.mark.parametrize("kind", ["int8", "GGUF", "GPTQ"])
def test_quantised_layers_are_offloaded_when_they_do_not_fit(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits is known by the quantised weights: as many bytes as `served` says."""
    save, given = QUANTISED[kind]
    model = save(tmp_path)
    size = served(ModelSettings(str(model), **given)).weight_bytes
    for share, offloads in ((1.01, False), (0.99, True)):
        monkeypatch.setattr(choice, "free_memory", lambda device, share=share: int(share * size / choice.WHOLE_SHARE))
        engine = load(model, tmp_path / "cache", None, max_context=64, speculative_slots=1, **given)
        assert (engine.source is not None) == offloads
        if offloads:
            source_of(engine).close()
            assert served(ModelSettings(str(model), max_context=64, **given)).offloaded_layers > 0


def test_weights_that_only_transformers_reads_are_not_offloaded(llama: Path, tmp_path: Path) -> None:
    """Their layers would be read without their scales."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(StartupError, match="quantised weights, which do not go together with --resident-layers"):
        load(llama, tmp_path / "cache", 0)


def test_a_cache_is_written_once_and_anew_for_another_checkpoint(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    source_of(load(model, cache, 1)).close()
    [folder] = [each for each in cache.iterdir() if each.is_dir()]
    written = {each.name: each.stat().st_mtime_ns for each in folder.iterdir()}
    assert len(written) == LAYERS + 1, "every layer's file, so that another number of resident layers finds its own"
    source_of(load(model, cache, 3)).close()
    assert {each.name: each.stat().st_mtime_ns for each in folder.iterdir()} == written
    os.utime(model / "model.safetensors")
    source_of(load(model, cache, 1)).close()
    assert len([each for each in cache.iterdir() if each.is_dir()]) == 2


@pytest.fixture(name="llama")
def llama_fixture(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "model", "llama", 4)


def test_a_file_for_rows_is_refused_because_none_are_measured(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "chosen_device", lambda name: torch.device("cuda"))
    with pytest.raises(StartupError, match=r"only 1 of 3 layers .* no number of rows .* --fixed-rows-file"):
        load(llama, tmp_path / "cache", 1, fixed_rows_file=tmp_path / "rows.json")


def test_a_folder_that_was_not_finished_is_written_anew(llama: Path, tmp_path: Path) -> None:
    source_of(load(llama, tmp_path / "cache", 0)).close()
    [folder] = (tmp_path / "cache").glob("*/")
    (folder / "layers.json").unlink()
    (folder / "layer-001.bin").write_bytes(b"half")
    source_of(load(llama, tmp_path / "cache", 0)).close()
    assert (folder / "layers.json").exists()


@pytest.mark.long
def test_a_service_that_is_ended_while_it_writes_leaves_nothing_half_written(llama: Path, tmp_path: Path) -> None:
    """Like the first process of a container, the service has only its own signal handlers."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from dynatree.cli import interrupts; interrupts.end_at_once()\n"
        "from dynatree.engine.loading import load_engine; from dynatree.engine.settings import ModelSettings\n"
        "from dynatree.engine.offload import layer_cache\n"
        "write = layer_cache.write_layer\n"
        "def ended(path, tensors):\n"
        "    write(path, tensors)\n"
        "    assert len(list(path.parent.iterdir())) == 1\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "layer_cache.write_layer = ended\n"
        "load_engine(ModelSettings(sys.argv[1], sessions=1, resident_layers=0, layer_cache=Path(sys.argv[2])))"
    )
    process = subprocess.run([*first_process(), sys.executable, "-c", code, str(llama), str(tmp_path / "cache")])
    assert process.returncode == 128 + signal.SIGTERM
    assert not list((tmp_path / "cache").glob("*/"))


@pytest.mark.long
def test_services_that_start_at_once_write_a_cache_once(llama: Path, tmp_path: Path) -> None:
    """The services are separate processes, and all serve the written layers."""
    code = (
        "import sys; from pathlib import Path; from dynatree.engine.loading import load_engine\n"
        "from dynatree.engine.settings import ModelSettings\n"
        "settings = ModelSettings(sys.argv[1], sessions=1, resident_layers=0, layer_cache=Path(sys.argv[2]))\n"
        "engine = load_engine(settings)\n"
        "engine.source.close()"
    )
    command = [sys.executable, "-c", code, str(llama), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    [folder] = (tmp_path / "cache").glob("*/")
    assert len(list(folder.iterdir())) == 3 + 1


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: _shorten(folder / "layer-001.bin"), "layer-001.bin of the layer cache has .* bytes"),
        (
            lambda folder: _change(folder / "layer-002.bin"),
            "[0-9a-f]{16}/layer-002.bin " + HARMED + "; stop the service, remove [0-9a-f]",
        ),
        (lambda folder: (folder / "layer-000.bin").unlink(), "layer-000.bin of the layer cache has 0 bytes"),
        (
            lambda folder: (folder / "layers.json").write_text("{"),
            "the table of the layer cache cannot be read; stop the service",
        ),
        (
            lambda folder: (folder / "layers.json").write_text('{"layers": [{}]}'),
            "the table of the layer cache cannot be read",
        ),
        (
            lambda folder: _exchange(folder / "layer-001.bin", 8),
            "layer-001.bin of the layer cache differs from the layer that was written",
        ),
        (
            lambda folder: _exchange(folder / "layer-001.bin", 4096),
            "layer-001.bin of the layer cache differs from the layer that was written",
        ),
        (lambda folder: _renumber(folder / "layers.json"), "the table of the layer cache cannot be read"),
    ],
)
def test_a_cache_that_was_harmed_is_refused(llama: Path, tmp_path: Path, harm: Any, message: str) -> None:
    source_of(load(llama, tmp_path / "cache", 0)).close()
    [folder] = (tmp_path / "cache").glob("*/")
    harm(folder)
    with pytest.raises(StartupError, match=message) as error:
        load(llama, tmp_path / "cache", 0)
    assert str(tmp_path) not in str(error.value)


def _shorten(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)


def _change(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))


def _exchange(path: Path, size: int) -> None:
    """Exchange two adjacent pieces of `size` bytes in the middle of a file."""
    content = path.read_bytes()
    middle = len(content) // 2 // size * size
    one, other = content[middle - size : middle], content[middle : middle + size]
    assert one != other
    path.write_bytes(content[: middle - size] + other + one + content[middle + size :])


def _renumber(path: Path) -> None:
    """Write a readable table with a wrong place of a tensor."""
    table = json.loads(path.read_text())
    next(iter(table["layers"][1]["places"].values()))[0] += 64
    path.write_text(json.dumps(table))


PAGES = 3


@settings(deadline=None)
@given(
    st.binary(min_size=1, max_size=64),
    st.sampled_from(["page", "word", "byte", "bit"]),
    st.integers(0, PAGES * layer_file.PAGE * 8 - 1),
    st.integers(0, PAGES * layer_file.PAGE * 8 - 1),
)
def test_whatever_is_changed_or_moved_changes_the_sum(seed: bytes, unit: str, one: int, other: int) -> None:
    """The pages differ so little that sums over words or pages could not distinguish them."""
    content = bytearray(PAGES * layer_file.PAGE)
    for place, byte in enumerate(seed):
        content[place * 4099 % len(content)] = byte
    before = bytes(content)
    if unit == "bit":
        content[one // 8] ^= 1 << one % 8
    else:
        size = {"page": layer_file.PAGE, "word": 8, "byte": 1}[unit]
        a, b = (place // 8 // size * size for place in (one, other))
        content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]
    sums = [layer_file.sum_of(memoryview(each)) for each in (before, bytes(content))]
    assert (sums[0] == sums[1]) == (content == before)


def test_a_cache_of_another_format_is_not_read(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(layer_cache, "_FORMAT", layer_cache._FORMAT - 1)
    source_of(load(llama, cache, 0)).close()
    [old] = cache.glob("*/")
    for file in old.iterdir():
        file.write_bytes(b"of another format")
    monkeypatch.undo()
    source_of(load(llama, cache, 0)).close()
    assert len(list(cache.glob("*/"))) == 2


def test_a_lock_is_no_link_and_a_cache_nobody_elses(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other"
    source_of(load(llama, cache, 0)).close()
    [lock], [folder] = cache.glob("*.lock"), cache.glob("*/")
    shutil.rmtree(folder)
    lock.unlink()
    other.write_text("precious")
    lock.symlink_to(other)
    with pytest.raises(StartupError, match="cannot be written or read: Too many levels of symbolic links"):
        load(llama, cache, 0)
    assert other.read_text() == "precious"
    lock.unlink()
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    monkeypatch.setattr(layer_cache, "_ROOT", -1)
    with pytest.raises(StartupError, match="the layer cache's folder cache belongs to another user; expected one of"):
        load(llama, cache, 0)
    assert not list(cache.glob("*/"))


def test_a_written_cache_is_read_without_its_lock(llama: Path, tmp_path: Path) -> None:
    """The file system may be read-only."""
    source_of(load(llama, tmp_path / "cache", 0)).close()
    [lock] = (tmp_path / "cache").glob("*.lock")
    lock.unlink()
    lock.mkdir()  # not even root can open it
    source_of(load(llama, tmp_path / "cache", 0)).close()


def test_a_start_that_fails_leaves_a_written_cache_alone(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another service may be reading the cache."""
    source_of(load(llama, tmp_path / "cache", 0)).close()
    before = sorted((tmp_path / "cache").glob("*/*"))

    def failing(folder: Path) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(layer_cache, "_read_table", failing)
    with pytest.raises(StartupError, match=r"at .*/cache cannot be written or read: Too many open files; expected"):
        load(llama, tmp_path / "cache", 0)
    assert len(before) == 4
    assert sorted((tmp_path / "cache").glob("*/*")) == before


def test_another_checkpoint_of_equal_size_and_time_is_not_taken_for_the_first(llama: Path, tmp_path: Path) -> None:
    """Copies and images preserve times, or give all files the same time."""
    source_of(load(llama, tmp_path / "cache", 0)).close()
    path = llama / "model.safetensors"
    before, tensors = path.stat(), load_file(path)
    tensors["model.layers.2.mlp.down_proj.weight"] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    offloaded = load(llama, tmp_path / "cache", 0)
    assert offloaded.info.fingerprint == load(llama, tmp_path / "cache", LAYERS).info.fingerprint
    source_of(offloaded).close()


def test_a_full_disk_is_told_before_anything_is_written(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    with pytest.raises(StartupError, match=r"the layer cache needs 0\.27 GB, .* its disk has 0\.00 GB left"):
        load(llama, tmp_path / "cache", 0)


def test_a_disk_that_fills_meanwhile_leaves_nothing_behind(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StartupError, match=r"at .*/cache cannot be written or read: No space left on device"):
        load(llama, tmp_path / "cache", 0)
    assert list((tmp_path / "cache").glob("*/")) == []


def test_what_cannot_be_offloaded_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--device is meta, but torch .* finds only these devices: cpu"):
        load(llama, tmp_path / "cache", 0, device="meta")
    config = json.loads((llama / "config.json").read_text())
    (llama / "model.safetensors").rename(llama / "weights.bin")
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match="has no safetensors files, the only format that is read"):
        load(llama, tmp_path / "cache", 0)


def test_as_many_layers_stay_as_fit(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LayerPlan(layers=10, layer_bytes=100, other_bytes=50)
    assert [plan.resident(free) for free in (1050, 1049, 851, 350, 250, 0)] == [10, 7, 6, 1, 0, 0]
    size = (llama / "model.safetensors").stat().st_size
    monkeypatch.setattr(choice, "free_memory", lambda device: int(0.9 * size / choice.WHOLE_SHARE))
    engine = load(llama, tmp_path / "cache", None)
    assert source_of(engine).read_bytes > 0
    source_of(engine).close()
    monkeypatch.setattr(choice, "free_memory", lambda device: int(1.1 * size / choice.WHOLE_SHARE))
    assert load(llama, tmp_path / "none", None).info.fingerprint == engine.info.fingerprint
    assert not (tmp_path / "none").exists()


def test_what_fits_is_known_by_the_dtype_that_is_served(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file size does not matter: a float32 checkpoint takes half the memory in bfloat16."""
    size = (llama / "model.safetensors").stat().st_size
    monkeypatch.setattr(choice, "free_memory", lambda device: int(0.75 * size / choice.WHOLE_SHARE))
    assert load(llama, tmp_path / "none", None, dtype="bfloat16").source is None
    engine = load(llama, tmp_path / "cache", None, dtype="float32")
    source_of(engine).close()


@pytest.mark.long
@pytest.mark.parametrize("resident", ["0", "None"])
def test_a_model_of_the_hub_is_offloaded_as_a_folder_is(llama: Path, tmp_path: Path, resident: str) -> None:
    """The hub client reads its cache folder from the environment at import, so a separate process is needed."""
    hub = tmp_path / "hub" / "models--someone--model"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("1" * 40)
    shutil.copytree(llama, hub / "snapshots" / ("1" * 40))
    code = (
        "import sys; from pathlib import Path; from dynatree.engine.loading import load_engine\n"
        "from dynatree.engine.settings import ModelSettings\n"
        "from dynatree.engine.offload import choice\n"
        "choice.free_memory = lambda device: int(sys.argv[1])\n"
        f"settings = dict(sessions=1, resident_layers={resident}, layer_cache=Path(sys.argv[2]))\n"
        "engine = load_engine(ModelSettings('someone/model', **settings))\n"
        "print(engine.info.fingerprint, engine.source.bytes > 0)\n"
        "engine.source.close()"
    )
    free = int(0.9 * (llama / "model.safetensors").stat().st_size / choice.WHOLE_SHARE)
    done = subprocess.run(
        [sys.executable, "-c", code, str(free), str(tmp_path / "cache")],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    whole = load(llama, tmp_path / "cache", LAYERS)
    assert done.stdout.split() == [whole.info.fingerprint, "True"], done.stderr


def test_room_is_left_for_the_keys_and_values_of_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that chooses the number of resident layers itself starts with any context."""
    model = save_random_model(tmp_path / "model", "llama", 4, num_hidden_layers=12)
    weights = (model / "model.safetensors").stat().st_size
    free = int(0.95 * weights / choice.WHOLE_SHARE)
    monkeypatch.setattr(choice, "free_memory", lambda device: free)
    kept = {}
    for slots in (1, 4096):
        engine = load(model, tmp_path / "cache", None, max_context=64, speculative_slots=slots)
        kept[slots] = source_of(engine).bytes
        source_of(engine).close()
    assert kept[1] < kept[4096], "more layers are offloaded"


@compiled
def test_memory_is_left_for_the_copy_that_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer layers of the target stay, since the copy is not offloaded; a copy that is of no use is refused."""
    model = str(save_random_model(tmp_path / "model", "llama", 4, num_hidden_layers=12))
    alone = ModelSettings(model, sessions=1, max_context=16, speculative_slots=1, layer_cache=tmp_path)
    copy = replace(alone, weights="int8", chooses_tokens=False, resident_layers=ALL_LAYERS)
    pair = replace(alone, copy=copy)
    weights = (tmp_path / "model" / "model.safetensors").stat().st_size
    monkeypatch.setattr(choice, "free_memory", lambda device: int(1.1 * weights / choice.WHOLE_SHARE))
    assert served(alone).offloaded_layers == served(copy).offloaded_layers == 0
    assert 0 < served(pair).offloaded_layers < 12
    assert served(replace(pair, resident_layers=ALL_LAYERS)).offloaded_layers == 0
    least = int(1.1 * served(copy).weight_bytes / choice.WHOLE_SHARE)
    monkeypatch.setattr(choice, "free_memory", lambda device: least)
    with pytest.raises(StartupError, match=r"the model's own copy leaves 0.* GB of memory, but the model takes 0"):
        served(pair)
    monkeypatch.setattr(choice, "free_memory", lambda device: weights // 5)
    with pytest.raises(StartupError, match=r"the int8 copy of model takes .* GB, but only .* GB of memory are free"):
        served(pair)
    monkeypatch.setattr(choice, "is_native", lambda device, dtype: False)
    with pytest.raises(StartupError, match="the int8 copy of model would be dequantised on cpu, and as slow as model"):
        served(pair)


@pytest.mark.parametrize("harmed", [False, True])
def test_nothing_goes_on_reading_when_a_service_cannot_start(llama: Path, tmp_path: Path, harmed: bool) -> None:
    source_of(load(llama, tmp_path / "cache", 0)).close()
    if harmed:
        [file] = (tmp_path / "cache").glob("*/layer-002.bin")
        _change(file)
    before = set(threading.enumerate())
    with pytest.raises(StartupError, match="differs from the layer that was written" if harmed else "--kv-tokens is 1"):
        load(llama, tmp_path / "cache", 0, kv_tokens=1)
    assert set(threading.enumerate()) <= before


def test_what_a_sweep_costs_is_known_at_the_start(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost is the time of reading, up to the number of rows at which computing takes longer; it is not measured."""
    engine = load(llama, tmp_path / "cache", 1)
    source = source_of(engine)
    assert engine.info.streamed_bytes == source.bytes
    monkeypatch.setattr(timing, "_seconds", lambda engine, kv, context, rows: 0.01 * rows)
    monkeypatch.setattr(timing, "ALL_SECONDS", 0.5)
    assert source.sweep_cpu_seconds > 0.0
    monkeypatch.setattr(DiskLayers, "sweep_seconds", 0.3)
    monkeypatch.setattr(DiskLayers, "sweep_cpu_seconds", 0.02 * torch.get_num_threads())
    read = source.read_bytes
    costs = {each.rows: each.seconds for each in measure_forwards(engine, 256)}
    assert source.read_bytes - read <= 3 * source.bytes
    assert costs[1] == costs[16] == 0.3
    assert costs[64] == pytest.approx(0.64 + 0.02), "reading takes of the cores"
    assert costs[256] == pytest.approx(2.56 + 0.02), "on the line through those that were measured"
    kv = engine.kv_cache.reserve(20)
    assert kv is not None
    first, second = (engine.forward([Segment(kv, 0, range(5, 15), range(10))])[0] for _ in range(2))
    assert torch.equal(first, second), "layers come again"
    source.close()


# The source of layers


@pytest.fixture(name="files")
def files_fixture(tmp_path: Path) -> list[LayerFile]:
    return [
        write_layer(tmp_path / f"{layer}.bin", {"a": torch.full((3000 + 100 * layer,), layer, dtype=torch.int32)})
        for layer in range(5)
    ]


@pytest.fixture(name="slots", params=[1, 2, 3, 9])
def slots_fixture(request: pytest.FixtureRequest) -> int:
    slots: int = request.param
    return slots


@pytest.fixture(name="disk")
def disk_fixture(files: list[LayerFile], slots: int) -> Iterator[DiskLayers]:
    source = DiskLayers(files, slots)
    yield source
    source.close()


@pytest.fixture(name="source", params=["disk", "memory"])
def source_fixture(files: list[LayerFile], slots: int, request: pytest.FixtureRequest) -> LayerSource:
    if request.param == "disk":
        source: LayerSource = request.getfixturevalue("disk")
        return source
    blobs = [torch.frombuffer(bytearray(each.path.read_bytes()), dtype=torch.uint8) for each in files]
    return HostLayers(blobs, torch.device("cpu"), slots)


@pytest.fixture(name="calls")
def calls_fixture(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of a CUDA runtime in which a second block of memory cannot be locked."""

    def failing(code: int) -> None:
        if code:
            raise RuntimeError("out of memory")

    calls: list[tuple[Any, ...]] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *given: calls.append(("lock", *given)) or 2 * (len(calls) > 1),
        cudaHostUnregister=lambda address: calls.append(("unlock", address)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", failing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("wait",)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    return calls


def test_layers_in_memory_take_their_bytes_and_are_waited_for_in_the_end(calls: list[tuple[Any, ...]]) -> None:
    """Locked memory is not rounded up, and is unlocked after the last copy into a slot."""
    blob, places = blob_of({"a": torch.arange(5000, dtype=torch.int32), "b": torch.ones(3)})
    assert blob.numel() == 20480, "whole pages"
    assert blob.data_ptr() % 4096 == 0
    assert all(place.offset % 256 == 0 for place in places.values())
    assert places["a"].of(blob).tolist() == list(range(5000))
    order = _CudaOrder(torch.device("cuda"), 2, [blob])
    assert calls == [("lock", blob.data_ptr(), blob.numel(), 0)]
    order.close()
    assert calls[1:] == [("wait",), ("unlock", blob.data_ptr())]


def test_memory_that_cannot_be_locked_leaves_none_locked(calls: list[tuple[Any, ...]]) -> None:
    blobs = [blob_of({"a": torch.ones(3)})[0] for _ in range(2)]
    with pytest.raises(StartupError, match=r"cannot be locked for the GPU \(out of memory\)"):
        _CudaOrder(torch.device("cuda"), 2, blobs)
    assert calls[2:] == [("wait",), ("unlock", blobs[0].data_ptr())]


def test_layers_in_memory_are_in_private_pages() -> None:
    """Shared pages would count as a temporary file, for which a container may have a limit."""
    blob, _ = blob_of({"a": torch.ones(3)})
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, flags, *_ = line.split()
        first, stop = (int(each, 16) for each in bounds.split("-"))
        if first <= blob.data_ptr() < stop:
            assert flags == "rw-p"


@pytest.mark.parametrize("from_memory", [True, False])
def test_a_source_of_layers_is_closed_if_the_model_cannot_be_filled(
    llama: Path, tmp_path: Path, from_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise StartupError("no such tensor")

    def counted(source: LayerSource) -> None:
        closed.append(source)
        close(source)

    closed: list[LayerSource] = []
    kind: type[HostLayers | DiskLayers] = HostLayers if from_memory else DiskLayers
    close: Callable[[Any], None] = kind.close
    monkeypatch.setattr(kind, "close", counted)
    monkeypatch.setattr(choice, "_from_memory", lambda device: from_memory)
    monkeypatch.setattr(offloaded_model, "bind", failing)
    with pytest.raises(StartupError, match="no such tensor"):
        load(llama, tmp_path / "cache", 1)
    assert len(closed) == 1


def held(source: LayerSource, files: list[LayerFile], layer: int) -> bool:
    return bool((files[layer].places["a"].of(source.memory(layer)) == layer).all())


def test_layers_come_in_their_order_over_and_over(source: LayerSource, files: list[LayerFile]) -> None:
    for _ in range(3):
        for layer in range(5):
            source.wait(layer)
            assert held(source, files, layer)
            source.release(layer)
    whole = sum(each.size for each in files)
    assert source.bytes == whole
    if isinstance(source, DiskLayers):
        assert 3 * whole <= source.read_bytes <= 4 * whole, "and at most a few ahead"


def test_the_next_layer_is_read_while_one_computes(files: list[LayerFile]) -> None:
    source = DiskLayers(files, 2)
    source.wait(0)
    for _ in range(200):
        if held(source, files, 1):
            break
        time.sleep(0.01)
    assert held(source, files, 1)
    assert held(source, files, 0), "and not over it"
    source.close()


def test_a_forward_that_was_broken_off_may_begin_anew(source: LayerSource, files: list[LayerFile]) -> None:
    for last in (0, 2, 4, 1):
        for layer in range(last + 1):
            source.wait(layer)
            assert held(source, files, layer)
            if layer < last:  # the last layer fails while it computes
                source.release(layer)
    for layer in range(5):
        source.wait(layer)
        assert held(source, files, layer)
        source.release(layer)


def test_a_file_that_goes_bad_fails_the_forward_and_is_tried_again(files: list[LayerFile]) -> None:
    source = DiskLayers(files, 2)
    source.wait(0)
    data = files[3].path.read_bytes()
    files[3].path.write_bytes(data[:4096])
    source.release(0)
    for layer in (1, 2):
        source.wait(layer)
        source.release(layer)
    with pytest.raises(OffloadError, match=r"3.bin of the layer cache is cut short"):
        source.wait(3)
    files[3].path.write_bytes(data)
    for layer in range(5):
        source.wait(layer)
        assert held(source, files, layer)
        source.release(layer)
    source.close()


def test_nothing_writes_to_a_slot_behind_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one piece of a layer has failed, the others must not overwrite the slot during the next attempt."""
    for module in (layer_file, disk_layers):
        monkeypatch.setattr(module, "PIECE", 4096)
    file = write_layer(tmp_path / "0.bin", {"a": torch.arange(5000, dtype=torch.int32)})
    reading = []
    read = disk_layers._read_piece

    def slowly(descriptor: int, memory: Any, start: int, *arguments: Any) -> float:
        if start == 0:
            raise OSError(5, "no luck")
        reading.append(start)
        time.sleep(0.1)
        seconds = read(descriptor, memory, start, *arguments)
        reading.remove(start)
        return seconds

    monkeypatch.setattr(disk_layers, "_read_piece", slowly)
    source = DiskLayers([file], 1)
    with pytest.raises(OffloadError, match=r"0.bin of the layer cache cannot be read: no luck"):
        source.wait(0)
    assert reading == []
    source.close()


def test_a_file_that_changes_fails_the_forward(disk: DiskLayers, files: list[LayerFile]) -> None:
    """Changed bytes from the disk must not change a token."""
    data = files[3].path.read_bytes()
    files[3].path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(OffloadError, match=rf"3.bin {HARMED}"):
        _sweep(disk, times=2)  # it may have been read already
    files[3].path.write_bytes(data)
    _sweep(disk)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_piece_that_fails_once_is_read_once_more(
    files: list[LayerFile], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ahead: bool
) -> None:
    """The failure may also come before a forward pass waits for the piece."""
    failures = [OSError(5, "Input/output error")]
    read = disk_layers._read_piece

    def once(*arguments: Any) -> float:
        if failures:
            raise failures.pop()
        return read(*arguments)

    monkeypatch.setattr(disk_layers, "_read_piece", once)
    source = DiskLayers(files, 2)
    if ahead:
        wait_until(lambda: source._error is not None)
    _sweep(source)
    assert re.search("reading again after an error: .*0.bin of the layer cache cannot be read: Input", caplog.text)
    source.close()


def test_an_interpreter_that_ends_leaves_nobody_waiting(files: list[LayerFile]) -> None:
    """Such an interpreter starts no threads, so waiting threads must get an error, or the process would not end."""
    source = DiskLayers(files, 2)
    source.wait(1)
    source._pool.shutdown()
    with pytest.raises(OffloadError, match="cannot schedule new futures"):
        _sweep(source, times=2)
    source.close()


@pytest.mark.long
@pytest.mark.parametrize("missing", [False, True])
def test_a_service_whose_layer_goes_bad_ends(tmp_path: Path, missing: bool) -> None:
    """A service that answered every completion with an error would attract them all; after a restart they succeed."""
    target, cache = embedded.target_path(), tmp_path / "cache"
    verifying = ("verify", "--target-model", str(target), "--resident-layers", "1", "--layer-cache", str(cache))
    with service(tmp_path, "verify", *verifying) as (verify, process, log):
        [file] = cache.glob("*/layer-002.bin")
        drafting = ("draft", "--draft-model", "embedded", "--verify", verify)
        with service(tmp_path, "draft", *drafting) as (draft, _, __), Client(draft) as client:
            expected = client.generate("The sea", max_new_tokens=24).token_ids
            if missing:
                file.rename(tmp_path / "away")
            else:
                _change(file)
            with ThreadPoolExecutor(1) as pool:
                completing = pool.submit(client.generate, "The sea", max_new_tokens=24)
                assert process.wait(60) == 70
                assert f"{file.parent.name}/layer-002.bin of the layer cache" in log.read_text()
                assert not completing.done()
                if missing:
                    (tmp_path / "away").rename(file)
                else:
                    _change(file)
                with service(tmp_path, "verify", *verifying):
                    completion = completing.result(60)
            assert completion.token_ids == expected


def _sweep(source: DiskLayers, times: int = 1) -> None:
    for layer in [*range(5)] * times:
        source.wait(layer)
        source.release(layer)


def test_a_slow_disk_is_waited_for_and_said(
    files: list[LayerFile], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_layers, "_SLOW", 0.05)
    gate = threading.Event()
    read = disk_layers._read_piece

    def slowly(*arguments: Any) -> float:
        gate.wait(10)
        return read(*arguments)

    monkeypatch.setattr(disk_layers, "_read_piece", slowly)
    source = DiskLayers(files, 2)
    threading.Timer(0.3, gate.set).start()
    source.wait(0)
    assert held(source, files, 0)
    assert "0.bin of the layer cache has taken" in caplog.text
    source.close()
