"""Files of lines in a folder whose size is bounded."""

from __future__ import annotations

import errno
import os
from pathlib import Path

PATTERN = "completions-*.jsonl"
FILES = 8  # files of a full folder; the oldest is deleted as a whole


class LineFiles:
    """Appends lines to numbered files, and deletes the oldest file when all would exceed `most_bytes`.

    A line is written as a whole or not at all. If the machine stops in between, the next start removes the incomplete
    line.

    Args:
        folder: The folder; nothing else may write files of `PATTERN` to it.
        most_bytes: Upper bound on the bytes of all files together.

    Raises:
        OSError: The files cannot be read or repaired.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        paths = sorted(folder.glob(PATTERN))
        if paths:
            _remove_incomplete_line(paths[-1])
        self._sizes = {path: path.stat().st_size for path in paths}  # oldest first

    def append(self, line: bytes) -> None:
        """Write a line; a line that exceeds the bound by itself is left out.

        Raises:
            OSError: The line cannot be written.
        """
        if len(line) > self._most_bytes:
            return
        path = next(reversed(self._sizes), None)
        if path is None or self._sizes[path] + len(line) > self._most_bytes // FILES:
            number = int(path.stem.rpartition("-")[2]) + 1 if path else 1
            path = self._folder / PATTERN.replace("*", f"{number:08}")
        while sum(self._sizes.values()) + len(line) > self._most_bytes:
            oldest = next(iter(self._sizes))
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]
        self._sizes[path] = _append(path, line)


def _append(path: Path, line: bytes) -> int:
    """Append a line to a file that only its owner may read, and return the file's size."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(file).st_size
        if os.write(file, line) < len(line):  # the disk is full
            os.ftruncate(file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return size + len(line)
    finally:
        os.close(file)


def _remove_incomplete_line(path: Path) -> None:
    with path.open("r+b") as file:
        contents = file.read()
        file.truncate(contents.rfind(b"\n") + 1)
