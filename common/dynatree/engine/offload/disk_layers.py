"""Reads offloaded layers from the disk, at least one layer ahead of the computation."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import torch

from dynatree.common.errors import DeviceFailedError, StartupError
from dynatree.engine.forward.layer_source import SLOTS, LayerSource
from dynatree.engine.model.tokenizer import first_line
from dynatree.engine.offload.layer_file import PAGE, PIECE, LayerFile, named, remedy, sum_of

log = logging.getLogger(__name__)

_READERS = 4  # threads that read pieces of one layer
_SLOW = 10.0  # seconds of waiting for a layer after which a warning is logged


class OffloadError(DeviceFailedError):
    """A layer's file cannot be read, or differs from the file that was written."""


class _HarmedError(Exception):
    """A file differs from the file that was written; the message says how."""


class DiskLayers(LayerSource):
    """Reads layers from the disk into slots in memory.

    Attributes:
        read_bytes: Bytes read so far.
        read_seconds: Time spent reading them.
        read_cpu_seconds: CPU time spent reading and comparing them.
    """

    def __init__(self, files: Sequence[LayerFile], slots: int = SLOTS) -> None:
        """Start reading.

        Args:
            files: Files of the layers, in their order.
            slots: Number of layers in memory.
        """
        self._files = files
        size = max(each.size for each in files)
        self._memory = [_slot(size) for _ in range(min(slots, len(files)))]
        super().__init__(
            sum(each.size for each in files), [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._memory]
        )
        self._changed = threading.Condition()
        self._held: list[int | None] = [None] * len(self._memory)  # the layer that each slot holds
        self._next = 0  # the layer that is read next
        self._turn = 0  # counts the restarts of reading
        self._error: Exception | None = None
        self._closed = False
        self.read_bytes = 0
        self.read_seconds = 0.0
        self.read_cpu_seconds = 0.0
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="layer-reader")
        self._thread = threading.Thread(target=self._run, name="layer-source", daemon=True)
        self._thread.start()

    def wait(self, layer: int) -> None:
        """Wait until a layer is in memory.

        Raises:
            OffloadError: The layer cannot be read, and a retry fails too.
        """
        slot, file = layer % len(self._held), self._files[layer]
        if self._paused:
            return
        with self._changed:
            if self._held[slot] == layer:
                return
            # a forward pass was aborted, or reading ahead failed
            if self._held[slot] is not None or self._next != layer or self._error is not None:
                self._restart(layer)
            waited, again = 0.0, True
            while self._held[slot] != layer:
                if self._error is not None:
                    if not again:
                        raise OffloadError(str(self._error)) from self._error
                    again = False
                    self._restart(layer)
                elif not self._changed.wait(_SLOW):
                    waited += _SLOW
                    log.warning("reading %s has taken %.0f s; the disk is slow", named(file.path), waited)

    def release(self, layer: int) -> None:
        """Free the slot of a computed layer for the next read."""
        with self._changed:
            if self._held[layer % len(self._held)] == layer and not self._paused:
                self._held[layer % len(self._held)] = None
            self._changed.notify_all()

    @property
    def sweep_seconds(self) -> float:
        """Seconds to read all layers, estimated from the reads so far."""
        return self.bytes * self.read_seconds / self.read_bytes if self.read_bytes else 0.0

    @property
    def sweep_cpu_seconds(self) -> float:
        """CPU seconds that reading all layers takes away from concurrent computation."""
        return self.bytes * self.read_cpu_seconds / self.read_bytes if self.read_bytes else 0.0

    def check(self) -> None:
        """Read every layer once, which compares it with the checksums of the written file.

        Raises:
            StartupError: A file cannot be read, or differs from the file that was written.
        """
        try:
            for layer in range(len(self._files)):
                self.wait(layer)
                self.release(layer)
        except OffloadError as error:
            raise StartupError(str(error)) from error

    def close(self) -> None:
        """Stop reading and end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._pool.shutdown()

    def _restart(self, layer: int) -> None:
        if self._error is not None:
            log.warning("reading again after an error: %s", self._error)
        self._held = [None] * len(self._held)
        self._next = layer
        self._error = None
        self._turn += 1
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (
                    self._error is not None or self._held[self._next % len(self._held)] is not None
                ):
                    self._changed.wait()
                if self._closed:
                    return
                layer, turn = self._next, self._turn
            error = self._read(layer)
            with self._changed:
                if turn == self._turn:
                    if error is None:
                        self._held[layer % len(self._held)] = layer
                        self._next = (layer + 1) % len(self._files)
                    else:
                        self._error = error
                self._changed.notify_all()

    def _read(self, layer: int) -> Exception | None:
        """Read a layer into its slot; return the error, if any."""
        file, memory = self._files[layer], self._memory[layer % len(self._memory)]
        began = time.perf_counter()
        try:
            descriptor = _open(file.path)
            try:
                pieces = [
                    self._pool.submit(_read_piece, descriptor, memory, start, min(start + PIECE, file.size), expected)
                    for start, expected in zip(range(0, file.size, PIECE), file.sums, strict=True)
                ]
                wait(pieces)  # even if one fails: none may use the slot or descriptor afterwards
            finally:
                os.close(descriptor)
            cpu_seconds = sum(piece.result() for piece in pieces)
        except _HarmedError as error:
            return OSError(f"{named(file.path)} {error}; {remedy(file.path)}")
        except Exception as error:  # any error must reach the threads that wait for the layer
            why = getattr(error, "strerror", None) or first_line(error)
            return OSError(f"{named(file.path)} cannot be read: {why}")
        self.read_bytes += file.size
        self.read_seconds += time.perf_counter() - began
        self.read_cpu_seconds += cpu_seconds
        return None


def _slot(size: int) -> mmap.mmap:
    """Return memory in huge pages, if there are any. Linux may lose a read past the page cache that a fork shares."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
    return memory


def _open(path: Path) -> int:
    """Open a file for reads that bypass the page cache, which a model larger than the memory would only evict."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        return os.open(path, os.O_RDONLY)  # the file system does not support O_DIRECT


def _read_piece(descriptor: int, memory: mmap.mmap, start: int, stop: int, expected: int) -> float:
    """Read a piece and compare its checksum; return the CPU seconds that it took."""
    view, begin, began = memoryview(memory), start, time.thread_time()
    while start < stop:
        count = os.preadv(descriptor, [view[start:stop]], start)
        if count == 0:
            raise _HarmedError("is cut short")
        start += count
        if start < stop and start % PAGE:
            raise _HarmedError("was read in part")
    if sum_of(view[begin:stop]) != expected:
        raise _HarmedError("differs from the layer that was written")
    return time.thread_time() - began
