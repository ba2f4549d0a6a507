"""The process of a rank that follows: loads its part of the model, then does what rank 0 says."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from pathlib import Path


def main() -> None:
    """Follow until rank 0 is gone; the arguments are the rank, the number of ranks, and the file where they meet."""
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    settings = pickle.loads(sys.stdin.buffer.read())
    from dynatree.common.engine.loading import load_engine
    from dynatree.common.engine.parallel.parallel_engine import follow
    from dynatree.common.engine.parallel.ranks import Ranks

    ranks = Ranks(rank, size, store)
    try:
        follow(load_engine(settings, ranks), ranks)
    except RuntimeError:  # rank 0 says what went wrong, if anything did
        shutil.rmtree(store.parent, ignore_errors=True)
        os._exit(0)


if __name__ == "__main__":
    main()
