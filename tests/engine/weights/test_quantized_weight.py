"""Rounding of weights to 8 and 4 bits."""

import pytest
import torch

from dynatree.engine.weights.quantized_weight import group_of, rounded


@pytest.mark.parametrize(("bits", "share"), [(8, 1 / 254), (4, 1 / 14)])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_no_weight_is_further_off_than_its_format_allows(bits, share, group):
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(bits + group))
    quantised = rounded(weight, bits, group)
    error = (quantised.dequantized() - weight).abs().view(40, -1, group).amax(2)
    largest = weight.abs().view(40, -1, group).amax(2)
    steps = 1.0 if bits == 8 else 1.75  # 4 bits may have no code for the opposite of the largest
    assert (error <= steps * largest * share * 1.01).all()
    assert quantised.group == group
    assert quantised.scales.dtype == torch.float16


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_weights_beyond_float16(bits):
    weight = torch.zeros(64, 128)
    assert (rounded(weight, bits, 64).dequantized() == 0).all()
    for size in (1e-9, 1e9):
        weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * size
        quantised = rounded(weight, bits, 64)
        assert (quantised.dequantized() - weight).abs().max() <= 0.2 * weight.abs().max()
        assert quantised.scales.isfinite().all()


def test_four_bits_map_the_largest_to_the_better_end():
    """No group has larger errors than with the largest magnitude at -8, and none than with it at 7."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))
    grouped = weight.view(64, 16, 32)
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    error = (rounded(weight, 4, 32).dequantized() - weight).view_as(grouped).square().sum(2)
    for end in (-8, 7):
        scales = (largest / end).half().float()
        either = ((grouped / scales).round().clamp(-8, 7) * scales - grouped).square().sum(2)
        assert (error <= 1.0001 * either).all()
        assert (error < 0.99 * either).sum() > 100  # of 1,024 groups


def test_the_largest_group_that_divides():
    assert [group_of(inputs, 128) for inputs in (256, 192, 96, 48, 40)] == [128, 64, 32, 16, None]
    assert group_of(256, 32) == 32
