"""Why a model cannot be served, in one line that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PretrainedConfig

from dynatree.common.engine.support import check_family
from dynatree.common.errors import StartupError
from dynatree.common.tokenizer import first_line


@contextmanager
def named(name: str) -> Iterator[None]:
    """Name the model in a refusal."""
    try:
        yield
    except StartupError as error:
        raise StartupError(f"model {name} cannot be served exactly: {error}") from error


@contextmanager
def explained(name: str, config: PretrainedConfig) -> Iterator[None]:
    """Name the model, and its family where that is the reason, in any failure while it is probed."""
    try:
        with named(name):
            try:
                yield
            except Exception:
                check_family(config)
                raise
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise StartupError(f"model {name} cannot be served: its forward failed: {first_line(error)}") from error
