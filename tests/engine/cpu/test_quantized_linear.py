"""Tests the kernel of quantised linear layers.

It computes in integers, and a row's output has the same bits in every batch and on every build.
"""

import pytest
import torch

from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.weights.gguf_blocks import repacked
from dynatree.engine.weights.quantized_weight import QuantizedWeight, rounded
from tests.support.gguf_files import random_blocks
from tests.support.kernel_builds import compiled

pytestmark = compiled
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def quantised_rows(rows, block):
    """Return the numbers, the scales of each input, as the kernel's arithmetic has them."""
    blocks = rows.float().split(block, 1)
    numbers, scales = [], []
    for block in blocks:
        largest = block.abs().amax(1, keepdim=True)
        inverse = torch.where(largest < 2.0**-100, 0.0, torch.tensor(127.0) / largest)
        numbers.append((block * inverse).round())
        scales.append(torch.where(largest < 2.0**-100, 0.0, largest / 127).expand_as(block))
    return torch.cat(numbers, 1), torch.cat(scales, 1)


def expected(weight: QuantizedWeight, rows):
    """Compute a layer in float64 from the quantised rows; the kernel's float32 sums differ in their last bits."""
    group = weight.codes.shape[1] // weight.scales.shape[1]
    numbers, scales = quantised_rows(rows, 32 if group < 64 else 64)
    return (numbers.double() * scales.double()) @ weight.dequantized().double().T


def weights_of(kind, features=130, inputs=512, group=64):
    generator = torch.Generator().manual_seed(features + inputs)
    if kind.startswith("int"):
        return rounded(torch.randn(features, inputs, generator=generator), int(kind[3:]), group)
    return repacked(random_blocks(kind, features, inputs, generator), kind)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("kind", [*KINDS, "int8", "int4"])
def test_the_kernel_computes_whole_numbers(kind):
    weight = weights_of(kind)
    layer = QuantizedLinear(weight, None, torch.float32)
    rows = torch.randn(97, weight.codes.shape[1], generator=torch.Generator().manual_seed(1))
    for count in (*range(1, 14), 97):
        exact = expected(weight, rows[:count])
        output = layer(rows[:count])
        assert (output - exact).abs().max() <= 2e-6 * exact.abs().max(), count


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_group_bias_and_dtype(group, bits, dtype):
    generator = torch.Generator().manual_seed(group + bits)
    inputs = 9 * max(group, 64)  # AMX takes 256 together, which does not divide them
    weight = rounded(torch.randn(65, inputs, generator=generator), bits, group)
    bias = torch.randn(65, generator=generator)
    rows = torch.randn(1, 7, inputs, generator=generator).to(dtype)
    output = QuantizedLinear(weight, bias, dtype)(rows)
    exact = expected(weight, rows[0]) + bias.to(dtype).double()
    assert output.shape == (1, 7, 65)
    assert output.dtype == dtype
    assert (output[0] - exact).abs().max() <= max(torch.finfo(dtype).eps, 4e-6) * exact.abs().max()


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("kind", [*KINDS, "int8", "int4"])
def test_a_row_has_the_same_bits_in_any_company(kind):
    layer = QuantizedLinear(weights_of(kind), None, torch.bfloat16)
    rows = torch.randn(200, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    alone = torch.cat([layer(row[None]) for row in rows])
    for count in (*range(2, 40), 96, 97, 200):
        assert torch.equal(layer(rows[-count:]), alone[-count:]), count


@compiled
@pytest.mark.parametrize("kind", [*KINDS, "int8", "int4"])
def test_all_builds_give_the_same_bits(kind, on_each_build):
    weight = weights_of(kind, group=32)
    rows = torch.randn(33, 512, generator=torch.Generator().manual_seed(3)) * 3
    outputs = on_each_build(lambda: QuantizedLinear(weight, None, torch.float32)(rows))
    if len(outputs) == 1:
        pytest.skip("this CPU runs a single build")
    assert len({bytes(each.numpy().tobytes()) for each in outputs.values()}) == 1, list(outputs)


@pytest.mark.usefixtures("build")
def test_extreme_codes_do_not_saturate():
    """Products of the largest codes by the largest inputs, whose pairs exceed 16 bits."""
    for bits, code in ((8, 255), (8, 0), (4, 15), (4, 0)):
        codes = torch.full((64, 128), code, dtype=torch.uint8)
        weight = QuantizedWeight("", codes, torch.ones(64, 1).half(), bits, 1 << (bits - 1), narrow=bits == 4)
        for sign in (1.0, -1.0):
            output = QuantizedLinear(weight, None, torch.float32)(torch.full((1, 128), sign))
            assert (output == 128 * (code - (1 << (bits - 1))) * sign).all()


@pytest.mark.usefixtures("build")
def test_no_rows_tiny_rows_and_numbers_that_are_not_finite():
    layer = QuantizedLinear(rounded(torch.ones(65, 256), 8, 128), None, torch.float32)
    assert layer(torch.ones(0, 256)).shape == (0, 65)
    rows = torch.zeros(5, 256)
    rows[1, 3], rows[2, 200], rows[3], rows[4, 0] = torch.nan, torch.inf, 1e-38, 1.0
    output = layer(rows)
    assert (output[0] == 0).all()
    assert output[1:3].isnan().all()
    assert (output[3] == 0).all()
    assert output[4].isfinite().all()
