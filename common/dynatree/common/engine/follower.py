"""The process of a rank that follows: loads its part of the model, then does what rank 0 says."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynatree.common.engine.model_settings import ModelSettings
    from dynatree.common.engine.parallel.ranks import Ranks


def main() -> None:
    """Follow until rank 0 is gone; the arguments are the rank, the number of ranks, and the file where they meet."""
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    settings = pickle.loads(sys.stdin.buffer.read())
    from dynatree.common.engine.parallel.ranks import Ranks

    status = _follow(settings, Ranks(rank, size, store))
    shutil.rmtree(store.parent, ignore_errors=True)
    os._exit(status)


def _follow(settings: ModelSettings, ranks: Ranks) -> int:
    """The exit status, once there is nothing left to do."""
    from dynatree.common.engine.loading import load_engine
    from dynatree.common.engine.parallel.parallel_engine import follow
    from dynatree.common.errors import EX_SOFTWARE
    from dynatree.common.logs import announce
    from dynatree.common.tokenizer import first_line

    try:
        engine = load_engine(settings, ranks)
    except RuntimeError:  # rank 0 says what went wrong, if anything did
        return 0
    try:
        follow(engine, ranks)
    except RuntimeError as error:
        announce(f"dynatree: rank {ranks.rank} of the model: {first_line(error)}")
        return EX_SOFTWARE
    return 0


if __name__ == "__main__":
    main()
