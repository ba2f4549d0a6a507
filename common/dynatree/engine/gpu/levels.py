"""Computes several levels of draft trees on the device, one below the other, without returning to the host.

Each level takes the continuations of the level above with the highest path probabilities, as in EAGLE-2 (Li et al.
2024, section 4.1), and computes their logits. The host receives the results of all levels in one copy. It grows its
trees from them as from its own forward passes, so the tree of a policy does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dynatree.engine.device import synchronize
from dynatree.engine.forward.level_runner import KVMove, LevelRead, LevelsWanted, NodesRead, SegmentRead
from dynatree.engine.gpu.decisions import rank
from dynatree.engine.gpu.fused_forward import RowsForward
from dynatree.engine.gpu.graphs import GraphPool, Replayed
from dynatree.engine.gpu.rows import RowBuffers, RowSizes
from dynatree.engine.gpu.tree_attention import RowAttention, RowPlan
from dynatree.engine.kv.kv_cache import KVCache

WIDTH = 8
BREADTH = 16
LEVELS = (2, 4, 8)
ROWS = 32  # rows of one session's first level: tokens not prefilled yet, the root, and n-grams
TOGETHER = 8  # sessions of one call
MOVES = 128  # KV slots that one call can move after commits


@dataclass(frozen=True)
class LevelSizes:
    """The sizes of one call.

    Attributes:
        sessions: Upper bound on the sessions.
        width: Nodes of a session in each level below the first.
        breadth: Number of continuations returned for each node; at least `width`.
        levels: Number of levels below the first one, which is given.
    """

    sessions: int
    width: int
    breadth: int
    levels: int

    @property
    def slots(self) -> int:
        """KV slots that a session needs below its first level."""
        return self.width * self.levels


class Levels:
    """Computes given nodes and the levels below their roots, by a captured graph if there is a pool.

    Args:
        forward: The draft's forward pass.
        kv_cache: KV cache that stores keys and values, with a spare slot beyond its ranges.
        rows: Sizes of the first level of all sessions.
        sizes: Sizes of the levels below.
        longest: KV slots of the longest session.
        pool: See `Replayed`.
    """

    def __init__(
        self,
        forward: RowsForward,
        kv_cache: KVCache,
        rows: RowSizes,
        sizes: LevelSizes,
        longest: int,
        pool: GraphPool | None,
    ) -> None:
        below = sizes.sessions * sizes.width
        tiles = -(-sizes.width // rows.tile)
        self.rows, self.sizes = rows, sizes
        self._buffers = RowBuffers(
            rows,
            kv_cache.size,
            kv_cache.device,
            {
                "roots": (sizes.sessions,),  # row of each session's root
                "limits": (rows.rows,),  # number of tokens that may be proposed
                "rows_below": (below, 2),  # `RowPlan.rows` with the root's values
                "tiles_below": (sizes.sessions * tiles, 4),
                "slots_below": (sizes.levels, below),
                "moves": (2, MOVES),  # source slots, destination slots
            },
        )
        self._forward, self._kv_cache, self._longest = forward, kv_cache, longest
        self._steps = [
            torch.tensor([0, level], dtype=torch.int32, device=kv_cache.device) for level in range(1, sizes.levels + 1)
        ]
        self._first = torch.arange(sizes.sessions, device=kv_cache.device)[:, None]
        each = 2 * sizes.breadth
        self._told = torch.zeros(
            rows.rows * each + sizes.levels * below * (2 + each),
            dtype=torch.int32,
            pin_memory=kv_cache.device.type == "cuda",
        )
        self._read = Replayed(self._all_levels, pool)

    def read(self, wanted: Sequence[LevelsWanted], moves: Sequence[KVMove]) -> list[SegmentRead]:
        """Move at most `MOVES` slots, then compute the wanted levels; return one result for each session."""
        sizes, host = self.sizes, self._buffers.more_on_host
        segments = [each.segment for each in wanted]
        [pieces] = self.rows.cut(segments)
        self._buffers.stage(segments, pieces, [each.choosing for each in wanted])
        host["roots"][:] = 0
        host["limits"][:] = 1
        host["rows_below"][:] = 0
        host["tiles_below"][:] = 0
        host["slots_below"][:] = self._kv_cache.size
        host["moves"][:] = self._kv_cache.size
        at = 0
        for move in moves:
            stop = at + len(move.sources)
            host["moves"][0, at:stop] = np.array(move.sources, dtype=np.int32) + move.kv.start
            host["moves"][1, at:stop] = np.arange(len(move.sources)) + move.kv.start + move.start
            at = stop
        starts = range(0, sizes.width, self.rows.tile)  # first node of each tile of a session
        for place, (each, piece) in enumerate(zip(wanted, pieces, strict=True)):
            segment, root = each.segment, piece.row + each.root
            blocks, length = self._buffers.on_host("rows")[root]
            host["roots"][place] = root
            host["limits"][piece.row : piece.row + piece.rows] = each.vocab_size
            rows = slice(place * sizes.width, (place + 1) * sizes.width)
            host["rows_below"][rows] = (blocks, length)
            behind = segment.kv.start + segment.stop
            slots = np.arange(behind, behind + sizes.slots)
            host["slots_below"][:, rows] = slots.reshape(sizes.levels, sizes.width)
            for tile, start in enumerate(starts, start=place * len(starts)):
                count = min(self.rows.tile, sizes.width - start)
                host["tiles_below"][tile] = (rows.start + start, count, segment.kv.start, blocks)
        self._buffers.send()
        self._told.copy_(self._read(), non_blocking=True)
        synchronize(self._kv_cache.device)
        return self._unpacked([(piece.row, piece.rows) for piece in pieces])

    def _all_levels(self) -> Tensor:
        """Compute all levels and return their results packed as int32."""
        sizes, buffers, more = self.sizes, self._buffers, self._buffers.more
        sources, destinations = more["moves"]
        data = self._kv_cache.data
        # index_select copies first, so no slot is overwritten before it is copied
        data.index_copy_(3, destinations.long(), data.index_select(3, sources))
        roots = more["roots"].long()
        given = (buffers.temperatures, buffers.seeds, more["limits"], buffers.positions)
        ids, chances = self._ranked(buffers.token_ids, buffers.plan, *given)
        told = [ids, chances]
        ids, chances = ids[roots], chances[roots]  # [sessions, breadth]
        temperatures, seeds, limits, positions = (each[roots].repeat_interleave(sizes.width) for each in given)
        paths = buffers.plan.paths[roots]  # [sessions, path]
        reached = chances.new_zeros(sizes.sessions, 1)  # path log-probabilities of the level above
        for level in range(sizes.levels):
            before = reached.shape[1]
            offered = (reached[:, :, None] + chances.view(sizes.sessions, before, -1)).flatten(1)
            offered = offered.nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # a NaN node gets no children
            reached, best = offered.topk(sizes.width)  # [sessions, width]
            parents = self._first * before + best // sizes.breadth
            tokens = ids.view(sizes.sessions, -1).gather(1, best).flatten()
            rows = more["rows_below"] + self._steps[level]
            slots = more["slots_below"][level]
            paths = paths[parents.flatten()]
            paths = paths.scatter(1, rows[:, 1:].long() - 1, slots[:, None])
            positions = positions + 1
            plan = RowPlan(more["tiles_below"], slots, rows, paths)
            ids, chances = self._ranked(tokens, plan, temperatures, seeds, limits, positions)
            told += [tokens[:, None], best.flatten()[:, None] // sizes.breadth, ids, chances]
        return torch.cat([_as_int32(each).flatten() for each in told])

    def _ranked(
        self,
        token_ids: Tensor,
        plan: RowPlan,
        temperatures: Tensor,
        seeds: Tensor,
        limits: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the best continuations of each row and their log-probabilities; see `rank`."""
        attention = RowAttention(self._kv_cache, plan, self._longest)
        logits = self._forward(token_ids.long()[None], positions.long()[None], attention)
        return rank(logits, limits, temperatures, seeds, positions, self.sizes.breadth)

    def _unpacked(self, spans: Sequence[tuple[int, int]]) -> list[SegmentRead]:
        sizes, breadth = self.sizes, self.sizes.breadth
        told = self._told.numpy()
        first = self.rows.rows * breadth
        ids, chances = told[:first].reshape(-1, breadth), told[first : 2 * first].reshape(-1, breadth)
        given = [
            NodesRead(ids[row : row + rows].copy(), chances[row : row + rows].view(np.float32).copy())
            for row, rows in spans
        ]
        below: list[list[LevelRead]] = [[] for _ in spans]
        at, count = 2 * first, sizes.sessions * sizes.width
        for _ in range(sizes.levels):
            parts = []
            for columns in (1, 1, breadth, breadth):
                parts.append(told[at : at + count * columns].reshape(count, columns))
                at += count * columns
            for place, levels in enumerate(below):
                rows = slice(place * sizes.width, (place + 1) * sizes.width)
                tokens, parents, ids, chances = (part[rows].copy() for part in parts)
                levels.append(LevelRead(ids, chances.view(np.float32), tokens[:, 0], parents[:, 0]))
        return [SegmentRead(each, levels) for each, levels in zip(given, below, strict=True)]


class RowLevelRunner:
    """Computes levels for several sessions with the smallest `Levels` that holds them; implements `LevelRunner`.

    Args:
        forward: The draft's forward pass.
        kv_cache: See `Levels`.
        sessions: Number of sessions open at once.
        tile: Rows of a tile.
        longest: KV slots of the longest session.
        pool: See `Replayed`.
    """

    breadth = BREADTH

    def __init__(
        self, forward: RowsForward, kv_cache: KVCache, sessions: int, tile: int, longest: int, pool: GraphPool | None
    ) -> None:
        self._calls = [
            Levels(
                forward,
                kv_cache,
                RowSizes(ROWS if together == 1 else 4 * ROWS, tile, together),
                LevelSizes(together, WIDTH, BREADTH, levels),
                longest,
                pool,
            )
            for together in sorted({1, min(sessions, TOGETHER)})
            for levels in LEVELS
        ]

    def most(self, levels: int) -> int:
        """See `LevelRunner.most`."""
        return next((each for each in LEVELS if each >= levels), LEVELS[-1])

    def slots(self, levels: int) -> int:
        """See `LevelRunner.slots`."""
        return WIDTH * self.most(levels)

    def read(self, wanted: Sequence[LevelsWanted], levels: int, moves: Sequence[KVMove]) -> list[SegmentRead] | None:
        """See `LevelRunner.read`."""
        if sum(len(each.sources) for each in moves) > MOVES:
            return None
        segments = [each.segment for each in wanted]
        for call in self._calls:
            fits = len(wanted) <= call.sizes.sessions and call.sizes.levels == self.most(levels)
            if fits and len(list(call.rows.cut(segments))) == 1:
                return call.read(wanted, moves)
        return None


def _as_int32(values: Tensor) -> Tensor:
    """Convert integers to int32, and reinterpret the bits of floats as int32."""
    return values.float().view(torch.int32) if values.is_floating_point() else values.to(torch.int32)
