"""Speeds up the imports of torch and transformers."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable Python's garbage collection within the context, since it takes a seventh of the import time.

    The imported objects are frozen until the process ends, so that later collections do not scan them either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.enable()
