"""Tests the choice of tokens: greedy ties, truncation as in transformers, noise from seed and position only."""

from collections import Counter

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.sampling import Sampling, Scheme
from dynatree.common.wire import sampling_from_pb, sampling_to_pb
from dynatree.engine.sampling.choosing import TokenHistories, adjusted, choose, scores, warped
from dynatree.engine.sampling.gumbel import NoiseStream, gumbel, node_of, random_generator
from dynatree.v1 import tree_pb2


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert choose(torch.tensor([[1.0, 3.0, 3.0]]), [0], Sampling()) == [1]


def test_noise_depends_on_seed_and_position_only():
    assert torch.equal(gumbel(1, 5, 64), gumbel(1, 5, 64))
    assert torch.equal(gumbel(1, 5, 64), gumbel(1, 5, 100)[:64]), "models padded to different sizes share it"
    assert not torch.equal(gumbel(1, 5, 64), gumbel(1, 6, 64))
    assert not torch.equal(gumbel(1, 5, 64), gumbel(2, 5, 64))
    far = gumbel(2**64 - 1, 100_000, 64)
    assert torch.isfinite(far).all()


def test_streams_rounds_and_nodes_have_random_numbers_of_their_own():
    draws = [
        tuple(random_generator(seed, position, stream, round_=round_, node=node).random(4))
        for seed in (1, 2**64 - 1)
        for position in (0, 1, 2**31)
        for stream in NoiseStream
        for round_ in (0, 1, 2**31)
        for node in (0, 1, node_of([]), node_of([7]), node_of([7, 7]), 2**64 - 1)
    ]
    assert len(set(draws)) == len(draws)
    assert draws[0] == tuple(random_generator(1, 0, NoiseStream.CHOICE).random(4))


def test_samples_follow_the_softmax():
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(0)) * 2
    draws = 20_000
    tokens = choose(logits.expand(draws, -1), range(draws), Sampling(temperature=0.8, seed=11))
    expected = (logits[0] / 0.8).softmax(-1) * draws
    observed = torch.bincount(torch.tensor(tokens), minlength=20)
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    assert statistic < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (5, 1.0, 0.0),
        (0, 0.7, 0.0),
        (7, 0.5, 0.0),
        (1, 1.0, 0.0),
        (0, 0.01, 0.0),
        (50, 1.0, 0.0),
        (2**32 - 1, 1.0, 0.0),
        (0, 1.0, 0.05),
        (0, 1.0, 1.0),
        (20, 0.9, 0.1),
    ],
)
def test_truncation_is_that_of_transformers(top_k, top_p, min_p):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) * 3
    expected = (logits - logits.amax(-1, keepdim=True)) / 0.9  # a shift of the logits changes no probability
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    sampling = Sampling(temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p, seed=3)
    noisy = scores(logits, range(6), sampling)
    assert torch.equal(noisy.isinf(), expected.isinf())
    noise = torch.stack([gumbel(3, position, 50) for position in range(6)])
    assert torch.allclose((noisy - noise)[~noisy.isinf()], expected[~noisy.isinf()], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_leaves_finite_logits(temperature):
    sampling = Sampling(temperature=temperature, repetition_penalty=1e-40, seed=3)
    logits = torch.tensor([[3.0, -2.0, 1.0, 0.5]])
    histories = TokenHistories([0, 1, 2], [()])
    processed = adjusted(logits, sampling, histories)
    assert processed.isfinite().all()
    assert choose(logits, [4], sampling, histories) in ([0], [2])
    if temperature:
        assert warped(processed, sampling).softmax(-1).isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("counted", [{}, {"frequency_penalty": 0.75}, {"presence_penalty": -1.5}])
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.5])
@pytest.mark.parametrize("bias", [{}, {3: 2.5, 49: -1000.0}])
def test_bias_and_penalties_are_those_of_transformers_and_openai(bias, penalty, counted, temperature):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 3
    shared, own, generated = [3, 7, 7, 9, 7, 7], [[], [9, 9], [49, 3]], 3
    expected = logits
    if bias:
        expected = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(
            torch.zeros(3, 1, dtype=torch.long), expected
        )
    if penalty != 1.0:
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        rows = [torch.tensor([[*shared, *tokens]]) for tokens in own]
        expected = torch.cat([processor(row, expected[i : i + 1]) for i, row in enumerate(rows)])
    expected = expected.clone()
    for row, tokens in enumerate(own):
        for token, count in Counter(shared[-generated:] + tokens).items():
            expected[row, token] -= counted.get("frequency_penalty", 0.0) * count
            expected[row, token] -= counted.get("presence_penalty", 0.0)
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty, logit_bias=bias, **counted)
    assert torch.equal(adjusted(logits, sampling, TokenHistories(shared, own, generated)), expected)
    before = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 3
    assert torch.equal(logits, before), "the model's logits stay as they are"


def test_what_a_smaller_vocabulary_lacks_is_passed_over():
    """The draft's logits may end below tokens that the target has."""
    logits = torch.randn(2, 10, generator=torch.Generator().manual_seed(1))
    penalties = {"repetition_penalty": 2.0, "frequency_penalty": 1.0}
    cut = Sampling(logit_bias={4: 1.0, 30: 5.0}, **penalties)
    whole = Sampling(logit_bias={4: 1.0}, **penalties)
    assert torch.equal(
        adjusted(logits, cut, TokenHistories([2, 40], [[], [11, 5]], generated=2)),
        adjusted(logits, whole, TokenHistories([2], [[], [5]], generated=1)),
    )


@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_that_changes_nothing_is_plain(penalty):
    """The device makes such choices, in one graph with the forward pass."""
    nothing = 1.0 if penalty == "repetition_penalty" else -0.0
    assert Sampling(**{penalty: nothing}).is_plain
    assert not Sampling(**{penalty: 0.5}).is_plain


def test_options_survive_the_wire():
    sampling = Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=2.0,
        logit_bias={5: -1.5, 0: 1000.0},
        seed=2**64 - 1,
        scheme=Scheme.RESIDUAL,
    )
    assert sampling_from_pb(sampling_to_pb(sampling), default_seed=0) == sampling
    assert sampling_from_pb(sampling_to_pb(Sampling()), default_seed=7) == Sampling()
    assert sampling_from_pb(tree_pb2.SamplingOptions(), default_seed=7) == Sampling(seed=7)


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
        ({"min_p": 1.5}, r"min_p is 1.5, expected a number in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0, expected a number in \(0, 100\]"),
        ({"frequency_penalty": 2.5}, r"frequency_penalty is 2.5, expected a number in \[-2, 2\]"),
        ({"presence_penalty": float("nan")}, r"presence_penalty is nan, expected a number in \[-2, 2\]"),
        ({"logit_bias": {4: float("nan")}}, r"logit_bias\[4\] is nan"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias has 1025 entries"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Sampling(**options)
