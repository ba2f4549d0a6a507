"""Tests of torch's attention over segments, against a softmax in float64 over the tokens that each position sees."""

import random

import pytest
import torch

from dynatree.engine.forward.batch import Batch
from dynatree.engine.forward.batch_invariance import KEY_BLOCK
from dynatree.engine.forward.narrowing import narrowed
from dynatree.engine.forward.scores import Scores
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.kv.locality import GLOBAL, Locality

CPU = torch.device("cpu")
LOCALITIES = [*(Locality(window=size) for size in (1, 2, 5, 40)), *(Locality(chunk=size) for size in (1, 4, 7))]


class Drawn:
    """A random tree behind a prefix, of which a segment computes the last nodes.

    Attributes:
        segment: The segment.
        seen: For each token, the slots that it sees without a locality, and the position of each.
    """

    def __init__(self, chooser: random.Random) -> None:
        prefix, nodes = chooser.randint(1, 20), chooser.randint(1, 12)
        paths = [{slot: slot for slot in range(prefix)}]  # position of each slot on a node's path; the root's is first
        for slot in range(prefix, prefix + nodes):
            above = chooser.choice(paths[-4:])
            paths.append(above | {slot: len(above)})
        own = chooser.randint(1, nodes)
        stop = prefix + nodes
        columns = chooser.randint(nodes, stop)  # from a slot of the prefix, or from the first node
        self.seen = paths[-own:]
        positions = [len(path) - 1 for path in self.seen]
        mask = torch.tensor([[slot in path for slot in range(stop - columns, stop)] for path in self.seen])
        self.segment = Segment(KVRange(0, stop), stop - own, [0] * own, positions, mask)


def slots_of(path, position, locality):
    lowest = int(locality.lowest(torch.tensor(position)))
    return [slot for slot, place in path.items() if place >= lowest]


@pytest.mark.parametrize("locality", LOCALITIES, ids=str)
def test_a_token_sees_the_positions_of_its_locality(locality):
    chooser = random.Random(0)
    for _ in range(60):
        drawn = Drawn(chooser)
        mask, lowest = narrowed(drawn.segment, locality)
        before = drawn.segment.stop - mask.shape[1]
        for path, position, row, first in zip(drawn.seen, drawn.segment.positions, mask, lowest.tolist(), strict=True):
            got = [slot for slot in range(before) if slot >= first]
            got += [before + column for column in row.nonzero()[:, 0].tolist()]
            assert got == slots_of(path, position, locality)


def expected(query, keys, values, seen, scores):
    """The output of one token, `[heads, dim]`, over the slots `seen`; query `[heads, dim]`, keys as in the KV cache."""
    groups = query.shape[0] // keys.shape[0]
    keys, values = (each[:, seen].double().repeat_interleave(groups, 0) for each in (keys, values))
    products = (keys @ query.double()[:, :, None])[:, :, 0] * scores.scale
    if scores.cap is not None:
        products = scores.cap * torch.tanh(products / scores.cap)
    weights = products.exp()
    total = weights.sum(1, keepdim=True)
    if scores.sinks is not None:
        total = total + scores.sinks.double()[:, None].exp()
    return ((weights / total)[:, None] @ values)[:, 0]


SCORES = {
    "plain": Scores(0.3),
    "capped": Scores(0.3, cap=2.0),
    "sinks": Scores(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "both": Scores(0.3, cap=2.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scores", SCORES)
def test_each_layer_has_its_own_locality(scores, padded, monkeypatch):
    monkeypatch.setattr("dynatree.engine.forward.batch._MOST_SCORES", 4 * KEY_BLOCK)  # few rows at a time
    dtype = torch.bfloat16 if padded else torch.float32
    tolerance = 0.02 if padded else 1e-5
    localities = (GLOBAL, Locality(window=5), Locality(chunk=7), Locality(window=5))
    kv_cache = KVCache(KVShape(4, 2, 16, localities), 1500, dtype, CPU, read_beyond=KEY_BLOCK)
    generator = torch.Generator().manual_seed(0)
    kv_cache.data.copy_(torch.randn(kv_cache.data.shape, generator=generator))
    drawn = [Drawn(random.Random(seed)) for seed in range(3)]
    for start, each in zip((10, 110, 210), drawn, strict=True):
        each.segment.kv.start = start
    # a prompt's piece that begins in the second block of keys, and a single token
    piece = Segment(KVRange(300, 700), 620, [0] * 9, range(620, 629))
    single = Segment(KVRange(1100, 100), 60, [0], [60])
    segments = [*(each.segment for each in drawn), piece, single]
    seen = [path for each in drawn for path in each.seen]
    seen += [{slot: slot for slot in range(stop)} for stop in (*range(621, 630), 61)]
    batch = Batch(segments, kv_cache, batch_invariant=padded)
    for layer, locality in enumerate(localities):
        query, key, value = (torch.randn(heads, len(seen), 16, generator=generator).to(dtype) for heads in (4, 2, 2))
        got = batch.attend(layer, query, key, value, SCORES[scores])
        token = 0
        for segment in segments:
            keys, values = kv_cache.slots(segment.kv, segment.stop)[layer]
            for position in segment.positions:
                slots = slots_of(seen[token], position, locality)
                right = expected(query[:, token], keys, values, slots, SCORES[scores])
                assert (got[token] - right).abs().max() < tolerance * right.abs().max(), (layer, token)
                token += 1
