"""Keeps the chosen number of fixed rows in a file, so that restarts and replicas compute equal bits."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynatree.common.limits import MAX_FIXED_ROWS

log = logging.getLogger(__name__)


def default_path() -> Path:
    """Return the default file, below XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynatree" / "rows.json"


@dataclass(frozen=True)
class KeptRows:
    """One target's entry in the file, a JSON object of numbers of rows.

    Attributes:
        path: The file, which several services may share.
        key: Name of the entry: all that decides which number is right, such as the GPU and the weights.
    """

    path: Path
    key: str

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the file's lock, so that of two services that start together one chooses, and the other reads."""
        with ExitStack() as held:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                lock = os.open(self._beside(".lock"), flags, 0o600)
                held.callback(os.close, lock)
                self._wait_for(lock)
            except OSError as error:  # the file may still be read
                log.warning(
                    "%s cannot be locked (%s); services that start together may choose different rows, unless it "
                    "holds a number",
                    self.path,
                    error.strerror or error,
                )
            yield

    def _wait_for(self, lock: int) -> None:
        """Lock an open file, whose closing unlocks it."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another service, which chooses a number of rows and holds the lock of %s", self.path)
            fcntl.flock(lock, fcntl.LOCK_EX)

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    def read(self) -> int | None:
        """Return the number of rows, or None if none is kept."""
        rows = self._entries().get(self.key)
        return rows if isinstance(rows, int) and 0 < rows <= MAX_FIXED_ROWS else None

    def write(self, rows: int) -> None:
        """Keep a number of rows; log a warning if the file cannot be written."""
        unfinished = self._beside(".new")
        try:
            unfinished.write_text(json.dumps(self._entries() | {self.key: rows}, indent=1) + "\n")
            unfinished.replace(self.path)
        except OSError as error:
            log.warning(
                "%s cannot be written (%s), so the next start may choose other rows than %d, and give other bits; "
                "expected --fixed-rows %d, or another --fixed-rows-file",
                self.path,
                error.strerror or error,
                rows,
                rows,
            )

    def _entries(self) -> dict[str, object]:
        try:
            entries = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read (%s)", self.path, error)
            return {}
        return entries if isinstance(entries, dict) else {}
