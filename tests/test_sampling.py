"""Choosing tokens: greedy ties, truncation as in transformers, noise that depends on seed and position alone."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.sampling import Sampling, choose, gumbel, scores


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert choose(torch.tensor([[1.0, 3.0, 3.0]]), [0], Sampling()) == [1]


def test_noise_depends_on_seed_and_position_only():
    assert torch.equal(gumbel(1, 5, 64), gumbel(1, 5, 64))
    assert torch.equal(gumbel(1, 5, 64), gumbel(1, 5, 100)[:64]), "models padded to different sizes share it"
    assert not torch.equal(gumbel(1, 5, 64), gumbel(1, 6, 64))
    assert not torch.equal(gumbel(1, 5, 64), gumbel(2, 5, 64))
    far = gumbel(2**64 - 1, 100_000, 64)
    assert torch.isfinite(far).all()


def test_samples_follow_the_softmax():
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(0)) * 2
    draws = 20_000
    tokens = choose(logits.expand(draws, -1), range(draws), Sampling(temperature=0.8, seed=11))
    expected = (logits[0] / 0.8).softmax(-1) * draws
    observed = torch.bincount(torch.tensor(tokens), minlength=20)
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    assert statistic < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (7, 0.5), (1, 1.0), (0, 0.01)])
def test_truncation_is_that_of_transformers(top_k, top_p):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) * 3
    expected = (logits - logits.amax(-1, keepdim=True)) / 0.9  # a shift changes no probability
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    sampling = Sampling(temperature=0.9, top_k=top_k, top_p=top_p, seed=3)
    noisy = scores(logits, range(6), sampling)
    assert torch.equal(noisy.isinf(), expected.isinf())
    noise = torch.stack([gumbel(3, position, 50) for position in range(6)])
    assert torch.allclose((noisy - noise)[~noisy.isinf()], expected[~noisy.isinf()], atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-45])
def test_the_smallest_temperatures_are_greedy(temperature):
    logits = torch.tensor([[1.0, 5.0, -3.0, 4.9]])
    assert choose(logits, [3], Sampling(temperature=temperature, seed=1)) == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, r"top_p is 0, expected a number in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"seed": 2**64}, "seed is"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Sampling(**options)
