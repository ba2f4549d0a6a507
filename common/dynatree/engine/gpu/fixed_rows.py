"""Engines whose forward passes have a fixed number of rows: the choice of the number, and its batch invariance."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from dynatree.engine.engine import Engine
from dynatree.engine.forward.runner import Choosing
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.engine.gpu.fused_forward import forward_of
from dynatree.engine.gpu.kept_rows import KeptRows
from dynatree.engine.gpu.row_runner import RowForward, RowRunner
from dynatree.engine.gpu.rows import PATH
from dynatree.engine.gpu.tree_attention import BLOCK

log = logging.getLogger(__name__)

TARGET_ROWS = (32, 64, 96, 128, 256)  # candidates; 96 hold a tree of 64 nodes and its root, which `dyspec` sends
DRAFT_ROWS = (16, 64, 256)  # a draft needs no equal bits, so each forward pass takes the smallest that fits
# A round that costs at most this factor more than with the fewest rows counts as cheap. The default policy's trees have
# 55 nodes on average where rows are free (benchmarks/replay/gpu.json), and with 32 rows some 10 % fewer tokens a round
# are accepted; a target's forward pass is about half of a round. Not measured on a GPU yet.
NEARLY = 1.2
_WARM_UPS = 20  # rounds before the timed ones, because an idle GPU has a low clock
_TIMES = 9
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


def with_default_rows(engine: Engine, sessions: int, longest: int, kept: KeptRows | None = None) -> Engine:
    """Return a target's engine with the most fixed rows that cost about the same as the fewest and are batch-invariant.

    If no number of rows is batch-invariant, the largest cheap number is taken. A tree with more rows takes several
    forward passes. Bits depend on the number, and costs vary from start to start, so the number is kept in a file.

    Args:
        engine: Engine without open sessions.
        sessions: Number of sessions open at once.
        longest: KV slots of the longest session.
        kept: Where the number is kept; None means nowhere.
    """
    with kept.alone() if kept else nullcontext():
        if kept and (rows := kept.read()):
            tried = with_fixed_rows(engine, (rows,), sessions, longest)
            if tried.batch_invariant:
                log.info("%s: forward passes have %d rows, as %s says", engine.info.name, rows, kept.path)
                return tried
            log.warning("%s: %d rows, as %s says, are not batch-invariant here", engine.info.name, rows, kept.path)
            del tried  # frees its memory
        fixed = _chosen(engine, sessions, longest)
        if kept and fixed.batch_invariant:
            assert fixed.most_rows is not None, "the passes have fixed rows"
            kept.write(fixed.most_rows)
        return fixed


def _chosen(engine: Engine, sessions: int, longest: int) -> Engine:
    """Choose a number of rows by measured costs and batch invariance."""
    forwards = _runner(engine, TARGET_ROWS, sessions, longest, decides=True).forwards
    seconds = round_seconds(forwards, engine)
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
    speculative = longest - engine.info.context_length  # slots after the context, and so the deepest tree
    with torch.inference_mode():
        return RowRunner(
            forward_of(engine.model, engine.kv_cache.shape),
            engine.kv_cache,
            counts,
            sessions,
            longest,
            heads,
            decides,
            max(PATH, BLOCK + speculative),
        )


@torch.inference_mode()
def round_seconds(forwards: Sequence[RowForward], engine: Engine) -> dict[int, float]:
    """Return the median seconds of full forward passes with their decisions, after half a context, by their rows.

    The forward passes take turns, so that a clock that rises or falls meanwhile favours none.
    """
    context = engine.info.context_length // 2
    room = engine.info.context_length - context
    kv = engine.kv_cache.reserve(context + min(room, max(each.sizes.rows for each in forwards)))
    assert kv is not None, "measured before any session is open"
    try:
        for each in forwards:
            rows = min(each.sizes.rows, room)
            mask = torch.eye(rows, dtype=torch.bool)
            chain = Segment(kv, context, [0] * rows, range(context, context + rows), mask=mask)
            [pieces] = each.sizes.cut([chain])
            each.buffers.fill([chain], pieces, [Choosing([-1] * rows)])
        taken: dict[int, list[float]] = {each.sizes.rows: [] for each in forwards}
        for _ in range(_WARM_UPS + _TIMES):
            for each in forwards:
                started = time.perf_counter()
                each.decide()  # waits for the device
                taken[each.sizes.rows].append(time.perf_counter() - started)
    finally:
        engine.kv_cache.release(kv)
    return {rows: median(seconds[_WARM_UPS:]) for rows, seconds in taken.items()}


def gives_equal_bits(engine: Engine, rows: int) -> bool:
    """Whether a chain of tokens has the same bits one by one and as a branch of a tree beside another session.

    The test compares logits, keys and values, and the logits of a forward pass with the decision after it. One by one,
    each token has the first row of a forward pass. In the tree, the chain follows another branch. The tree has the
    first, the middle and the last rows of forward passes of `rows`, and the other session those before or after it.
    """
    vocab = engine.info.vocab_size
    # a model may have a short context
    prefix = min(_PREFIX, engine.info.context_length // 2)
    chain = min(_CHAIN, engine.info.context_length - prefix - 1)
    tokens = [(7 * place + 3) % vocab for place in range(prefix + chain)]
    most = min(max(rows - 2 * chain + 1, 1), engine.info.context_length)  # rows of the other session
    kv, other = engine.kv_cache.reserve(prefix + 2 * chain), engine.kv_cache.reserve(most)
    if kv is None or other is None:
        for each in (kv, other):
            if each is not None:
                engine.kv_cache.release(each)
        return False
    try:
        engine.forward([Segment(kv, 0, tokens[:prefix], range(prefix), keep=[])])
        plain = torch.cat(
            [engine.forward([Segment(kv, place, [tokens[place]], [place])])[0] for place in range(prefix, len(tokens))]
        )
        held = engine.kv_cache.slots(kv, prefix + chain)[:, :, :, prefix:].clone()
        ids, positions, mask = _branches(tokens[prefix:], prefix, vocab)
        tree = Segment(kv, prefix, ids, positions, mask=mask)
        places = [0, *range(chain, 2 * chain - 1)]  # places of the chain's tokens in the tree
        slots = torch.tensor([prefix + place for place in places], device=engine.kv_cache.device)
        equal = True
        for before in (most, max(most // 2, 1), 0):
            count = before or most
            beside = Segment(other, 0, [tokens[place % prefix] for place in range(count)], range(count), keep=[])
            inside = engine.forward([beside, tree] if before else [tree, beside])[1 if before else 0]
            in_tree = engine.kv_cache.slots(kv, prefix + 2 * chain).index_select(3, slots)
            common = min(count, prefix)
            prompts = (engine.kv_cache.slots(each, common) for each in (other, kv))
            equal &= torch.equal(*prompts) and torch.equal(plain, inside[places]) and torch.equal(held, in_tree)
        for temperature in (0.0, 1.0):
            decided = engine.decide([tree], [Choosing([-1] * len(ids), temperature)])
            equal &= decided is None or torch.equal(decided[0][0], inside)
        return equal
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
