"""A kernel that writes Philox's words as they are, for comparing them with numpy's."""

import triton
import triton.language as tl

from dynatree.engine.sampling.noise_kernels import random_words


@triton.jit
def words(out, seeds, positions, stream):
    """The eight uint64 of the first two blocks."""
    blocks = tl.arange(0, 2).to(tl.int64)
    drawn = random_words(tl.load(seeds), tl.load(positions), stream, blocks)
    for place in tl.static_range(4):
        tl.store(out + tl.arange(0, 2) * 4 + place, drawn[place].to(tl.int64, bitcast=True))
