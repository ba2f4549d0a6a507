"""The rows of forwards: segments cut into pieces of a fixed number of rows, and the buffers that hold one of them.

Every number that a forward depends on is in one buffer of int32, so a fill is one copy to the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynatree.common.engine.gpu.tree_attention import BLOCK, RowPlan
from dynatree.common.engine.runner import Choosing
from dynatree.common.engine.segment import Segment

LONGEST_TREE = 256  # nodes, one below the other, of the deepest tree
PATH = BLOCK + LONGEST_TREE  # slots of a row's own path at most


@dataclass(frozen=True)
class Piece:
    """Rows of one segment that go through one forward.

    Attributes:
        segment: The segment's index.
        first: The first of its tokens.
        stop: One past the last.
        row: The forward's row of the first.
    """

    segment: int
    first: int
    stop: int
    row: int

    @property
    def rows(self) -> int:
        """Their number."""
        return self.stop - self.first


@dataclass(frozen=True)
class RowSizes:
    """How much one forward takes.

    Attributes:
        rows: Of the forward.
        tile: Rows of a tile, which are of one segment.
        segments: At most, of a forward.
    """

    rows: int
    tile: int
    segments: int

    @property
    def tiles(self) -> int:
        """At most so many: each segment begins one of its own."""
        return -(-self.rows // self.tile) + min(self.segments, self.rows)

    def cut(self, segments: Sequence[Segment]) -> Iterator[list[Piece]]:
        """The pieces of each forward, in order: a token's ancestors go before it, or with it.

        A segment has one piece of a forward, since blocks that all rows see must be stored before it.
        """
        pieces: list[Piece] = []
        row = tiles = 0
        for index, segment in enumerate(segments):
            first, size = 0, len(segment.token_ids)
            while first < size:
                room = min(self.rows - row, (self.tiles - tiles) * self.tile)
                if segment.mask is None:
                    room = min(room, LONGEST_TREE)  # the path of a prompt's last row
                if room > 0:
                    stop = min(first + room, size)
                    pieces.append(Piece(index, first, stop, row))
                    row += stop - first
                    tiles += -(-(stop - first) // self.tile)
                    first = stop
                if first < size:
                    yield pieces
                    pieces, row, tiles = [], 0, 0
        if pieces:
            yield pieces


class RowBuffers:
    """What one forward reads, on the device.

    Attributes:
        token_ids: `[rows]`, int32, as all of them.
        positions: `[rows]`.
        plan: Where the rows find their keys.
        parents: `[rows]`: of a drafted token its parent's row, of any other its own.
        homes: `[rows]`: the slot that a token has once it is committed.
        temperatures: `[rows]`, float32.
        seeds: `[rows]`, int64.
        more: What a user of the buffers adds to them, by name.
        more_on_host: Where the user fills that in, before `fill`.
    """

    def __init__(
        self, sizes: RowSizes, scratch: int, device: torch.device, more: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Buffers of padding.

        Args:
            sizes: Of the forward.
            scratch: A slot of the arena that nobody reads: padding is stored there.
            device: That computes the forward.
            more: Names and shapes of what goes to the device beside it.
        """
        self._sizes = sizes
        self._scratch = scratch
        shapes = {
            "seeds": (sizes.rows, 2),  # first, since it is read as int64
            "temperatures": (sizes.rows,),
            "parents": (sizes.rows,),
            "homes": (sizes.rows,),
            "token_ids": (sizes.rows,),
            "positions": (sizes.rows,),
            "slots": (sizes.rows,),
            "rows": (sizes.rows, 2),
            "tiles": (sizes.tiles, 4),
            "paths": (sizes.rows, PATH),
            **(more or {}),
        }
        size = sum(map(math.prod, shapes.values()))
        self._staged = Staging(size, device)
        at, held = 0, {}
        self._host: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int32]]] = {}
        for name, shape in shapes.items():
            span = slice(at, at + math.prod(shape))
            held[name] = self._staged.device[span].view(shape)
            self._host[name] = self._staged.host.numpy()[span].reshape(shape)
            at = span.stop
        self.token_ids, self.positions = held["token_ids"], held["positions"]
        self.parents, self.homes = held["parents"], held["homes"]
        self.temperatures = held["temperatures"].view(torch.float32)
        self.seeds = held["seeds"].view(torch.int64)[:, 0]
        self.more = {name: held[name] for name in more or {}}
        self.more_on_host = {name: self._host[name] for name in more or {}}
        self.plan = RowPlan(held["tiles"], held["slots"], held["rows"], held["paths"])
        self.fill((), ())

    def fill(
        self, segments: Sequence[Segment], pieces: Sequence[Piece], choosings: Sequence[Choosing | None] = ()
    ) -> None:
        """Set the contents by one copy to the device; the buffers stay where captured graphs read them.

        Args:
            segments: Of a pass.
            pieces: Of them, what goes through this forward.
            choosings: Of each segment how the device chooses, or none for all.

        Raises:
            ValueError: A token sees more of its segment's mask than a path holds.
        """
        self.stage(segments, pieces, choosings)
        self.send()

    def stage(
        self, segments: Sequence[Segment], pieces: Sequence[Piece], choosings: Sequence[Choosing | None] = ()
    ) -> None:
        """Set the contents on the host, for `send`; as `fill`."""
        self._staged.wait()
        host = self._host
        used = pieces[-1].row + pieces[-1].rows if pieces else 0
        host["tiles"][:] = 0
        host["token_ids"][used:] = 0
        host["positions"][used:] = 0
        host["slots"][used:] = self._scratch
        host["rows"][used:] = (0, 1)
        host["paths"][used:, 0] = self._scratch
        host["parents"][:] = np.arange(self._sizes.rows)
        host["temperatures"][:] = 0
        tile = 0
        for piece in pieces:
            segment, at = segments[piece.segment], slice(piece.row, piece.row + piece.rows)
            base, start = segment.kv.start, segment.start + piece.first
            host["token_ids"][at] = segment.token_ids[piece.first : piece.stop]
            host["positions"][at] = segment.positions[piece.first : piece.stop]
            host["slots"][at] = range(base + start, base + start + piece.rows)
            blocks = self._fill_paths(segment, piece)
            for first in range(piece.row, piece.row + piece.rows, self._sizes.tile):
                rows = min(self._sizes.tile, piece.row + piece.rows - first)
                host["tiles"][tile] = (first, rows, base, blocks)
                tile += 1
            if choosings and (choosing := choosings[piece.segment]) is not None:
                self._fill_choosing(segment, piece, choosing)

    def send(self) -> None:
        """Copy to the device what was set on the host."""
        self._staged.send()

    def on_host(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """What was set on the host, by its name in `RowPlan`."""
        return self._host[name]

    def _fill_choosing(self, segment: Segment, piece: Piece, choosing: Choosing) -> None:
        host, at = self._host, slice(piece.row, piece.row + piece.rows)
        parents = np.array(choosing.parents[piece.first : piece.stop], dtype=np.int32) - piece.first
        host["parents"][at] = piece.row + np.where(parents < 0, np.arange(piece.rows), parents)
        host["homes"][at] = segment.kv.start + np.array(segment.positions[piece.first : piece.stop], dtype=np.int32)
        host["temperatures"].view(np.float32)[at] = choosing.temperature
        host["seeds"][at] = np.array([choosing.seed], dtype=np.uint64).view(np.int32)

    def _fill_paths(self, segment: Segment, piece: Piece) -> int:
        """Set the own paths of a piece's rows; returns the blocks before them, which all see."""
        base, rows = segment.kv.start, piece.rows
        lengths, paths = self._host["rows"][piece.row :, 1], self._host["paths"][piece.row :]
        if segment.mask is None:
            seen = segment.start + piece.first  # slots that all rows of the piece see
            mask = _causal(rows)
        else:
            seen = segment.stop - segment.mask.shape[1]
            mask = segment.mask[piece.first : piece.stop].numpy()
        blocks = seen // BLOCK
        common = seen % BLOCK
        counts = mask.sum(1)
        if common + counts.max() > PATH:
            raise ValueError(f"a token sees {counts.max()} slots of its segment's mask, at most {PATH - common} can be")
        row, column = mask.nonzero()
        place = common + np.arange(len(row)) - (counts.cumsum() - counts)[row]
        paths[:rows, :common] = np.arange(base + blocks * BLOCK, base + seen)
        paths[row, place] = base + seen + column
        self._host["rows"][piece.row : piece.row + rows, 0] = blocks
        lengths[:rows] = common + counts
        return blocks


class Staging:
    """A buffer of int32 on the host, and its twin on the device; `send` copies without waiting.

    On a GPU the host's is pinned.

    Attributes:
        host: What is to be sent.
        device: What was sent.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until what was sent last has left the host's buffer, so that it may be filled again."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """Copy, behind what was asked of the device before."""
        self.device.copy_(self.host, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.device.device))


def _causal(rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return np.tri(rows, dtype=bool)
