"""Files that somebody else replaces while a service runs: certificates, keys, tokens."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakSet

log = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_SECONDS = 1.0  # between two looks at the files


class Reloaded(Generic[T]):
    """What is made of some files, made anew when one of them is replaced.

    What cannot be read then, or makes no sense, is logged, and the last that did stays in force.

    Args:
        paths: The files.
        read: What is made of them; raises OSError or ValueError.
        wrong: What is wrong with the files although it is in force, without its subject; "" for nothing.
        secrets: Those of the files that other users of this machine should not be able to read; the log warns of it.

    Raises:
        OSError: A file cannot be read.
        ValueError: It makes no sense.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        wrong: Callable[[T], str] = lambda _: "",
        secrets: Sequence[Path] = (),
    ) -> None:
        self._paths = paths
        self._names = ", ".join(path.name for path in paths)
        self._read = read
        self._wrong = wrong
        self._secrets = secrets
        self._lock = threading.Lock()  # scrapes look too, in threads of their own
        self._seen = self._state()
        self._looked = time.monotonic()
        self._failure = ""
        self._value = read()
        self._tell(wrong(self._value))
        self._warn()
        _ALL.add(self)

    @property
    def value(self) -> T:
        """What the files said at the last look, which was lately."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self.look()
        return self._value

    @property
    def failed(self) -> bool:
        """Whether something is wrong with the files as they are now."""
        self.look()
        return bool(self._failure)

    def look(self) -> T:
        """What the files say now."""
        with self._lock:
            self._looked = time.monotonic()
            seen = self._state()
            if seen != self._seen:
                try:
                    self._value = self._read()
                except (OSError, ValueError) as error:
                    self._tell(f"cannot be read anew, what was read before stays in force: {error}")
                    return self._value
                self._seen = seen
                self._failure = ""
                log.info("%s: read anew", self._names)
                self._warn()
            self._tell(self._wrong(self._value))
            return self._value

    def _tell(self, failure: str) -> None:
        """Log what is wrong, once."""
        if failure and failure != self._failure:
            log.error("%s %s", self._names, failure)
        self._failure = failure

    def _warn(self) -> None:
        """Tell the log of secrets that other users of this machine may read."""
        for path in self._secrets:
            with suppress(OSError):
                if os.stat(path).st_mode & stat.S_IROTH:
                    log.warning("%s is a secret, and every user of this machine may read it", path.name)

    def _state(self) -> list[tuple[int, ...]]:
        """What tells one state of the files from another; links are followed, since Kubernetes replaces those."""
        return [_state(path) for path in self._paths]


_ALL: WeakSet[Reloaded[Any]] = WeakSet()


def failed_reloads() -> int:
    """How many files of this process, or pairs of files, have something wrong with them."""
    return sum(each.failed for each in list(_ALL))


def _state(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError as error:
        return (error.errno or 0,)
    return status.st_ino, status.st_size, status.st_mtime_ns
