"""Tests that weights packed for CPUs without the project's kernels give the results of the checkpoint's layers."""

import platform
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from dynatree import embedded
from dynatree.engine import loading
from dynatree.engine.cpu import packing
from dynatree.engine.cpu.packing import HalfLinear, PackedLinear, can_pack
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from tests.support.model_zoo import ARCHITECTURES, save_random_model

PROMPT = list(range(100, 140))

# The condition asks torch, not can_pack: if can_pack were wrong, these tests would fail and not be skipped.
needs_bfloat16_kernels = pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="this processor has no blocked bfloat16 kernels"
)


needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="float32 is blocked on x86 processors"
)
DTYPES = [pytest.param(torch.float32, marks=needs_x86), pytest.param(torch.bfloat16, marks=needs_bfloat16_kernels)]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@needs_bfloat16_kernels
def test_bfloat16_is_packed_where_the_processor_has_kernels_for_it() -> None:
    assert can_pack(torch.bfloat16) == (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()), (
        "emulated kernels are slower than FBGEMM's"
    )


@needs_x86
@pytest.mark.parametrize("has", [True, False])
def test_bfloat16_that_would_be_emulated_is_not_blocked(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert can_pack(torch.bfloat16) == has


IN_16_BITS = ("gpt_neox", "llama", "gpt2")  # of linear layers with and without biases, and of Conv1D


@needs_x86
def test_float32_is_packed() -> None:
    assert can_pack(torch.float32)


@pytest.mark.parametrize(
    ("architecture", "dtype", "layout"),
    [
        pytest.param(
            architecture,
            dtype,
            layout,
            marks=[needed] + [pytest.mark.long] * (dtype is torch.bfloat16 and architecture not in IN_16_BITS),
        )
        for architecture in ARCHITECTURES
        for dtype, layout, needed in (
            (torch.float32, PackedLinear, needs_x86),
            (torch.bfloat16, PackedLinear, needs_bfloat16_kernels),
            (torch.bfloat16, HalfLinear, needs_x86),
        )
    ],
)
def test_every_linear_layer_is_replaced_and_logits_are_those_of_the_checkpoint(
    architecture: str, dtype: torch.dtype, layout: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "is_native", lambda device, dtype: False)
    monkeypatch.setattr(packing, "_SMALL", 0)
    monkeypatch.setattr(packing, "can_pack", lambda dtype: layout is PackedLinear)
    folder = save_random_model(tmp_path / "model", architecture, seed=1)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    linear = sum(isinstance(layer, (nn.Linear, Conv1D)) for layer in reference.modules())

    engine = load_engine(ModelSettings(str(folder), device="cpu", dtype=str(dtype)[len("torch.") :], sessions=1))

    layers = list(engine.model.modules())
    assert sum(isinstance(layer, layout) for layer in layers) == linear > 0
    assert not any(isinstance(layer, (nn.Linear, Conv1D)) for layer in layers)
    with torch.inference_mode():
        (ours,) = engine.forward([Segment(KVRange(0, len(PROMPT)), 0, PROMPT, range(len(PROMPT)))])
        theirs = reference(torch.tensor([PROMPT])).logits[0]
    assert engine.info.parameters == sum(parameter.numel() for parameter in reference.parameters())
    scale = theirs.float().abs().max()
    assert (ours.float() - theirs.float()).abs().max() < 6 * ROUNDING[dtype] * scale  # roundings of three layers
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.9


@pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 17, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_layer_is_the_layer(rows: int, bias: bool, dtype: torch.dtype) -> None:
    layer = random_layer(bias, dtype)
    check_layer(PackedLinear(layer.weight.detach(), layer.bias.detach() if bias else None), layer, rows)


@needs_x86
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 16, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_of_half_precision_is_the_layer(rows: int, bias: bool, dtype: torch.dtype) -> None:
    layer = random_layer(bias, dtype)
    check_layer(HalfLinear(layer.weight.detach(), layer.bias.detach() if bias else None), layer, rows)


@needs_x86
@pytest.mark.parametrize("largest", [2.0**-60, 1.0, 255 / 128 * 2.0**15, 2.0**60])
def test_bfloat16_weights_keep_every_bit(largest: float) -> None:
    """Multiplying by each unit vector reads the weights back."""
    torch.manual_seed(1)
    exponents = torch.randint(-30, 1, (192, 320)).float()
    weight = (torch.rand(192, 320) - 0.5).sign() * (1 + torch.randint(0, 128, (192, 320)) / 128) / 2 * 2.0**exponents
    weight = (weight * largest).bfloat16()
    weight[0, 0] = largest
    layer = HalfLinear(weight, None)
    assert torch.equal(layer(torch.eye(320, dtype=torch.bfloat16)).T, weight)


@needs_x86
@pytest.mark.parametrize("largest", [65504.0, 2.0**-14, 2.0**-24])
def test_float16_weights_keep_every_bit(largest: float) -> None:
    torch.manual_seed(1)
    weight = ((torch.rand(192, 320) - 0.5) * largest).half()
    weight[0, 0] = largest
    assert torch.equal(HalfLinear(weight, None)(torch.eye(320, dtype=torch.float16)).T, weight)


@needs_x86
def test_a_layer_of_zeros() -> None:
    layer = HalfLinear(torch.zeros(8, 320, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16))
    assert torch.equal(layer(torch.ones(2, 320, dtype=torch.bfloat16)), torch.ones(2, 8, dtype=torch.bfloat16))


def random_layer(bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(320, 192, bias=bias, dtype=dtype)


def check_layer(ours: nn.Module, layer: nn.Linear, rows: int) -> None:
    dtype = layer.weight.dtype
    bound = ROUNDING.get(dtype, 2**-7)
    with torch.inference_mode():
        inputs = torch.randn(1, rows, 320, dtype=dtype)
        bias = None if layer.bias is None else layer.bias.double()
        exact = nn.functional.linear(inputs.double(), layer.weight.double(), bias)
        outputs = ours(inputs)
        assert outputs.shape == (1, rows, 192)
        assert outputs.dtype == dtype
        assert outputs.is_contiguous()
        torch.testing.assert_close(outputs.double(), exact, rtol=bound, atol=bound)


@needs_x86
def test_small_float32_layers_keep_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of the embedded draft are small; those of the embedded target are not."""
    monkeypatch.setattr(loading, "is_native", lambda device, dtype: False)
    kinds = []
    for path in (embedded.draft_path(), embedded.target_path()):
        engine = load_engine(ModelSettings(str(path), device="cpu", sessions=1))
        kinds.append({type(layer) for layer in engine.model.modules() if hasattr(layer, "out_features")})
    assert kinds[0] == {nn.Linear}
    assert PackedLinear in kinds[1]


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_x86)], ids=["float32", "bfloat16"]
)
def test_an_output_layer_tied_to_the_embeddings(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "model", "qwen2", seed=3, tie_word_embeddings=True)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    engine = load_engine(ModelSettings(str(folder), device="cpu", dtype=str(dtype)[len("torch.") :], sessions=1))
    with torch.inference_mode():
        (ours,) = engine.forward([Segment(KVRange(0, len(PROMPT)), 0, PROMPT, range(len(PROMPT)))])
        theirs = reference(torch.tensor([PROMPT])).logits[0]
    assert (ours.float() - theirs.float()).abs().max() < 6 * ROUNDING[dtype] * theirs.float().abs().max()
