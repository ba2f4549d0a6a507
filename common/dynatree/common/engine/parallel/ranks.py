"""The processes of a model over several devices: how they start, find each other, and end together.

Rank 0 is the service. It starts the others on this machine, as children, and says what all of them compute next. They
meet through a file in a private folder and speak over the loopback interface: no other machine can join.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dynatree.common.errors import EX_SOFTWARE, StartupError
from dynatree.common.tokenizer import first_line

log = logging.getLogger(__name__)

_FOREVER = timedelta(days=365)  # a follower waits for as long as nobody asks the service
_START = timedelta(minutes=10)
SLOW_SECONDS = 30.0  # of a forward, after which the log says so
STANDSTILL_SECONDS = 600.0  # after which a rank is thought to stand still
_LOOPBACK = "lo"


class RankError(RuntimeError):
    """The ranks are no longer in step; no message of theirs can be trusted to belong to the same forward."""


class Ranks:
    """All processes, as rank 0 sees them; on the others there is only `told`.

    Args:
        rank: Of this process.
        size: Of all.
        store: The file through which they meet.
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
        # what is said of work goes over its own group, on which followers wait for long
        self._saying = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._failure: Exception | None = None
        self._began: float | None = None  # of what all ranks do now, by the monotonic clock

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What all ranks do; on rank 0.

        Where it fails on one of them, the others stand somewhere in the middle of it. The next forward's sums would be
        added to those of this one, so there is no next one.

        Raises:
            RankError: It failed, or something before it did.
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
        """Have another thread call `on_standstill` when what all ranks do takes `STANDSTILL_SECONDS`; on rank 0.

        The log tells of it earlier. The back ends' own limits do not do: transformers sums over groups of its own.
        """
        slow, limit = SLOW_SECONDS, STANDSTILL_SECONDS

        def look() -> None:
            told = None
            while (began := self._began) is None or time.monotonic() - began < limit:
                if began is not None and began != told and time.monotonic() - began > slow:
                    told = began
                    log.warning("a forward has taken %g s; a rank of the model may stand still", slow)
                time.sleep(min(1.0, limit / 4))
            on_standstill()

        threading.Thread(target=look, daemon=True).start()

    def say(self, words: Any) -> None:
        """Tell all followers; on rank 0."""
        data = pickle.dumps(words)
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._saying)
        dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._saying)

    def agree(self, number: int) -> int:
        """Rank 0's number, on all ranks."""
        if self.rank == 0:
            self.say(number)
            return number
        return int(self.told())

    def told(self) -> Any:
        """What rank 0 says next; on a follower."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._saying)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._saying)
        return pickle.loads(data.numpy().tobytes())


class Followers:
    """The children of rank 0.

    Args:
        size: Processes, rank 0 included.
        words: What they need to load the model, for `rank_process.main`.
        on_death: Called from another thread, with its rank and status, when one ends by itself.
    """

    def __init__(self, size: int, words: Any, on_death: Callable[[int, int], None]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dynatree-ranks-"))  # of this user alone
        self.store = self._folder / "store"
        self._on_death = on_death
        self._ending = False
        self._processes = []
        for rank in range(1, size):
            command = [sys.executable, "-m", "dynatree.common.rank_process"]
            process = subprocess.Popen(
                [*command, str(rank), str(size), str(self.store)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for rank 0, which ends the others
            )
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(pickle.dumps(words)))
            process.stdin.flush()  # not closed: a follower ends when it is
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._ending:
            self.end()
            self._on_death(rank, status)

    def end(self) -> None:
        """End all, and leave nothing behind."""
        self._ending = True
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def end_process(rank: int, status: int) -> None:
    """A follower has died: nothing can be computed any more, and a supervisor starts the service anew."""
    how = f"signal {-status}" if status < 0 else f"status {status}"
    log.critical("rank %d of the model has died (%s), so the service ends", rank, how)
    os._exit(EX_SOFTWARE)


def end_standstill(followers: Followers) -> None:
    """A forward does not end: nor do the calls that wait for it, so the service ends without them."""
    # before the forward fails, since torch takes standard error for itself while it shows an exception
    log.critical("a rank of the model stands still for %g s, so the service ends", STANDSTILL_SECONDS)
    followers.end()
    os._exit(EX_SOFTWARE)


def check_plan(model_type: str, plan: object, heads: int, kv_heads: int, size: int) -> None:
    """Refuse what cannot be cut into so many parts.

    Raises:
        StartupError: The family has no plan, or its heads do not divide.
    """
    if not plan:
        raise StartupError(f"transformers has no plan to cut {model_type} models over several devices")
    if heads % size or kv_heads % size:
        raise StartupError(
            f"{heads} heads and {kv_heads} key heads cannot be cut over {size} devices; expected a number that divides "
            f"both"
        )
