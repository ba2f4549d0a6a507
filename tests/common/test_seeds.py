"""Tests derived seeds: of the completions of a request, and of the prompts and repetitions of a measurement."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from dynatree.bench.runs import RunSettings
from dynatree.common.sampling import Sampling
from dynatree.common.seeds import completion_seed, derived_seed

SEEDS = (*range(20), 2**63 - 1, 2**63, *range(2**64 - 20, 2**64))


def test_requests_with_neighbouring_seeds_share_no_completion() -> None:
    """With seed + i, the second completion of request 7 would equal the first one of request 8."""
    seeds = [completion_seed(seed, index) for seed in SEEDS for index in range(64)]
    assert len(set(seeds)) == len(seeds)


def test_measurements_with_neighbouring_seeds_share_no_prompts_seed() -> None:
    settings = [RunSettings(max_new_tokens=8, seed=seed, repetitions=5, warmup=2) for seed in SEEDS]
    seeds = [each.seed_of(prompt, again) for each, prompt, again in product(settings, range(20), range(6))]
    assert len(set(seeds)) == len(seeds)


@given(st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_a_completions_seed_is_a_seed(seed: int, index: int) -> None:
    derived = completion_seed(seed, index)
    assert Sampling(temperature=1.0, seed=derived).seed == derived
    assert (derived == seed) == (index == 0)


def test_a_derived_seed_stays_what_it_is() -> None:
    """Clients in other languages derive it as the protocol documents, and saved reports contain it."""
    assert derived_seed(7, 1) == 0x3958442643DC14C6  # from `b2sum -l 64`, with its bytes reversed
    assert derived_seed(0, 3, 2) == 0x8BCC5250B92E6BEE
