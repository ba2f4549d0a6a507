"""Reloading of files that are replaced while a service runs: certificates, keys, and tokens."""

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
LOOK_SECONDS = 1.0  # minimum interval between two checks of the files


class Reloaded(Generic[T]):
    """A value read from files, which is read again when one of the files is replaced.

    If the new files cannot be read or are invalid, the error is logged and the previous value stays in force.

    Args:
        paths: The files.
        read: Function that reads the value; raises OSError or ValueError.
        wrong: Function that describes faults of a value in force, without a subject; "" if there are none.
        secrets: Files that other users of this machine should not be able to read; the log warns if they can.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is invalid.
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
        self._lock = threading.Lock()  # metric scrapes check the files from other threads
        self._seen = self._state()
        self._looked = time.monotonic()
        self._failure = ""
        self._value = read()
        self._tell(wrong(self._value))
        self._warn()
        _ALL.add(self)

    @property
    def value(self) -> T:
        """The current value; the files were checked at most `LOOK_SECONDS` ago."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self.look()
        return self._value

    @property
    def failed(self) -> bool:
        """Whether the files, checked now, have a fault."""
        self.look()
        return bool(self._failure)

    def look(self) -> T:
        """Check the files now, reload them if they changed, and return the value."""
        with self._lock:
            self._looked = time.monotonic()
            seen = self._state()
            if seen != self._seen:
                try:
                    self._value = self._read()
                except (OSError, ValueError) as error:
                    self._tell(f"cannot be reloaded, so the previous contents stay in force: {error}")
                    return self._value
                self._seen = seen
                self._failure = ""
                log.info("%s: reloaded", self._names)
                self._warn()
            self._tell(self._wrong(self._value))
            return self._value

    def _tell(self, failure: str) -> None:
        """Log a fault, unless it is the same as the last one."""
        if failure and failure != self._failure:
            log.error("%s %s", self._names, failure)
        self._failure = failure

    def _warn(self) -> None:
        """Log a warning for each secret that other users of this machine can read."""
        for path in self._secrets:
            with suppress(OSError):
                if os.stat(path).st_mode & stat.S_IROTH:
                    log.warning("%s is a secret, but every user of this machine can read it", path.name)

    def _state(self) -> list[tuple[int, ...]]:
        """A fingerprint of the files' state; symbolic links are followed, since Kubernetes replaces links."""
        return [_state(path) for path in self._paths]


_ALL: WeakSet[Reloaded[Any]] = WeakSet()


def failed_reloads() -> int:
    """Number of this process's reloaded values whose files have a fault."""
    return sum(each.failed for each in list(_ALL))


def _state(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError as error:
        return (error.errno or 0,)
    return status.st_ino, status.st_size, status.st_mtime_ns
