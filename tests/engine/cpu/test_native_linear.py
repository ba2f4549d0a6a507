"""Tests the kernel of linear layers against float64, and for equal bits of a row in any company."""

import pytest
import torch

from dynatree.engine.cpu.native_linear import NativeLinear, fits
from tests.support.kernel_builds import compiled

pytestmark = compiled
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ERRORS = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # relative to the largest number


def random_layer(inputs, features, dtype, bias):
    generator = torch.Generator().manual_seed(inputs + features)
    weight = torch.randn(features, inputs, generator=generator).to(dtype)
    shift = torch.randn(features, generator=generator).to(dtype) if bias else None
    return weight, shift, generator


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "features"), [(64, 64), (322, 193), (2, 1), (1030, 130), (4096, 64)])
def test_the_kernel_computes_the_layer(inputs, features, dtype, bias):
    weight, shift, generator = random_layer(inputs, features, dtype, bias)
    layer = NativeLinear(weight, shift)
    for rows in (*range(1, 20), 97, 200):
        given = torch.randn(1, rows, inputs, generator=generator).to(dtype)
        exact = torch.nn.functional.linear(given.double(), weight.double(), None if shift is None else shift.double())
        output = layer(given)
        assert output.shape == (1, rows, features)
        assert output.dtype == dtype
        assert (output - exact).abs().max() <= ERRORS[dtype] * exact.abs().max(), rows


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype):
    weight, shift, generator = random_layer(1030, 130, dtype, bias=True)
    layer = NativeLinear(weight, shift)
    given = torch.randn(200, 1030, generator=generator).to(dtype)
    alone = torch.cat([layer(row[None]) for row in given])
    for rows in (*range(2, 40), 96, 97, 200):
        assert torch.equal(layer(given[-rows:]), alone[-rows:]), rows


@pytest.mark.usefixtures("build")
def test_no_rows_and_numbers_that_are_not_finite():
    layer = NativeLinear(torch.ones(65, 4, dtype=torch.bfloat16), None)
    assert layer(torch.ones(0, 4, dtype=torch.bfloat16)).shape == (0, 65)
    given = torch.tensor([[1.0, torch.nan, 0, 0], [torch.inf, 0, 0, 0], [3e38, 3e38, 0, 0]], dtype=torch.bfloat16)
    output = layer(given)
    assert output[0].isnan().all()
    assert (output[1:] == torch.inf).all()


def test_which_weights_the_kernel_takes():
    assert fits(torch.empty(3, 5))
    assert fits(torch.empty(3, 5, dtype=torch.float16))
    assert not fits(torch.empty(3, 5, dtype=torch.bfloat16)), "its inputs lie in pairs"
    assert not fits(torch.empty(3, 4, dtype=torch.float64))
