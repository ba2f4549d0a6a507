"""Tests the GPU kernel's noise in Triton's interpreter: numpy's bits, and the noise of `gumbel`."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from dynatree.engine.sampling.device_noise import by_triton, fill_noise, seed_bits
from dynatree.engine.sampling.gumbel import NoiseStream, gumbel, random_generator
from tests.support.kernel_builds import needs_triton

needs_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from dynatree.engine.sampling.noise_kernels import noise_of, random_words  # noqa: E402

SEEDS = (0, 1, 2**63, 2**64 - 1)
POSITIONS = (0, 1, 2047, 2**31 - 1)
# Triton 3.9's interpreter passes integers between the two ranges in 32 bits, and reads them as 64 bits.
INTEGERS = st.integers(0, 2**31 - 1) | st.integers(2**32, 2**63 - 1)
BOTH = [(seed, position) for seed in SEEDS for position in POSITIONS]


@triton.jit
def words_kernel(out, seeds, positions, stream, first_block):
    blocks = first_block + tl.arange(0, 2).to(tl.int64)
    words = random_words(tl.load(seeds), tl.load(positions), stream, blocks)
    for place in tl.static_range(4):
        tl.store(out + tl.arange(0, 2) * 4 + place, words[place])


@triton.jit
def noise_kernel(out, words):
    places = tl.arange(0, 4)
    tl.store(out + places, noise_of(tl.load(words + places)))


def parameters(rows, dtype=torch.int64):
    """Return seeds and positions as the kernel takes them."""
    seeds, positions = zip(*rows, strict=True)
    return torch.tensor([seed_bits(seed) for seed in seeds]), torch.tensor(positions, dtype=dtype)


def drawn(rows, vocab_size, stream=NoiseStream.CHOICE, dtype=torch.int64):
    """Return the kernel's noise for rows of (seed, position)."""
    out = torch.full((len(rows), vocab_size), torch.nan)
    by_triton(out, *parameters(rows, dtype), stream)
    return out


def assert_noise(out, rows, stream=NoiseStream.CHOICE):
    for row, (seed, position) in zip(out, rows, strict=True):
        expected = gumbel(seed, position, len(row), stream)
        np.testing.assert_array_max_ulp(row.numpy(), expected.numpy(), maxulp=1)


def assert_words(seed, position, stream, first_block=0):
    out = torch.zeros(8, dtype=torch.uint64)
    words_kernel[1,](out, *parameters([(seed, position)]), stream, first_block)
    generator = random_generator(seed, position, stream).bit_generator
    generator.advance(first_block)
    np.testing.assert_array_equal(out.numpy(), generator.random_raw(8))


@pytest.mark.parametrize("stream", NoiseStream)
def test_random_bits_are_those_of_numpy(stream):
    for seed, position in BOTH:
        assert_words(seed, position, stream)


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1), st.sampled_from(NoiseStream), INTEGERS)
def test_random_bits_are_those_of_numpy_anywhere(seed, position, stream, first_block):
    assert_words(seed, position, stream, first_block)


def test_noise_is_finite_for_any_bits():
    words = torch.tensor([0, 2**11 - 1, 2**11, 2**64 - 1], dtype=torch.uint64)
    out = torch.empty(4)
    noise_kernel[1,](out, words)
    uniform = np.array([2.0**-60, 2.0**-60, 2.0**-53, 1 - 2.0**-53])
    np.testing.assert_array_max_ulp(out.numpy(), -np.log(-np.log(uniform)).astype(np.float32), maxulp=1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("stream", NoiseStream)
def test_each_row_has_the_noise_of_its_seed_and_position(stream, dtype):
    assert_noise(drawn(BOTH, 5, stream, dtype), BOTH, stream)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 1000, 1024, 2048, 2051])
def test_noise_of_any_vocabulary(vocab_size):
    assert_noise(drawn(BOTH[-2:], vocab_size), BOTH[-2:])


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=3),
    st.integers(1, 1100),
    st.sampled_from(NoiseStream),
)
def test_noise_is_that_of_the_cpu(rows, vocab_size, stream):
    assert_noise(drawn(rows, vocab_size, stream, torch.int32), rows, stream)


def test_noise_does_not_depend_on_the_vocabulary_size():
    wide = drawn(BOTH[:1], 2500)
    for vocab_size in (1, 6, 1023, 1025, 2049):
        assert torch.equal(drawn(BOTH[:1], vocab_size), wide[:, :vocab_size])


def test_nothing_is_written_beside_the_rows():
    wide = torch.zeros(3, 12)
    by_triton(wide[:, 1:8], *parameters(BOTH[4:7]), NoiseStream.DRAFT)
    assert_noise(wide[:, 1:8], BOTH[4:7], NoiseStream.DRAFT)
    assert wide[:, 0].eq(0).all()
    assert wide[:, 8:].eq(0).all()


def test_it_runs_without_storage_and_under_fake_tensors():
    out = torch.empty(2, 9, device="meta")
    fill_noise(
        out, torch.empty(2, dtype=torch.int64, device="meta"), torch.empty(2, dtype=torch.int32, device="meta"), 0
    )
    with FakeTensorMode():
        fill_noise(torch.empty(2, 9), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), 0)


def test_the_operation_mutates_its_output_and_nothing_else():
    arguments = (torch.zeros(2, 9), *parameters(BOTH[:2]), 0)
    torch.library.opcheck(torch.ops.dynatree.fill_noise, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out": torch.zeros(2, 4, dtype=torch.float64)}, "out is torch.float64"),
        ({"out": torch.zeros(8)}, "out is "),
        ({"out": torch.zeros(4, 2).T}, r"out is .* with strides \[1, 2\]"),
        ({"seeds": torch.zeros(2)}, "seeds is torch.float32"),
        ({"seeds": torch.zeros(2, dtype=torch.int32)}, "seeds is torch.int32"),
        ({"seeds": torch.zeros(3, dtype=torch.int64)}, r"seeds is torch.int64 \[3\] .* \[2\]"),
        ({"positions": torch.zeros(2)}, "positions is torch.float32 .* torch.int32 or torch.int64"),
        ({"positions": torch.zeros(1, dtype=torch.int64)}, r"positions is torch.int64 \[1\]"),
        ({"positions": torch.zeros(4, dtype=torch.int64)[::2]}, r"positions is .* with strides \[2\]"),
    ],
)
def test_other_tensors_are_refused(changed, message):
    integers = torch.zeros(2, dtype=torch.int64)
    tensors = {"out": torch.zeros(2, 4), "seeds": integers, "positions": integers} | changed
    with pytest.raises(ValueError, match=message):
        fill_noise(**tensors, stream=0)


@pytest.mark.long
def test_services_start_without_triton():
    """Triton is not installed everywhere."""
    code = "import sys; sys.modules['triton'] = None; import dynatree.verify.serve_verify, dynatree.draft.serve_draft"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_cpu_draws_the_same_rows():
    rows = [*BOTH[:3], BOTH[0]]
    out = torch.full((4, 9), torch.nan)
    fill_noise(out, *parameters(rows), NoiseStream.DRAFT)
    expected = [gumbel(seed, position, 9, NoiseStream.DRAFT) for seed, position in rows]
    assert torch.equal(out, torch.stack(expected))
