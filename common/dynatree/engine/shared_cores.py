"""How a draft and a verify service on the same cores yield to each other while both compute at once.

With one completion, the draft and the target take turns. With several, trees grow while a pass verifies other trees.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from dynatree.engine.model_thread import ModelThread

_PARALLEL = 1 << 17  # elements enough for torch to add them with more than one thread


class Consideration(Protocol):
    """A measure that applies while cores are shared. The event loop calls `begin` and `end` alternately."""

    def begin(self) -> None:
        """Start the measure: two or more users share the cores from now on."""

    def end(self) -> None:
        """End the measure: at most one user is left."""


class SharedCores:
    """Counts the users of cores that both services compute on."""

    def __init__(self, consideration: Consideration) -> None:
        self._consideration = consideration
        self._sharing = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Count as one user of the cores until the context ends."""
        self._sharing += 1
        if self._sharing == 2:
            self._consideration.begin()
        try:
            yield
        finally:
            self._sharing -= 1
            if self._sharing == 1:
                self._consideration.end()


class ShortWaits:
    """Makes waiting OpenMP threads sleep almost at once instead of spinning.

    Between two operations of a forward pass, OpenMP threads spin until the next one, which is fastest if each has a
    core. If the other service occupies a core, they spin while the thread that they wait for has no core. libgomp
    limits spinning to 1,000 iterations while a process has more OpenMP threads than cores (libgomp's manual,
    GOMP_SPINCOUNT). So this class keeps an idle thread with a second OpenMP team. Other OpenMP libraries are not
    affected.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()

    def begin(self) -> None:
        """Start the idle thread and its team."""
        self._ended = threading.Event()
        threading.Thread(target=_keep_team, args=(self._ended,), name="short-waits", daemon=True).start()

    def end(self) -> None:
        """End the idle thread and its team."""
        self._ended.set()


class HalfTheThreads:
    """Halves the threads of a small model: it gains little from the other half, which the target's passes need."""

    def __init__(self, thread: ModelThread) -> None:
        self._thread = thread
        self._all = 1

    def begin(self) -> None:
        """Halve the threads, from the model thread's next call on."""
        self._thread.run(self._halve)

    def end(self) -> None:
        """Restore the threads, from the model thread's next call on."""
        self._thread.run(self._restore)

    def _halve(self) -> None:
        self._all = torch.get_num_threads()
        torch.set_num_threads(max(1, self._all // 2))

    def _restore(self) -> None:
        torch.set_num_threads(self._all)


def _keep_team(ended: threading.Event) -> None:
    torch.ones(_PARALLEL).add_(1)
    ended.wait()
