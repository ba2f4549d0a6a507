"""Tests the Triton kernels of choices, accepted rows and rankings in the interpreter against torch's operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from dynatree.common.sampling import NOT_CHOSEN
from dynatree.common.tree import TokenTree
from dynatree.engine.gpu import decisions
from dynatree.engine.gpu.decisions import (
    FAULTY,
    accepted,
    choices_by_triton,
    chosen,
    move_by_triton,
    moves_by_triton,
    rank,
    ranks_by_triton,
)
from dynatree.engine.sampling.device_noise import by_triton, seed_bits
from dynatree.engine.sampling.gumbel import NoiseStream
from dynatree.verify.accept import accept
from tests.support.kernel_builds import needs_triton
from tests.support.launches import Launches
from tests.support.trees import random_trees

needs_triton()

VOCABULARY = 150
SEEDS = (3, 2**64 - 1, 2**63, 0, 7, 8)
TEMPERATURES = (0.0, 0.7, 1.0, 1e-6, 100.0, 0.3)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Split rows of a small vocabulary, whose last part is not full; numpy interprets, and warns of inf - inf."""
    monkeypatch.setattr(decisions, "_PART", 64)
    with np.errstate(all="ignore"):
        yield


def rows_of(dtype: torch.dtype, sampled: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, temperatures, which are all 0 unless `sampled`, seeds and positions."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(SEEDS), VOCABULARY, generator=generator).mul(3).to(dtype)
    temperatures = torch.tensor(TEMPERATURES) * sampled
    seeds = torch.tensor([seed_bits(seed) for seed in SEEDS])
    positions = torch.tensor([0, 5, 2**31 - 3, 1, 77, 4], dtype=torch.int32)
    return logits, temperatures, seeds, positions


def noise_of(seeds: Tensor, positions: Tensor) -> Tensor:
    """The kernels' own noise, whose logarithms may differ from numpy's by a bit."""
    noise = torch.empty(len(seeds), VOCABULARY)
    by_triton(noise, seeds, positions + 1, int(NoiseStream.CHOICE))
    return noise


def harmed(logits: Tensor) -> Tensor:
    """Two ties, then NaN, infinity, minus infinity everywhere, and in part."""
    logits = logits.clone()
    logits[0, [3, 70, 140]] = 50.0
    logits[1, 149] = math.nan
    logits[2, 66] = math.inf
    logits[3] = -math.inf
    logits[4, :100] = -math.inf
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("harm", [False, True])
def test_choices_are_those_of_torch_to_the_bit(dtype: torch.dtype, sampled: bool, harm: bool) -> None:
    logits, temperatures, seeds, positions = rows_of(dtype, sampled)
    logits = harmed(logits) if harm else logits
    expected = chosen(logits, temperatures, noise_of(seeds, positions) if sampled else None)
    choices = choices_by_triton(logits, temperatures, seeds, positions)
    assert choices.tolist() == expected.tolist()
    assert (NOT_CHOSEN in choices.tolist()) == harm
    if harm and not sampled:
        assert choices[0] == 3, "of equal logits the lowest token is chosen"
    faulty = torch.arange(len(logits), dtype=torch.int32) % 2
    choices = choices_by_triton(logits, temperatures, seeds, positions, faulty)
    assert choices.tolist() == expected.masked_fill(faulty > 0, FAULTY).tolist()


@settings(max_examples=60, deadline=None)
@given(random_trees(max_nodes=31), st.data())
def test_accepted_rows_move_to_the_slots_of_committed_tokens(tree: TokenTree, data: st.DataObject) -> None:
    """Two sessions' trees, of which one accepts often, and padding; slots that are not accepted keep their numbers."""
    choice = st.sampled_from(tree.token_ids) | st.integers(2, 9) if len(tree) else st.integers(2, 9)
    choices = data.draw(st.lists(choice, min_size=len(tree) + 1, max_size=len(tree) + 1))
    padding, rows = data.draw(st.integers(0, 4)), 2 * (len(tree) + 1)
    size = len(tree) + 1
    depths = [0, *tree.depths]
    parents: list[int] = []
    homes: list[int] = []
    slots: list[int] = []
    for first, base in ((0, 3), (size, 50)):  # first row, and slot of the root
        parents += [first, *(first + 1 + parent for parent in tree.parents)]
        homes += [base + depth for depth in depths]
        slots += range(base, base + size)
    parents += range(rows, rows + padding)
    homes += [0] * padding
    slots += [99] * padding
    token_ids = torch.tensor([99, *tree.token_ids] * 2 + [0] * padding, dtype=torch.int32)
    given_choices = torch.tensor([*choices, *[1] * size, *[0] * padding])
    others = [torch.tensor(each, dtype=torch.int32) for each in (parents, slots, homes)]
    moves = moves_by_triton(token_ids, others[0], others[1], others[2], given_choices)
    nodes = [node + 1 for node in sorted(accept(tree, choices).accepted)]
    moved = [(3 + node, 3 + depths[node]) for node in nodes]
    assert moves[0] == len(moved)
    assert moves[1 : 1 + 2 * len(moved)].view(-1, 2).tolist() == [list(each) for each in moved]
    holds = accepted(token_ids, others[0].long(), given_choices) & (others[0] != torch.arange(rows + padding))
    assert holds.nonzero()[:, 0].tolist() == nodes
    cache = torch.arange(2 * 2 * 1 * 100 * 3, dtype=torch.float32).view(2, 2, 1, 100, 3)
    expected = cache.clone()
    for source, destination in moved:
        expected[:, :, :, destination] = cache[:, :, :, source]
    move_by_triton(cache, moves)
    assert torch.equal(cache, expected)


def test_more_rows_than_are_walked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_ROWS", 4)
    rows = 11  # a chain, of which the target accepts all but the last token
    numbers = torch.arange(rows, dtype=torch.int32)
    choices = torch.tensor([*range(1, rows - 1), 99, 99])
    moves = moves_by_triton(numbers, (numbers - 1).clamp(0), numbers + 30, numbers + 20, choices)
    assert moves[:19].tolist() == [9, *(slot for row in range(1, 10) for slot in (30 + row, 20 + row))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_rankings_are_those_of_float64(dtype: torch.dtype, sampled: bool) -> None:
    logits, temperatures, seeds, positions = rows_of(dtype, sampled)
    temperatures[3] *= 5e4  # at the smallest, float32 rounds the noise away
    limits = torch.tensor([150, 149, 100, 64, 70, 40], dtype=torch.int32)
    ids, chances = ranks_by_triton(logits, limits, temperatures, seeds, positions, 16)
    ranks = logits.double()
    if sampled:
        divisors = temperatures[:, None].double()
        top = ranks.masked_fill(torch.arange(VOCABULARY) >= limits[:, None], -math.inf).amax(-1, keepdim=True)
        perturbed = (ranks - top) / divisors.where(divisors > 0, 1.0) + noise_of(seeds, positions).double()
        ranks = torch.where(divisors > 0, perturbed, ranks)
    ranks = ranks.masked_fill(torch.arange(VOCABULARY) >= limits[:, None], -math.inf)
    best = torch.sort(ranks, stable=True, dim=-1, descending=True)
    assert ids.tolist() == best.indices[:, :16].tolist()
    expected = best.values[:, :16] - ranks.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(chances.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("sampled", [False, True])
def test_rankings_of_rows_that_are_not_finite(sampled: bool) -> None:
    """A row's first log-probability is NaN as in torch's operations, and every token is one of the vocabulary."""
    logits, temperatures, seeds, positions = rows_of(torch.float32, sampled)
    logits, limits = harmed(logits), torch.full((6,), 150, dtype=torch.int32)
    ids, chances = ranks_by_triton(logits, limits, temperatures, seeds, positions, 16)
    _, expected = rank(logits, limits, temperatures, seeds, positions, 16)
    assert chances[:, 0].isnan().tolist() == expected[:, 0].isnan().tolist() == [False, True, True, True, False, False]
    assert ((ids >= 0) & (ids < VOCABULARY)).all()
    assert ids[0, :3].tolist() == [3, 70, 140]


def test_fewer_tokens_than_places_are_followed_by_tokens_of_no_chance() -> None:
    logits, temperatures, seeds, positions = rows_of(torch.float32)
    limits = torch.tensor([1, 2, 15, 16, 65, 80], dtype=torch.int32)
    ids, chances = ranks_by_triton(logits, limits, temperatures, seeds, positions, 16)
    for row, limit in enumerate(limits.tolist()):
        real = min(limit, 16)
        assert sorted(ids[row, :real].tolist()) == list(range(real)) or limit > 16
        assert len(set(ids[row, :real].tolist())) == real
        assert (ids[row, :real] < limit).all()
        assert chances[row, :real].isfinite().all()
        assert (chances[row, real:] == -math.inf).all()
        assert ((ids[row] >= 0) & (ids[row] < VOCABULARY)).all()


def launches(function: Callable[[], object]) -> int:
    """Count the launches of a function on a GPU."""
    kernels = []
    run = InterpretedFunction.run

    def counted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        kernels.append(kernel)
        with _disable_current_modes():  # the interpreter copies arguments
            return run(kernel, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch, Launches() as operations:
        patch.setattr(InterpretedFunction, "run", counted)
        function()
    count: int = operations.count
    return len(kernels) + count


@pytest.mark.parametrize("sampled", [False, True])
def test_launches_are_few(sampled: bool) -> None:
    """Torch's operations were about 40 launches for a decision on a GPU, and 30 for a ranking of 50,304 tokens."""
    logits, temperatures, seeds, positions = rows_of(torch.float32, sampled)
    numbers = torch.arange(6, dtype=torch.int32)
    cache, limits = torch.zeros(2, 2, 1, 100, 3), torch.full((6,), 150, dtype=torch.int32)

    def decision() -> None:
        choices = choices_by_triton(logits, temperatures, seeds, positions)
        move_by_triton(cache, moves_by_triton(numbers, numbers, numbers, numbers, choices))

    assert launches(decision) == 5
    assert launches(lambda: ranks_by_triton(logits, limits, temperatures, seeds, positions, 16)) == 2
