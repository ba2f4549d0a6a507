"""One-line messages that name a model and say why it cannot be served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PretrainedConfig

from dynatree.common.errors import StartupError
from dynatree.engine.model.tokenizer import first_line
from dynatree.engine.support.families import check_family


@contextmanager
def named(name: str) -> Iterator[None]:
    """Add the model's name to a refusal."""
    try:
        yield
    except StartupError as error:
        raise StartupError(f"model {name} cannot be served exactly: {error}") from error


@contextmanager
def explained(name: str, config: PretrainedConfig) -> Iterator[None]:
    """Add the model's name to any failure of a probe, or refuse the model's family if that is the reason."""
    try:
        with named(name):
            try:
                yield
            except Exception:
                check_family(config)
                raise
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise StartupError(f"model {name} cannot be served: its forward pass failed: {first_line(error)}") from error
