"""Files that somebody else replaces while a service runs: certificates, keys, tokens."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_SECONDS = 1.0  # between two looks at the files


class Reloaded(Generic[T]):
    """What is made of some files, made anew when one of them is replaced.

    What cannot be read then, or makes no sense, is logged, and the last that did stays in force.

    Args:
        paths: The files.
        read: What is made of them; raises OSError or ValueError.

    Raises:
        OSError: A file cannot be read.
        ValueError: It makes no sense.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = paths
        self._read = read
        self._seen = self._look()
        self._looked = time.monotonic()
        self._failure = ""
        self._value = read()

    @property
    def value(self) -> T:
        """What the files say now."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            try:
                seen = self._look()
                if seen != self._seen:
                    self._value = self._read()
                    self._seen = seen
                    self._failure = ""
                    log.info("%s: read anew", ", ".join(path.name for path in self._paths))
            except (OSError, ValueError) as error:
                if str(error) == self._failure:  # said already
                    return self._value
                self._failure = str(error)
                names = ", ".join(path.name for path in self._paths)
                log.error("%s cannot be read anew, what was read before stays in force: %s", names, error)
        return self._value

    def _look(self) -> list[tuple[int, int, int]]:
        """What tells one state of the files from another; links are followed, since Kubernetes replaces those."""
        states = [os.stat(path) for path in self._paths]
        return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in states]
