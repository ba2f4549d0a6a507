"""The processes of tensor parallelism: how they start, find each other, and end together.

Rank 0 is the service. It starts the other ranks on this machine as child processes, and tells them what to compute
next. They meet through a file in a private folder and communicate over the loopback interface, so no other machine can
join.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynatree.common.errors import EX_SOFTWARE, DeviceFailedError, StartupError
from dynatree.engine.model.tokenizer import first_line

log = logging.getLogger(__name__)

_FOREVER = timedelta(days=365)  # a follower waits while the service has no requests
_START = timedelta(minutes=10)
SLOW_SECONDS = 30.0  # duration of a forward pass after which a warning is logged
STANDSTILL_SECONDS = 600.0  # duration of a forward pass after which a rank counts as stuck
_LOOPBACK = "lo"


class RankError(DeviceFailedError):
    """The ranks are no longer in step, so their messages may belong to different forward passes."""


class Ranks:
    """The group of all ranks; rank 0 sends messages, and the other ranks only receive them.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        store: File through which the ranks meet.
    """

    def __init__(self, rank: int, size: int, store: Path) -> None:
        self.rank = rank
        self.size = size
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "GLOO_SOCKET_IFNAME": _LOOPBACK,
            "NCCL_SOCKET_IFNAME": _LOOPBACK,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=_START)
        # messages use a separate group, because followers may wait long for the next one
        self._saying = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._failure: Exception | None = None
        self._began: float | None = None  # start of the current joint operation, by the monotonic clock

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Run an operation of all ranks; on rank 0.

        If it fails on one rank, the other ranks are stuck in the middle of it. The sums of the next forward pass would
        mix with those of this one, so no further operation is allowed.

        Raises:
            RankError: This operation or an earlier one failed.
        """
        if self._failure is None:
            self._began = time.monotonic()
            try:
                yield
                return
            except Exception as error:
                self._failure = error
            finally:
                self._began = None
        reason = first_line(self._failure)
        raise RankError(f"the ranks of the model are no longer in step: {reason}") from self._failure

    def watch(self, on_standstill: Callable[[], None]) -> None:
        """Start a thread that calls `on_standstill` when an operation takes `STANDSTILL_SECONDS`; on rank 0.

        A warning is logged earlier. The back ends' time limits do not help, because transformers creates its own
        process groups.
        """
        slow, limit = SLOW_SECONDS, STANDSTILL_SECONDS

        def look() -> None:
            told = None
            while (began := self._began) is None or time.monotonic() - began < limit:
                if began is not None and began != told and time.monotonic() - began > slow:
                    told = began
                    log.warning("a forward pass has taken %g s; a rank of the model may hang", slow)
                time.sleep(min(1.0, limit / 4))
            on_standstill()

        threading.Thread(target=look, daemon=True).start()

    def say(self, words: Any) -> None:
        """Send a message to all followers; on rank 0."""
        data = pickle.dumps(words)
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._saying)
        dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._saying)

    def agree(self, number: int) -> int:
        """Return rank 0's number on all ranks."""
        if self.rank == 0:
            self.say(number)
            return number
        return int(self.told())

    def union(self, places: Sequence[int], size: int) -> Sequence[int]:
        """Return the places in [0, `size`) that at least one rank passes, on all ranks."""
        flags = torch.zeros(size, dtype=torch.uint8)
        flags[list(places)] = 1
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._saying)
        return [place for place, flag in enumerate(flags.tolist()) if flag]

    def told(self) -> Any:
        """Receive the next message of rank 0; on a follower."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._saying)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._saying)
        return pickle.loads(data.numpy().tobytes())


class Followers:
    """The child processes of rank 0.

    Args:
        size: Number of ranks, including rank 0.
        words: Settings with which `rank_process.main` loads the model.
        on_death: Called from another thread with the rank and status of a child that ends unexpectedly.
    """

    def __init__(self, size: int, words: Any, on_death: Callable[[int, int], None]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dynatree-ranks-"))  # accessible only to this user
        self.store = self._folder / "store"
        self._on_death = on_death
        self._ending = False
        self._processes = []
        for rank in range(1, size):
            command = [sys.executable, "-m", "dynatree.engine.rank_process"]
            process = subprocess.Popen(
                [*command, str(rank), str(size), str(self.store)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # only rank 0 gets Ctrl-C, and ends the other ranks
            )
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(pickle.dumps(words)))
            process.stdin.flush()  # kept open: a follower ends when it closes
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._ending:
            self.end()
            self._on_death(rank, status)

    def end(self) -> None:
        """Kill all child processes and remove their folder."""
        self._ending = True
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def end_process(rank: int, status: int) -> None:
    """End the service after a follower has died, because no forward pass is possible; a supervisor restarts it."""
    how = f"signal {-status}" if status < 0 else f"status {status}"
    log.critical("rank %d of the model has died (%s), so the service ends", rank, how)
    os._exit(EX_SOFTWARE)


def end_standstill(followers: Followers) -> None:
    """End the service when a forward pass does not end, without waiting for the calls that depend on it."""
    # log before the forward pass fails, because torch blocks standard error while it shows an exception
    log.critical("a rank of the model has hung for %g s, so the service ends", STANDSTILL_SECONDS)
    followers.end()
    os._exit(EX_SOFTWARE)


def check_plan(model_type: str, plan: object, heads: int, kv_heads: int, size: int) -> None:
    """Refuse a model that cannot be split over `size` devices.

    Raises:
        StartupError: The family has no tensor-parallel plan, or `size` does not divide its heads.
    """
    if not plan:
        raise StartupError(f"transformers has no plan to split {model_type} models over several devices")
    if heads % size or kv_heads % size:
        raise StartupError(
            f"{heads} heads and {kv_heads} key heads cannot be split over {size} devices; expected a number that "
            "divides both"
        )
