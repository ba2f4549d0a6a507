"""Tests that arguments are checked before the kernels, which read and write unchecked addresses, run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dynatree import engine as engine_package
from dynatree.engine.cpu import native_attention, native_linear
from dynatree.engine.cpu.native import address
from dynatree.engine.cpu.native_attention import NativeBatch, structures_of
from dynatree.engine.cpu.native_linear import NativeLinear
from dynatree.engine.cpu.native_program import Program
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.forward.scores import Scores
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.kv.locality import Locality
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import save_random_model
from tests.support.paths import ROOT

CPU = torch.device("cpu")


@pytest.fixture(name="calls", autouse=True)
def calls_fixture(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were called; none runs."""
    called: list[str] = []
    for module in (native_attention, native_linear):
        monkeypatch.setattr(module, "call", lambda function, *_: called.append(function))
    return called


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(3, 5),
        torch.zeros(4, 4),
        torch.zeros(12),
        torch.zeros(1, 3, 4),
        torch.zeros(4, 3).t(),
        torch.zeros(3, 8)[:, ::2],
        torch.zeros(3, 4, device="meta"),
    ],
)
@pytest.mark.parametrize("rows_apart", [False, True])
def test_a_tensor_that_lies_otherwise_has_no_address(tensor: torch.Tensor, rows_apart: bool) -> None:
    with pytest.raises(ValueError, match=r"a tensor is .* expected contiguous torch.float32 \[3, 4\] on the CPU"):
        address(tensor, torch.float32, 3, 4, rows_apart=rows_apart)


def test_rows_may_lie_apart_where_the_kernel_is_told_so() -> None:
    apart = torch.zeros(3, 8)[:, :4]
    assert address(apart, torch.float32, 3, -1, rows_apart=True) == apart.data_ptr()
    with pytest.raises(ValueError, match=r"strides \[8, 1\]"):
        address(apart, torch.float32, 3, -1)


def test_only_what_was_checked_has_an_address() -> None:
    """All modules take the addresses that they give to the kernels by one function."""
    [folder] = map(Path, engine_package.__path__)
    asking = {path.name for path in folder.rglob("*.py") if re.search(r"\.data_ptr\(", path.read_text())}
    # huge_pages.py calls the operating system's kernel, and host_layers.py the driver of a GPU
    assert asking == {"native.py", "huge_pages.py", "host_layers.py"}
    calling = {path.name for path in folder.rglob("*.py") if re.search(r"\bcall\(\"dynatree_", path.read_text())}
    assert calling == {"native_attention.py", "native_linear.py", "native_recurrence.py", "native_runner.py"}


# Attention

KV_HEADS, DIM, TOKENS = 2, 8, 5
Given = tuple[list[Segment], dict[str, torch.Tensor]]


def _changed(name: str, *shape: int) -> Callable[[list[Segment], dict[str, torch.Tensor]], Given]:
    return lambda segments, tensors: (segments, tensors | {name: torch.zeros(shape)})


def _segment(**changes: Any) -> Callable[[list[Segment], dict[str, torch.Tensor]], Given]:
    return lambda segments, tensors: ([replace(segments[0], **changes), *segments[1:]], tensors)


MASK = torch.ones(3, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_segment(start=18), IndexError),  # the range has 20 slots
        (_segment(start=-1), IndexError),
        (_segment(kv=KVRange(-1, 20)), IndexError),
        (_segment(kv=KVRange(98, 20)), IndexError),  # the KV cache has 100 slots
        (_segment(token_ids=[0] * 21), IndexError),
        (_segment(token_ids=[0] * 4), ValueError),  # there are only 3 queries
        (_segment(mask=MASK.float()), ValueError),
        (_segment(mask=MASK.to(torch.uint8)), ValueError),
        (_segment(mask=MASK[:2]), ValueError),
        (_segment(mask=MASK[0]), ValueError),
        (_segment(mask=torch.ones(3, 4, dtype=torch.bool)), ValueError),  # the mask covers more than slots 0 to 2
        (_segment(mask=torch.ones(3, 3, dtype=torch.bool, device="meta")), ValueError),
        (_changed("query", 4, TOKENS - 1, DIM), ValueError),
        (_changed("query", 3, TOKENS, DIM), ValueError),  # 3 is not a multiple of the number of key heads
        (_changed("query", 4, TOKENS, DIM - 1), ValueError),
        (_changed("key", KV_HEADS, TOKENS - 1, DIM), ValueError),
        (_changed("key", 1, TOKENS, DIM), ValueError),
        (_changed("key", KV_HEADS, TOKENS, DIM + 1), ValueError),
        (_changed("value", KV_HEADS, TOKENS, DIM - 1), ValueError),
        (_changed("value", 1, TOKENS, DIM), ValueError),
        (_changed("value", KV_HEADS, 1, DIM), ValueError),
    ],
)
def test_attention_takes_what_fits_its_kv_cache(calls: list[str], change: Any, error: type[Exception]) -> None:
    kv_cache = KVCache(KVShape(1, KV_HEADS, DIM), 100, torch.float32, CPU)
    kv, other = kv_cache.reserve(20), kv_cache.reserve(20)
    assert kv is not None
    assert other is not None
    segments = [Segment(kv, 0, [0] * 3, range(3), MASK), Segment(other, 0, [0] * 2, range(2))]
    tensors = {
        "query": torch.zeros(4, TOKENS, DIM),
        "key": torch.zeros(KV_HEADS, TOKENS, DIM),
        "value": torch.zeros(KV_HEADS, TOKENS, DIM),
    }
    NativeBatch(segments, kv_cache).attend(0, scores=Scores(), **tensors)
    assert calls == ["dynatree_attention"]
    wrong, given = change(segments, tensors)
    with pytest.raises(error):
        NativeBatch(wrong, kv_cache).attend(0, scores=Scores(), **given)
    with pytest.raises(IndexError):
        NativeBatch(segments, kv_cache).attend(1, scores=Scores(), **tensors)
    assert calls == ["dynatree_attention"]


def _with_window(segments: list[Segment], scores: Scores) -> None:
    """Attend with 4 heads in a layer whose queries see two tokens."""
    kv_cache = KVCache(KVShape(1, KV_HEADS, DIM, (Locality(window=2),)), 400, torch.float32, CPU)
    query, key, value = (torch.zeros(heads, TOKENS, DIM) for heads in (4, KV_HEADS, KV_HEADS))
    NativeBatch(segments, kv_cache).attend(0, query, key, value, scores)


@pytest.mark.parametrize("positions", [range(4), range(6), range(2, 7), [0, 1, 2, 3, 6]])
def test_a_window_takes_positions_that_fit_the_slots(calls: list[str], positions: Any) -> None:
    segment = Segment(KVRange(0, 20), 0, [0] * TOKENS, range(TOKENS))
    _with_window([segment], Scores())
    assert calls == ["dynatree_attention"]
    with pytest.raises(ValueError, match="position"):
        _with_window([replace(segment, positions=positions)], Scores())
    with pytest.raises(ValueError, match=r"mask|a tensor is"):
        _with_window([replace(segment, mask=MASK)], Scores())
    assert calls == ["dynatree_attention"]


@pytest.mark.parametrize(
    "scores",
    [
        *(Scores(cap=cap) for cap in (0.0, -1.0, float("inf"), float("nan"))),
        *(Scores(sinks=torch.zeros(shape)) for shape in (3, 5, (4, 1), (1, 4), ())),
        Scores(sinks=torch.zeros(4, device="meta")),
    ],
)
def test_caps_are_positive_and_each_head_has_a_sink(calls: list[str], scores: Scores) -> None:
    segment = Segment(KVRange(0, 20), 0, [0] * TOKENS, range(TOKENS))
    _with_window([segment], Scores(cap=1.0, sinks=torch.zeros(8, dtype=torch.bfloat16)[::2]))
    with pytest.raises((ValueError, IndexError)):
        _with_window([segment], scores)
    assert calls == ["dynatree_attention"]


def test_slots_are_counted_from_the_first_tile_that_a_token_sees() -> None:
    kv_cache = KVCache(KVShape(1, KV_HEADS, DIM), 400, torch.float32, CPU)
    mask = torch.ones(3, 9, dtype=torch.bool).tril(6)
    segments = [
        Segment(KVRange(20, 300), 200, [0] * 3, range(200, 203)),
        Segment(KVRange(20, 300), 200, [0] * 3, range(200, 203), mask),
        Segment(KVRange(20, 300), 0, [0] * 3, range(3)),
    ]
    structures, tensors = structures_of(segments, kv_cache, [Locality(), Locality(window=30), Locality(window=4)])
    assert [each.first for each in structures] == [0, 3, 6] * 3
    assert [(each.base, each.start) for each in structures] == [
        *((20, 200), (20, 200), (20, 0)),
        *((20 + 128, 72), (20 + 128, 72), (20, 0)),
        *((20 + 192, 8), (20 + 192, 8), (20, 0)),
    ]
    assert [bool(each.lowest) for each in structures] == [False] * 3 + [True, True, False] * 2
    lowest = [each.tolist() for each in tensors if each.dtype == torch.int64]
    # the mask covers slots 194 to 202, so 197 to 199 are in its columns
    assert lowest == [[43, 44, 45], [43, 44, 45], [5, 6, 7], [2, 2, 2]]


# Linear layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_takes_rows_and_weights_of_its_sizes(calls: list[str], dtype: torch.dtype) -> None:
    layer = NativeLinear(torch.zeros(70, 6, dtype=dtype), torch.zeros(70))
    layer(torch.zeros(2, 3, 6))
    for rows in (torch.zeros(2, 5), torch.zeros(8), torch.zeros(2, 6, device="meta")):
        with pytest.raises(ValueError, match="a tensor is"):
            layer(rows)
    for weight, bias, features, inputs in (
        (layer.weight, layer.bias, 130, 6),
        (layer.weight, layer.bias, 70, 8),
        (layer.weight[:1], layer.bias, 70, 6),
        (layer.weight.transpose(0, 1), layer.bias, 70, 6),
        (layer.weight, layer.bias[:70], 70, 6),
        (layer.weight, layer.bias.double(), 70, 6),
    ):
        with pytest.raises(ValueError, match="a tensor is"):
            NativeLinear.bound(weight, bias, features, inputs)
    assert calls == ["dynatree_linear"]


# Programs


@pytest.fixture(scope="module", name="runner")
def runner_fixture(tmp_path_factory: pytest.TempPathFactory) -> NativeRunner:
    path = save_random_model(tmp_path_factory.mktemp("models") / "model", "llama", seed=1)
    runner = load_engine(ModelSettings(str(path), sessions=1)).runner
    assert isinstance(runner, NativeRunner)
    return runner


@compiled
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (KVShape(3, 2, 16), torch.float16),
        (KVShape(2, 2, 16), torch.float32),
        (KVShape(3, 1, 16), torch.float32),
        (KVShape(3, 2, 15), torch.float32),
    ],
)
def test_a_program_takes_the_kv_cache_of_its_model(runner: NativeRunner, shape: KVShape, dtype: torch.dtype) -> None:
    NativeRunner(runner._program, KVCache(KVShape(3, 2, 16), 9, torch.float32, CPU))
    with pytest.raises(ValueError, match="a tensor is"):
        NativeRunner(runner._program, KVCache(shape, 9, dtype, CPU))


@compiled
@pytest.mark.parametrize(
    ("turned", "dtype", "message"),
    [
        (16, torch.float64, "a tensor is"),
        (18, torch.float32, "embedding has 18 dimensions"),
        (15, torch.float32, "embedding has 15 dimensions"),
    ],
)
def test_positions_turn_no_more_than_a_head(
    runner: NativeRunner, turned: int, dtype: torch.dtype, message: str
) -> None:
    def rotary(like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.zeros(1, positions.shape[1], turned, dtype=dtype)
        return both, both

    program: Program = replace(runner._program, rotaries=(rotary,))
    with pytest.raises(ValueError, match=message):
        NativeRunner(program, runner._kv_cache).run([Segment(KVRange(0, 9), 0, [5], [0])])


@compiled
@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [2048]},
        {"token_ids": [-1]},
        {"positions": [-1]},
        {"positions": []},
        {"keep": [1]},
        {"keep": [-1]},
        {"start": 9},
        {"mask": torch.ones(1, 2, dtype=torch.bool)},
        {"mask": torch.ones(1, 1)},
        {"kv": KVRange(10**6, 9)},
    ],
)
def test_a_forward_takes_tokens_positions_and_slots_that_there_are(
    runner: NativeRunner, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        pytest.fail("a kernel was called")

    monkeypatch.setattr("dynatree.engine.cpu.native_runner.call", none)
    with pytest.raises((ValueError, IndexError)):
        runner.run([replace(Segment(KVRange(0, 9), 0, [5], [0]), **changes)])


@compiled
@pytest.mark.long
def test_sanitizers_see_nothing() -> None:
    """Only the best build for this CPU runs here; `make sanitize` runs all builds, on more shapes."""
    command = [sys.executable, "-m", "tests.campaigns.sanitized_kernels", "--builds=1", "--cases=60"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "60 cases, nothing was seen" in done.stdout
