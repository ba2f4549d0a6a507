"""Long imports, made shorter."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Import torch and transformers without Python's garbage collection, which takes a seventh of that time.

    What they make stays, so later collections do not look through it either, before the process ends.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.enable()
