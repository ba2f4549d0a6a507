"""The runner of forward passes with a fixed number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynatree.common.sampling import NOT_CHOSEN
from dynatree.engine.device import synchronize
from dynatree.engine.forward.not_finite import spoil
from dynatree.engine.forward.runner import Choosing
from dynatree.engine.forward.segment import Segment
from dynatree.engine.gpu.decisions import FAULTY, decide
from dynatree.engine.gpu.fused_forward import RowsForward
from dynatree.engine.gpu.graphs import GraphPool, Replayed, graph_pool
from dynatree.engine.gpu.levels import RowLevelRunner
from dynatree.engine.gpu.rows import PATH, Piece, RowBuffers, RowSizes
from dynatree.engine.gpu.tree_attention import RowAttention, tile_rows
from dynatree.engine.kv.kv_cache import KVCache


class RowForward:
    """A forward pass with one fixed number of rows, captured with and without the decision after it."""

    def __init__(
        self,
        forward: RowsForward,
        kv_cache: KVCache,
        sizes: RowSizes,
        longest: int,
        pool: GraphPool | None,
        decides: bool,
    ) -> None:
        self.sizes = sizes
        self.buffers = RowBuffers(sizes, kv_cache.size, kv_cache.device)
        self._forward = forward
        self._kv_cache = kv_cache
        self._attention = RowAttention(kv_cache, self.buffers.plan, longest)
        self.run = Replayed(self._logits, pool)
        self._choices = torch.zeros(sizes.rows, dtype=torch.int64, pin_memory=kv_cache.device.type == "cuda")
        self._decision = Replayed(self._decided, pool) if decides else None

    def decide(self) -> tuple[Tensor, list[int]]:
        """Return the logits, which the next forward pass overwrites, and the choices of `decisions.decide`.

        It waits for the device. The keys and values of accepted rows are then in the slots of committed tokens.
        """
        assert self._decision is not None, "only a target decides"
        logits, choices = self._decision()
        self._choices.copy_(choices, non_blocking=True)
        synchronize(self._kv_cache.device)
        return logits, self._choices.tolist()

    def _decided(self) -> tuple[Tensor, Tensor]:
        logits = self._logits()
        return logits, decide(logits, self.buffers, self._kv_cache)

    def _logits(self) -> Tensor:
        """Compute the logits of all rows, `[rows, vocabulary]`."""
        return self._forward(self.buffers.token_ids.long()[None], self.buffers.positions.long()[None], self._attention)


class RowRunner:
    """Runs segments of any size as forward passes with a few fixed numbers of rows, each captured at startup.

    With a single number of rows, a token's logits, keys and values have the same bits regardless of the other tokens in
    the forward pass: every matrix product has the same shape, and attention sums a row's keys in a fixed order. This
    holds on a GPU whose matrix products treat all rows alike, which `benchmarks/gpu/session.sh` measures.

    Args:
        forward: The model's forward pass.
        kv_cache: KV cache that stores keys and values, with a spare slot beyond its ranges.
        counts: Numbers of rows.
        segments: Upper bound on the segments of one forward pass.
        longest: KV slots of the longest session.
        heads: Number of query heads.
        decides: Whether the device chooses tokens, as for a target.
        path: Upper bound on the slots of a row's own path.
    """

    def __init__(
        self,
        forward: RowsForward,
        kv_cache: KVCache,
        counts: Sequence[int],
        segments: int,
        longest: int,
        heads: int,
        decides: bool = True,
        path: int = PATH,
    ) -> None:
        self._pool = pool = graph_pool(kv_cache.device)
        self._tile = tile = tile_rows(heads, kv_cache.shape.kv_heads)
        self._forward, self._kv_cache, self._longest = forward, kv_cache, longest
        self.forwards = [
            RowForward(forward, kv_cache, RowSizes(rows, tile, segments, path), longest, pool, decides)
            for rows in sorted(counts)[::-1]
        ][::-1]  # the largest is captured first, so that smaller ones fit into its memory

    def level_runner(self, sessions: int) -> RowLevelRunner:
        """Make a runner of several tree levels for `sessions` open sessions, with the same forward pass."""
        return RowLevelRunner(self._forward, self._kv_cache, sessions, self._tile, self._longest, self._pool)

    def run(self, segments: Sequence[Segment]) -> list[Tensor]:
        """See `Runner.run`."""
        kept: list[list[Tensor]] = [[] for _ in segments]
        flags: list[Tensor] = []  # of each forward pass; together, of all segments' tokens in order
        largest = self.forwards[-1].sizes
        for pieces in largest.cut(segments):
            forward = self._fitting(pieces)
            forward.buffers.fill(segments, pieces)
            logits = forward.run()
            flags.append(forward.buffers.faulty[: _rows(pieces)].clone())
            for piece in pieces:
                kept[piece.segment].append(_kept(logits, segments[piece.segment], piece).clone())
        split = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in kept]
        spoil(segments, split, [place for place, flag in enumerate(torch.cat(flags).tolist()) if flag])
        return split

    def decide(
        self, segments: Sequence[Segment], choosings: Sequence[Choosing | None]
    ) -> tuple[list[Tensor], list[list[int] | None]] | None:
        """See `Decider.decide`.

        After a token with a non-finite key or value, nothing is chosen, so no tree's path leads to the tokens that see
        it. A range with such a token of a prompt is `broken`, which the caller checks.
        """
        forwards = list(self.forwards[-1].sizes.cut(segments))
        if len(forwards) > 1:
            return None
        [pieces] = forwards
        forward = self._fitting(pieces)
        forward.buffers.fill(segments, pieces, choosings)
        logits, choices = forward.decide()
        kept = [_kept(logits, segments[piece.segment], piece) for piece in pieces]
        spoil(segments, kept, [row for row, choice in enumerate(choices) if choice == FAULTY])
        choices = [NOT_CHOSEN if choice == FAULTY else choice for choice in choices]
        return kept, [
            None if choosing is None else choices[piece.row : piece.row + piece.rows]
            for piece, choosing in zip(pieces, choosings, strict=True)
        ]

    def _fitting(self, pieces: Sequence[Piece]) -> RowForward:
        """Return the smallest forward pass that holds these pieces."""
        rows = _rows(pieces)
        tiles = sum(-(-piece.rows // self.forwards[-1].sizes.tile) for piece in pieces)
        return next(each for each in self.forwards if each.sizes.rows >= rows and each.sizes.tiles >= tiles)


def _rows(pieces: Sequence[Piece]) -> int:
    """Return the number of rows that pieces fill; they lie side by side from the first row on."""
    return pieces[-1].row + pieces[-1].rows


def _kept(logits: Tensor, segment: Segment, piece: Piece) -> Tensor:
    """Return the logits of the tokens of a piece that its segment keeps."""
    offset = piece.row - piece.first
    if segment.keep is None:
        return logits[piece.row : piece.row + piece.rows]
    rows = [index + offset for index in segment.keep if piece.first <= index < piece.stop]
    if not rows:
        return logits[:0]
    if rows == list(range(rows[0], rows[-1] + 1)):
        return logits[rows[0] : rows[-1] + 1]
    return logits[rows]
