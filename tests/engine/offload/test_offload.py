"""Tests that offloaded layers give the results of layers in memory, and how many layers are offloaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from dynatree.common.errors import StartupError
from dynatree.common.limits import ALL_LAYERS
from dynatree.engine import loading, timing
from dynatree.engine.cpu import native
from dynatree.engine.engine import Engine
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.engine.kv import budget
from dynatree.engine.loading import load_engine
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.offload import choice
from dynatree.engine.offload.disk_layers import DiskLayers
from dynatree.engine.offload.host_layers import HostLayers
from dynatree.engine.offload.offloaded_model import LayerPlan
from dynatree.engine.served import served
from dynatree.engine.settings import ModelSettings
from dynatree.engine.timing import measure_forwards
from tests.support.gguf_files import save_gguf
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import ARCHITECTURES, save_random_model
from tests.support.offloaded import LAYERS, change, llama_fixture, load, model_fixture, source_of  # noqa: F401  # fixtures
from tests.support.packed_checkpoints import save_packed


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


def test_a_file_for_rows_is_refused_because_none_are_measured(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "chosen_device", lambda name: torch.device("cuda"))
    with pytest.raises(StartupError, match=r"only 1 of 3 layers .* no number of rows .* --fixed-rows-file"):
        load(llama, tmp_path / "cache", 1, fixed_rows_file=tmp_path / "rows.json")


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


def test_a_draft_is_not_offloaded(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (llama / "model.safetensors").stat().st_size
    monkeypatch.setattr(choice, "free_memory", lambda device: int(0.9 * size / choice.WHOLE_SHARE))
    with pytest.raises(StartupError, match=r"the draft model's weights take .* expected a smaller draft, or --draft-m"):
        load(llama, tmp_path / "cache", None, chooses_tokens=False)
    assert not (tmp_path / "cache").exists()


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


@pytest.mark.parametrize("resident", [None, 1])
def test_a_context_that_does_not_fit_is_known_before_the_weights_are_read(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: int | None
) -> None:
    settings = ModelSettings(str(llama), sessions=1, max_context=64, resident_layers=resident, layer_cache=tmp_path)
    told = served(settings)
    model = skeleton(LlamaConfig.from_pretrained(llama), torch.float32)
    plan = choice.plan_of(model, choice.weight_bytes(settings, "model", model, None))
    taken = told.weight_bytes if resident is None else plan.least + plan.layer_bytes
    keys = (64 + settings.speculative_slots) * told.kv_bytes
    monkeypatch.setattr(budget, "free_memory", lambda device: taken + keys / budget.CPU_SHARE)
    assert served(settings) == told
    monkeypatch.setattr(budget, "free_memory", lambda device: taken + keys / budget.CPU_SHARE - 1000)
    with pytest.raises(StartupError, match=r"the KV cache of one session takes .* lower --max-context"):
        served(settings)


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
        change(file)
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
