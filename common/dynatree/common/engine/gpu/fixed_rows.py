"""Engines whose forwards have a fixed number of rows: which number, and whether it makes them batch-invariant."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dynatree.common.device import synchronize
from dynatree.common.engine.engine import Engine
from dynatree.common.engine.gpu.fused_forward import forward_of
from dynatree.common.engine.gpu.row_runner import RowForward, RowRunner
from dynatree.common.engine.runner import Choosing
from dynatree.common.engine.segment import Segment
from dynatree.common.engine.tree_mask import ancestor_mask

log = logging.getLogger(__name__)

TARGET_ROWS = (32, 64, 128, 256)  # of which a GPU's costs choose one
DRAFT_ROWS = (16, 64, 256)  # a draft only guesses: the smallest that fits
NEARLY = 1.05  # times the cost of the fewest rows: as good as free
_TIMES = 5
_PREFIX = 70  # tokens, so that the tree begins in the second block of keys
_CHAIN = 12  # tokens of the path that is compared


def with_fixed_rows(engine: Engine, counts: Sequence[int], sessions: int, longest: int, decides: bool = True) -> Engine:
    """The engine with forwards of these numbers of rows.

    With one number it is tried whether the device gives equal bits in any company, and `batch_invariant` says so.

    Args:
        engine: On which no session is open.
        counts: Numbers of rows.
        sessions: Open at once.
        longest: Slots of the longest session.
        decides: Whether choices are made on the device: those of a target.
    """
    runner = _runner(engine, counts, sessions, longest, decides)
    fixed = replace(engine, runner=runner, batch_invariant=False, most_rows=max(counts))
    if not decides:
        with torch.inference_mode():
            return replace(fixed, reader=runner.level_reader(sessions))
    fixed = replace(fixed, decider=runner)
    return replace(fixed, batch_invariant=len(counts) == 1 and gives_equal_bits(fixed, counts[0]))


def with_default_rows(engine: Engine, sessions: int, longest: int) -> Engine:
    """A target's engine with forwards of the most rows that nearly cost what the fewest do, and give equal bits.

    A tree of more rows takes several forwards. Where no number gives equal bits, the most that are as cheap.
    """
    forwards = _runner(engine, TARGET_ROWS, sessions, longest, decides=False).forwards
    seconds = {each.sizes.rows: _seconds(each, engine) for each in forwards}
    measured = ", ".join(f"{rows} rows {1000 * each:.2f} ms" for rows, each in seconds.items())
    cheap = [rows for rows, each in seconds.items() if each <= NEARLY * seconds[TARGET_ROWS[0]]]
    del forwards  # and their memory
    fixed = None
    for count in reversed(cheap):
        tried = with_fixed_rows(engine, (count,), sessions, longest)
        if tried.batch_invariant:
            log.info("%s: forwards of %d rows, which give equal bits (%s)", engine.info.name, count, measured)
            return tried
        fixed = fixed or tried
    assert fixed is not None, "the fewest rows cost what they cost"
    log.warning(
        "%s: a token's bits depend on what is beside it in a forward of %d rows, and of fewer (%s)",
        engine.info.name,
        cheap[-1],
        measured,
    )
    return fixed


def _runner(engine: Engine, counts: Sequence[int], sessions: int, longest: int, decides: bool) -> RowRunner:
    heads: int = engine.model.config.get_text_config().num_attention_heads
    with torch.inference_mode():
        return RowRunner(
            forward_of(engine.model, engine.info.context_length),
            engine.arena,
            counts,
            sessions,
            longest,
            heads,
            decides,
        )


@torch.inference_mode()
def _seconds(forward: RowForward, engine: Engine) -> float:
    """The least seconds of a few forwards that are full of rows, behind half a context."""
    context = engine.info.context_length // 2
    rows = min(forward.sizes.rows, engine.info.context_length - context)
    kv = engine.arena.reserve(context + rows)
    assert kv is not None, "measured before any session is open"
    segment = Segment(kv, context, [0] * rows, range(context, context + rows), mask=torch.eye(rows, dtype=torch.bool))
    [pieces] = forward.sizes.cut([segment])
    forward.buffers.fill([segment], pieces)
    taken = []
    for _ in range(_TIMES):
        synchronize(engine.arena.device)
        started = time.perf_counter()
        forward.run()
        synchronize(engine.arena.device)
        taken.append(time.perf_counter() - started)
    engine.arena.release(kv)
    return min(taken)


def gives_equal_bits(engine: Engine, rows: int) -> bool:
    """Whether a chain of tokens has the same bits one by one, as a branch of a tree, and beside another session.

    Compared are logits, keys and values, and the logits of a forward with the decision after it. Alone each token has a
    forward's first row. In the tree the chain stands behind another branch, and both behind the other session, in the
    last rows of a forward of `rows`.
    """
    vocab = engine.info.vocab_size
    # a model may have little context
    prefix = min(_PREFIX, engine.info.context_length // 2)
    chain = min(_CHAIN, engine.info.context_length - prefix - 1)
    tokens = [(7 * place + 3) % vocab for place in range(prefix + chain)]
    before = min(max(rows - 2 * chain + 1, 1), engine.info.context_length)  # rows of the other session
    kv, other = engine.arena.reserve(prefix + 2 * chain), engine.arena.reserve(before)
    if kv is None or other is None:
        for each in (kv, other):
            if each is not None:
                engine.arena.release(each)
        return False
    try:
        engine.forward([Segment(kv, 0, tokens[:prefix], range(prefix), keep=[])])
        plain = [
            engine.forward([Segment(kv, place, [tokens[place]], [place])])[0] for place in range(prefix, prefix + chain)
        ]
        held = engine.arena.slots(kv, prefix + chain)[:, :, :, prefix:].clone()
        tree, positions, mask = _branches(tokens[prefix:], prefix, vocab)
        beside = Segment(other, 0, [tokens[place % prefix] for place in range(before)], range(before), keep=[])
        inside = engine.forward([beside, Segment(kv, prefix, tree, positions, mask=mask)])[1]
        places = [0, *range(chain, 2 * chain - 1)]  # of the chain, in the tree
        slots = torch.tensor([prefix + place for place in places], device=engine.arena.device)
        in_tree = engine.arena.slots(kv, prefix + 2 * chain).index_select(3, slots)
        common = min(before, prefix)
        prompts = (engine.arena.slots(each, common) for each in (other, kv))
        for temperature in (0.0, 1.0):
            choosing = Choosing([-1] * len(tree), temperature)
            decided = engine.decide([Segment(kv, prefix, tree, positions, mask=mask)], [choosing])
            if decided is not None and not torch.equal(decided[0][0], inside):
                return False
        return torch.equal(*prompts) and torch.equal(torch.cat(plain), inside[places]) and torch.equal(held, in_tree)
    finally:
        engine.arena.release(kv)
        engine.arena.release(other)


def _branches(chain: Sequence[int], root: int, vocab: int) -> tuple[list[int], list[int], Tensor]:
    """A tree of two branches below the chain's first token: another one, then the chain's rest."""
    size = len(chain)
    other = [(token + 1) % vocab for token in chain[1:]]
    parents = [-1, *range(size - 2), -1, *range(size - 1, 2 * size - 3)]
    positions = [root, *range(root + 1, root + size), *range(root + 1, root + size)]
    return [*chain[:1], *other, *chain[1:]], positions, ancestor_mask(parents)
