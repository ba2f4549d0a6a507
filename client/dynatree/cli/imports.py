"""Speeds up the imports of torch and transformers, and does without torch."""

import atexit
import gc
import os
import sys
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


def without_torch() -> None:
    """Keep torch out of this process, unless it is loaded: transformers would import it to load a tokenizer."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # one says that torch is missing
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # imports of it fail, as if it were not installed
