"""Engines whose forward passes have a fixed number of rows: the choice of the number, and its batch invariance."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dynatree.engine.device import synchronize
from dynatree.engine.engine import Engine
from dynatree.engine.forward.runner import Choosing
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.engine.gpu.fused_forward import forward_of
from dynatree.engine.gpu.row_runner import RowForward, RowRunner

log = logging.getLogger(__name__)

TARGET_ROWS = (32, 64, 128, 256)  # candidates, of which the GPU's measured costs select one
DRAFT_ROWS = (16, 64, 256)  # a draft needs no equal bits, so each forward pass takes the smallest that fits
NEARLY = 1.05  # a cost within this factor of the cost of the fewest rows counts as equal
_TIMES = 5
_PREFIX = 70  # tokens, so that the tree begins in the second block of keys
_CHAIN = 12  # tokens of the compared path


def with_fixed_rows(engine: Engine, counts: Sequence[int], sessions: int, longest: int, decides: bool = True) -> Engine:
    """Return the engine with forward passes of these numbers of rows.

    With a single number, `batch_invariant` is set if a test shows that the device computes batch-invariant bits.

    Args:
        engine: Engine without open sessions.
        counts: Numbers of rows.
        sessions: Number of sessions open at once.
        longest: KV slots of the longest session.
        decides: Whether the device chooses tokens, as for a target.
    """
    runner = _runner(engine, counts, sessions, longest, decides)
    fixed = replace(engine, runner=runner, batch_invariant=False, most_rows=max(counts))
    if not decides:
        with torch.inference_mode():
            return replace(fixed, level_runner=runner.level_runner(sessions))
    fixed = replace(fixed, decider=runner)
    return replace(fixed, batch_invariant=len(counts) == 1 and gives_equal_bits(fixed, counts[0]))


def with_default_rows(engine: Engine, sessions: int, longest: int) -> Engine:
    """Return a target's engine with the most fixed rows that cost about the same as the fewest and are batch-invariant.

    If no number of rows is batch-invariant, the largest cheap number is taken. A tree with more rows takes several
    forward passes.
    """
    forwards = _runner(engine, TARGET_ROWS, sessions, longest, decides=False).forwards
    seconds = {each.sizes.rows: _seconds(each, engine) for each in forwards}
    measured = ", ".join(f"{rows} rows {1000 * each:.2f} ms" for rows, each in seconds.items())
    cheap = [rows for rows, each in seconds.items() if each <= NEARLY * seconds[TARGET_ROWS[0]]]
    del forwards  # frees their memory
    fixed = None
    for count in reversed(cheap):
        tried = with_fixed_rows(engine, (count,), sessions, longest)
        if tried.batch_invariant:
            log.info("%s: forward passes have %d rows and are batch-invariant (%s)", engine.info.name, count, measured)
            return tried
        fixed = fixed or tried
    assert fixed is not None, "the fewest rows cost what they cost"
    log.warning(
        "%s: forward passes of %d rows, and of fewer, are not batch-invariant (%s)",
        engine.info.name,
        cheap[-1],
        measured,
    )
    return fixed


def _runner(engine: Engine, counts: Sequence[int], sessions: int, longest: int, decides: bool) -> RowRunner:
    heads: int = engine.model.config.get_text_config().num_attention_heads
    with torch.inference_mode():
        return RowRunner(
            forward_of(engine.model, engine.kv_cache.shape),
            engine.kv_cache,
            counts,
            sessions,
            longest,
            heads,
            decides,
        )


@torch.inference_mode()
def _seconds(forward: RowForward, engine: Engine) -> float:
    """Return the least seconds of a few full forward passes behind half a context."""
    context = engine.info.context_length // 2
    rows = min(forward.sizes.rows, engine.info.context_length - context)
    kv = engine.kv_cache.reserve(context + rows)
    assert kv is not None, "measured before any session is open"
    segment = Segment(kv, context, [0] * rows, range(context, context + rows), mask=torch.eye(rows, dtype=torch.bool))
    [pieces] = forward.sizes.cut([segment])
    forward.buffers.fill([segment], pieces)
    taken = []
    for _ in range(_TIMES):
        synchronize(engine.kv_cache.device)
        started = time.perf_counter()
        forward.run()
        synchronize(engine.kv_cache.device)
        taken.append(time.perf_counter() - started)
    engine.kv_cache.release(kv)
    return min(taken)


def gives_equal_bits(engine: Engine, rows: int) -> bool:
    """Whether a chain of tokens has the same bits one by one and as a branch of a tree beside another session.

    The test compares logits, keys and values, and the logits of a forward pass with the decision after it. One by one,
    each token has the first row of a forward pass. In the tree, the chain follows another branch and the other session,
    so it has the last rows of a forward pass of `rows`.
    """
    vocab = engine.info.vocab_size
    # a model may have a short context
    prefix = min(_PREFIX, engine.info.context_length // 2)
    chain = min(_CHAIN, engine.info.context_length - prefix - 1)
    tokens = [(7 * place + 3) % vocab for place in range(prefix + chain)]
    before = min(max(rows - 2 * chain + 1, 1), engine.info.context_length)  # rows of the other session
    kv, other = engine.kv_cache.reserve(prefix + 2 * chain), engine.kv_cache.reserve(before)
    if kv is None or other is None:
        for each in (kv, other):
            if each is not None:
                engine.kv_cache.release(each)
        return False
    try:
        engine.forward([Segment(kv, 0, tokens[:prefix], range(prefix), keep=[])])
        plain = [
            engine.forward([Segment(kv, place, [tokens[place]], [place])])[0] for place in range(prefix, prefix + chain)
        ]
        held = engine.kv_cache.slots(kv, prefix + chain)[:, :, :, prefix:].clone()
        tree, positions, mask = _branches(tokens[prefix:], prefix, vocab)
        beside = Segment(other, 0, [tokens[place % prefix] for place in range(before)], range(before), keep=[])
        inside = engine.forward([beside, Segment(kv, prefix, tree, positions, mask=mask)])[1]
        places = [0, *range(chain, 2 * chain - 1)]  # places of the chain's tokens in the tree
        slots = torch.tensor([prefix + place for place in places], device=engine.kv_cache.device)
        in_tree = engine.kv_cache.slots(kv, prefix + 2 * chain).index_select(3, slots)
        common = min(before, prefix)
        prompts = (engine.kv_cache.slots(each, common) for each in (other, kv))
        for temperature in (0.0, 1.0):
            choosing = Choosing([-1] * len(tree), temperature)
            decided = engine.decide([Segment(kv, prefix, tree, positions, mask=mask)], [choosing])
            if decided is not None and not torch.equal(decided[0][0], inside):
                return False
        return torch.equal(*prompts) and torch.equal(torch.cat(plain), inside[places]) and torch.equal(held, in_tree)
    finally:
        engine.kv_cache.release(kv)
        engine.kv_cache.release(other)


def _branches(chain: Sequence[int], root: int, vocab: int) -> tuple[list[int], list[int], Tensor]:
    """Make a tree of two branches below the chain's first token: a different branch, then the rest of the chain."""
    size = len(chain)
    other = [(token + 1) % vocab for token in chain[1:]]
    parents = [-1, *range(size - 2), -1, *range(size - 1, 2 * size - 3)]
    positions = [root, *range(root + 1, root + size), *range(root + 1, root + size)]
    return [*chain[:1], *other, *chain[1:]], positions, ancestor_mask(parents)
