"""Tests that weights are moved into huge pages if the kernel supports them, and that the log reports the result."""

import logging
import mmap
from pathlib import Path

import pytest
import torch

from dynatree.engine import loading
from dynatree.engine.cpu import huge_pages
from dynatree.engine.cpu.huge_pages import HUGE_PAGE, use_huge_pages
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from tests.support.gguf_files import save_gguf
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import save_random_model

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
RELEASE = tuple(int(each) for each in Path("/proc/sys/kernel/osrelease").read_text().split("-")[0].split(".")[:2])


def in_small_pages(size):
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.copy_(torch.arange(size) % 251)
    return tensor


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text() or RELEASE < (6, 1), reason="this kernel cannot"
)
def test_weights_in_small_pages_are_moved(caplog, monkeypatch):
    monkeypatch.setattr(huge_pages, "_WORTH_A_WORD", 1)
    weights = in_small_pages(8 * HUGE_PAGE)
    caplog.set_level(logging.INFO)
    assert use_huge_pages([weights], "a model") == 1.0
    assert torch.equal(weights, (torch.arange(8 * HUGE_PAGE) % 251).to(torch.uint8))
    assert "a model: 100 %" in caplog.text


@pytest.mark.parametrize(
    ("enabled", "remedy"), [("always [madvise] never", "compact_memory"), ("always madvise [never]", "echo madvise")]
)
def test_a_refusal_is_said_with_its_remedy(enabled, remedy, monkeypatch, tmp_path, caplog):
    (tmp_path / "enabled").write_text(enabled)
    monkeypatch.setattr(huge_pages, "_ENABLED", tmp_path / "enabled")
    monkeypatch.setattr(huge_pages, "_WORTH_A_WORD", 1)
    monkeypatch.setattr(huge_pages, "_madvise", lambda start, stop, advice: 12)
    assert use_huge_pages([in_small_pages(4 * HUGE_PAGE)], "a model") == 0.0
    assert "only 0 % of the weights" in caplog.text
    assert remedy in caplog.text


def test_small_weights_have_no_huge_page_to_lie_in(caplog):
    caplog.set_level(logging.INFO)
    assert use_huge_pages([torch.ones(100)], "a model") is None
    assert not caplog.text


@compiled
@pytest.mark.parametrize("kind", ["int4", "GGUF"])
def test_quantised_weights_are_among_them(kind, tmp_path, monkeypatch):
    model = save_gguf(tmp_path / "m.gguf", ("Q4_K",), 1) if kind == "GGUF" else save_random_model(tmp_path, "llama", 1)
    advised = []
    monkeypatch.setattr(loading, "use_huge_pages", lambda weights, name: advised.extend(weights))
    engine = load_engine(ModelSettings(str(model), sessions=1, weights="auto" if kind == "GGUF" else kind))
    panels = [each.weight for each in engine.model.modules() if isinstance(each, QuantizedLinear)]
    assert len(panels) == 3 * 7 + 1
    assert {each.data_ptr() for each in panels} <= {each.data_ptr() for each in advised}
