"""The process of a rank that follows: loads its part of the model, then does what rank 0 says.

It is no part of the engine's package, whose import takes seconds: from its first moment it ends when rank 0 does.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
from pathlib import Path
from typing import NoReturn

_LEAVING = 2.0  # seconds until the end of rank 0 is known


def main() -> None:
    """Follow until rank 0 is gone; the arguments are the rank, the number of ranks, and the file where they meet."""
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    words = pickle.load(sys.stdin.buffer)  # bytes
    leader = threading.Thread(target=_leave_with_leader, args=(store.parent,), daemon=True)
    leader.start()
    from dynatree.common.engine.loading import load_engine
    from dynatree.common.engine.parallel.parallel_engine import follow
    from dynatree.common.engine.parallel.ranks import Ranks
    from dynatree.common.errors import EX_SOFTWARE
    from dynatree.common.logs import announce
    from dynatree.common.tokenizer import first_line

    try:
        ranks = Ranks(rank, size, store)
        follow(load_engine(pickle.loads(words), ranks), ranks)
    except RuntimeError as error:
        leader.join(_LEAVING)  # where rank 0 has ended, or has failed likewise, this process ends here
        announce(f"dynatree: rank {rank} of the model: {first_line(error)}")
        _leave(store.parent, EX_SOFTWARE)
    _leave(store.parent, 0)


def _leave_with_leader(folder: Path) -> None:
    """End as soon as rank 0 has: it holds the other end of the pipe, and says nothing more there."""
    sys.stdin.buffer.read()
    _leave(folder, 0)


def _leave(folder: Path, status: int) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


if __name__ == "__main__":
    main()
