"""Tests what the layer cache holds, and that a cache that was harmed or cannot be written is reported."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dynatree.common.errors import StartupError
from dynatree.engine.offload import layer_cache, layer_file
from tests.support.offloaded import HARMED, LAYERS, change, llama_fixture, load, model_fixture, source_of  # noqa: F401  # fixtures
from tests.support.packed_checkpoints import save_packed
from tests.support.processes import first_process


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
            lambda folder: change(folder / "layer-002.bin"),
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


def test_a_cache_depends_on_the_settings_by_which_packed_weights_are_read(tmp_path: Path) -> None:
    """Both formats of GPTQ have equal files, and zero points that differ by one."""
    model, _ = save_packed(tmp_path, "gptq", 4)
    source_of(load(model, tmp_path / "cache", 0)).close()
    settings = json.loads((model / "config.json").read_text())
    settings["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (model / "config.json").write_text(json.dumps(settings))
    offloaded = load(model, tmp_path / "cache", 0)
    assert offloaded.info.fingerprint == load(model, tmp_path / "cache", LAYERS).info.fingerprint
    source_of(offloaded).close()


def test_a_cache_depends_on_the_number_of_layers(llama: Path, tmp_path: Path) -> None:
    source_of(load(llama, tmp_path / "cache", 0)).close()
    settings = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 2}))
    offloaded = load(llama, tmp_path / "cache", 0)
    assert offloaded.info.streamed_bytes
    assert offloaded.info.fingerprint == load(llama, tmp_path / "cache", LAYERS).info.fingerprint
    source_of(offloaded).close()


def test_a_file_of_the_hub_is_known_by_its_content_whenever_it_was_downloaded(llama: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "0f3a"
    blob.parent.mkdir()
    (llama / "model.safetensors").rename(blob)
    (llama / "model.safetensors").symlink_to(blob)
    source_of(load(llama, tmp_path / "cache", 0)).close()
    os.utime(blob, (1, 1))
    source_of(load(llama, tmp_path / "cache", 0)).close()
    assert len(list((tmp_path / "cache").glob("*/"))) == 1


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
