"""The rows of forward passes: segments split into pieces that fit, and the buffers of one forward pass.

All inputs of a forward pass are in one int32 buffer, so filling it is a single copy to the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynatree.engine.forward.runner import Choosing
from dynatree.engine.forward.segment import Segment
from dynatree.engine.gpu.tree_attention import BLOCK, RowPlan

LONGEST_PIECE = 256  # upper bound on the rows of a prompt's piece
PATH = BLOCK + LONGEST_PIECE  # upper bound on the slots of a row's own path, unless a tree may be deeper


@dataclass(frozen=True)
class Piece:
    """The tokens of one segment in one forward pass.

    Attributes:
        segment: Index of the segment.
        first: Index of the piece's first token in the segment.
        stop: One past the piece's last token.
        row: Row of the first token in the forward pass.
    """

    segment: int
    first: int
    stop: int
    row: int

    @property
    def rows(self) -> int:
        """Number of rows of the piece."""
        return self.stop - self.first


@dataclass(frozen=True)
class RowSizes:
    """The sizes of one forward pass.

    Attributes:
        rows: Rows of the forward pass.
        tile: Rows of a tile, which never spans two segments.
        segments: Upper bound on the segments of a forward pass.
        path: Upper bound on the slots of a row's own path.
    """

    rows: int
    tile: int
    segments: int
    path: int = PATH

    @property
    def tiles(self) -> int:
        """Upper bound on tiles: a tile never spans two segments."""
        return -(-self.rows // self.tile) + min(self.segments, self.rows)

    def cut(self, segments: Sequence[Segment]) -> Iterator[list[Piece]]:
        """Yield the pieces of each forward pass, in order, so that a token's ancestors come before it or with it.

        A forward pass has at most one piece of a segment, because the blocks that all rows share must already be
        stored.
        """
        pieces: list[Piece] = []
        row = tiles = 0
        for index, segment in enumerate(segments):
            first, size = 0, len(segment.token_ids)
            while first < size:
                room = min(self.rows - row, (self.tiles - tiles) * self.tile)
                if segment.mask is None:
                    room = min(room, LONGEST_PIECE)  # the path of a prompt's last row
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
    """The inputs of one forward pass, on the device; int32 unless noted.

    Attributes:
        token_ids: `[rows]`.
        positions: `[rows]`.
        plan: KV slots that the rows read and write.
        faulty: `[rows]`: `plan.faulty`; filling sets it to 0.
        parents: `[rows]`: row of a drafted token's parent; an undrafted token's own row.
        homes: `[rows]`: slot of a token once it is committed.
        temperatures: `[rows]`, float32.
        seeds: `[rows]`, int64.
        more: Additional buffers of the user, by name.
        more_on_host: Host side of the additional buffers, which the user fills before `send`.
    """

    def __init__(
        self, sizes: RowSizes, scratch: int, device: torch.device, more: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Allocate buffers filled with padding.

        Args:
            sizes: Sizes of the forward pass.
            scratch: Slot of the KV cache for the keys and values of padding, which is never read.
            device: Device that computes the forward pass.
            more: Names and shapes of additional buffers.
        """
        self._sizes = sizes
        self._scratch = scratch
        shapes = {
            "seeds": (sizes.rows, 2),  # first, because it is read as int64 and must be aligned
            "temperatures": (sizes.rows,),
            "parents": (sizes.rows,),
            "homes": (sizes.rows,),
            "token_ids": (sizes.rows,),
            "positions": (sizes.rows,),
            "slots": (sizes.rows,),
            "rows": (sizes.rows, 2),
            "tiles": (sizes.tiles, 4),
            "faulty": (sizes.rows,),
            "paths": (sizes.rows, sizes.path),
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
        self.faulty = held["faulty"]
        self.plan = RowPlan(held["tiles"], held["slots"], held["rows"], held["paths"], self.faulty)
        self.fill((), ())

    def fill(
        self, segments: Sequence[Segment], pieces: Sequence[Piece], choosings: Sequence[Choosing | None] = ()
    ) -> None:
        """Set the contents by one copy to the device, in place, so that captured graphs read them.

        Args:
            segments: Segments of a pass.
            pieces: Pieces of the segments in this forward pass.
            choosings: For each segment, how the device chooses tokens; empty if it chooses none.

        Raises:
            ValueError: A token sees more slots of its segment's mask than a path holds.
        """
        self.stage(segments, pieces, choosings)
        self.send()

    def stage(
        self, segments: Sequence[Segment], pieces: Sequence[Piece], choosings: Sequence[Choosing | None] = ()
    ) -> None:
        """Set the contents on the host only, for a later `send`; see `fill`."""
        self._staged.wait()
        host = self._host
        used = pieces[-1].row + pieces[-1].rows if pieces else 0
        host["tiles"][:] = 0
        host["token_ids"][used:] = 0
        host["positions"][used:] = 0
        host["slots"][used:] = self._scratch
        host["rows"][used:] = 0
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
        """Copy the contents from the host to the device."""
        self._staged.send()

    def on_host(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """Return the host side of a buffer by its name, such as an attribute of `RowPlan`."""
        return self._host[name]

    def _fill_choosing(self, segment: Segment, piece: Piece, choosing: Choosing) -> None:
        host, at = self._host, slice(piece.row, piece.row + piece.rows)
        parents = np.array(choosing.parents[piece.first : piece.stop], dtype=np.int32) - piece.first
        host["parents"][at] = piece.row + np.where(parents < 0, np.arange(piece.rows), parents)
        host["homes"][at] = segment.kv.start + np.array(segment.positions[piece.first : piece.stop], dtype=np.int32)
        host["temperatures"].view(np.float32)[at] = choosing.temperature
        host["seeds"][at] = np.array([choosing.seed], dtype=np.uint64).view(np.int32)

    def _fill_paths(self, segment: Segment, piece: Piece) -> int:
        """Set the own paths of a piece's rows, and return the number of shared blocks before the paths."""
        base, rows = segment.kv.start, piece.rows
        lengths, paths = self._host["rows"][piece.row :, 1], self._host["paths"][piece.row :]
        if segment.mask is None:
            seen = segment.start + piece.first  # slots that all rows of the piece see
            mask = np.tri(rows, dtype=bool)
        else:
            seen = segment.stop - segment.mask.shape[1]
            mask = segment.mask[piece.first : piece.stop].numpy()
        blocks = seen // BLOCK
        common = seen % BLOCK
        counts = mask.sum(1)
        if common + counts.max() > self._sizes.path:
            most = self._sizes.path - common
            raise ValueError(f"a token sees {counts.max()} slots of its segment's mask, expected at most {most}")
        row, column = mask.nonzero()
        place = common + np.arange(len(row)) - (counts.cumsum() - counts)[row]
        paths[:rows, :common] = np.arange(base + blocks * BLOCK, base + seen)
        paths[row, place] = base + seen + column
        self._host["rows"][piece.row : piece.row + rows, 0] = blocks
        lengths[:rows] = common + counts
        return blocks


class Staging:
    """An int32 buffer on the host and its copy on the device; `send` copies without waiting.

    The host buffer is pinned if the device is a GPU.

    Attributes:
        host: Contents to send.
        device: Contents that were sent.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the last copy has finished, so that the host buffer may be filled again."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """Queue a copy to the device after its earlier work."""
        self.device.copy_(self.host, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.device.device))
