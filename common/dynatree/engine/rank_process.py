"""The process of a following rank: loads its part of the model, then executes the calls of rank 0.

It imports the engine only after it has started to watch rank 0, because the import takes seconds.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
from pathlib import Path
from typing import NoReturn

_LEAVING = 2.0  # seconds within which the end of rank 0 is noticed


def main() -> None:
    """Follow rank 0 until it ends; the arguments are the rank, the number of ranks, and the rendezvous file."""
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    words = pickle.load(sys.stdin.buffer)  # bytes
    leader = threading.Thread(target=_leave_with_leader, args=(store.parent,), daemon=True)
    leader.start()
    from dynatree.common.errors import EX_SOFTWARE
    from dynatree.common.logs import announce
    from dynatree.engine.loading import load_engine
    from dynatree.engine.model.tokenizer import first_line
    from dynatree.engine.parallel.parallel_engine import follow
    from dynatree.engine.parallel.ranks import Ranks

    try:
        ranks = Ranks(rank, size, store)
        follow(load_engine(pickle.loads(words), ranks), ranks)
    except Exception as error:  # rank 0's end shows as errors of many types, depending on what this rank computes
        leader.join(_LEAVING)  # this process ends here if rank 0 has ended or failed too
        announce(f"dynatree: rank {rank} of the model: {first_line(error)}")
        _leave(store.parent, EX_SOFTWARE)
    _leave(store.parent, 0)


def _leave_with_leader(folder: Path) -> None:
    """End this process when rank 0 ends: the read returns when rank 0's end of the pipe closes."""
    sys.stdin.buffer.read()
    _leave(folder, 0)


def _leave(folder: Path, status: int) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


if __name__ == "__main__":
    main()
