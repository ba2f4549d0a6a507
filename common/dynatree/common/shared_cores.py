"""What a service does for the other one on the same cores while both compute at once.

One completion has the draft and the target take turns. Of several, some grow trees while a pass runs for others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from dynatree.common.model_thread import ModelThread

_PARALLEL = 1 << 17  # elements that torch adds up with more than one thread


class Consideration(Protocol):
    """What is done while cores are shared. Both calls come from the event loop, in turns."""

    def begin(self) -> None:
        """Two or more share the cores from now on."""

    def end(self) -> None:
        """One or none has them."""


class SharedCores:
    """Counts who computes on cores that the other service computes on, too."""

    def __init__(self, consideration: Consideration) -> None:
        self._consideration = consideration
        self._sharing = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """One who shares the cores, for as long as the context lives."""
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
    """OpenMP's threads that wait sleep at once.

    Between two operations of a forward its threads turn for the next one, which is fastest on cores of their own. Where
    the other service has one of the cores, they turn while the thread that they wait for has none. libgomp lets them
    turn 1,000 times at most while a process has more OpenMP threads than cores (libgomp's manual, GOMP_SPINCOUNT). So a
    thread is kept that has a team of its own and does nothing. Other OpenMP libraries are not affected.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()

    def begin(self) -> None:
        """Start the thread."""
        self._ended = threading.Event()
        threading.Thread(target=_keep_team, args=(self._ended,), name="short-waits", daemon=True).start()

    def end(self) -> None:
        """Let it end, and its team with it."""
        self._ended.set()


class HalfTheThreads:
    """A model's forwards take half of its threads: a small model gains little by the others, which passes need."""

    def __init__(self, thread: ModelThread) -> None:
        self._thread = thread
        self._all = 1

    def begin(self) -> None:
        """From the thread's next call on."""
        self._thread.run(self._halve)

    def end(self) -> None:
        """From the thread's next call on."""
        self._thread.run(self._restore)

    def _halve(self) -> None:
        self._all = torch.get_num_threads()
        torch.set_num_threads(max(1, self._all // 2))

    def _restore(self) -> None:
        torch.set_num_threads(self._all)


def _keep_team(ended: threading.Event) -> None:
    torch.ones(_PARALLEL).add_(1)
    ended.wait()
