"""Tests in which order layers come from the disk and from memory, and what happens when one does not come."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynatree import embedded
from dynatree.client import Client
from dynatree.common.errors import StartupError
from dynatree.engine.forward.layer_source import LayerSource
from dynatree.engine.offload import choice, disk_layers, layer_file, offloaded_model
from dynatree.engine.offload.disk_layers import DiskLayers, OffloadError
from dynatree.engine.offload.host_layers import HostLayers, _CudaOrder, blob_of
from dynatree.engine.offload.layer_file import LayerFile, write_layer
from tests.support.offloaded import (
    HARMED,
    change,
    llama_fixture,  # noqa: F401  # fixtures
    load,
)
from tests.support.processes import service, wait_until


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


def test_layers_are_in_private_pages(disk: DiskLayers) -> None:
    """Shared pages count as a temporary file, for which a container may have a limit, and are seldom huge."""
    blob, _ = blob_of({"a": torch.ones(3)})
    for memory in (blob, disk.memory(0)):
        flags = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, stop = (int(each, 16) for each in line.split()[0].split("-"))
            flags += [line.split()[1]] * (first <= memory.data_ptr() < stop)
        assert flags == ["rw-p"]


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
                change(file)
            with ThreadPoolExecutor(1) as pool:
                completing = pool.submit(client.generate, "The sea", max_new_tokens=24)
                assert process.wait(60) == 70
                assert f"{file.parent.name}/layer-002.bin of the layer cache" in log.read_text()
                assert not completing.done()
                if missing:
                    (tmp_path / "away").rename(file)
                else:
                    change(file)
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
