"""Blocks of llama.cpp's types, against PyPI's gguf: the same numbers in float32, bit by bit."""

import gguf
import pytest
import torch

from dynatree.engine.weights.gguf_blocks import repacked
from tests.support.gguf_files import random_blocks


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_repacked_blocks_are_the_same_numbers(kind):
    for seed in range(20):
        raw = random_blocks(kind, 6, 1024, torch.Generator().manual_seed(seed))
        theirs = gguf.dequantize(raw.flatten(1).numpy(), gguf.GGMLQuantizationType[kind])
        assert torch.equal(repacked(raw, kind).dequantized(), torch.from_numpy(theirs)), seed


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_a_scale_that_is_not_finite_is_refused(kind):
    raw = random_blocks(kind, 2, 512, torch.Generator().manual_seed(0))
    at = {"Q8_0": 0, "Q4_K": 2, "Q6_K": 208}[kind]
    raw[1, 0, at : at + 2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # infinity
    with pytest.raises(ValueError, match="NaN or infinite"):
        repacked(raw, kind)
