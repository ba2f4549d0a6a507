"""Records the texts of completions for the training of a draft model."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from dynatree.common.errors import StartupError
from dynatree.common.model_info import ModelInfo
from dynatree.draft.recording.line_files import LineFiles
from dynatree.draft.settings import RecordSettings

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MOST_WAITING = 256  # completions that wait to be written; further ones are not recorded


class Recorder:
    """Appends completions to a folder as JSON lines, on a thread of its own; `Recorder.open`, then `add`, then `close`.

    A line is an object with one field, `text`: the completion as the client got it, after its prompt if prompts are
    recorded. A failure to write is logged once and affects no completion.

    Args:
        settings: The completions to record.
        files: The files.
        target: The manifest's description of the target.
        lock: File descriptor that holds the lock of the folder.
    """

    def __init__(self, settings: RecordSettings, files: LineFiles, target: dict[str, object], lock: int) -> None:
        self._settings = settings
        self._files = files
        self._target = target
        self._lock = lock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="record")
        self._room = threading.Semaphore(MOST_WAITING)
        self._warned = False

    @classmethod
    def open(cls, settings: RecordSettings, target: ModelInfo) -> Self:
        """Open the folder for completions of `target`, or create it.

        Raises:
            StartupError: The folder cannot be used: it has other files or completions of another model, another
                service records into it, or it is not writable.
        """
        folder = settings.folder
        described = _described(target)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(folder.iterdir()) and not (folder / MANIFEST).exists():
                raise StartupError(f"--record is {folder}, which has other files; expected a new or an empty folder")
            folder.chmod(0o700)
            lock = os.open(folder / MANIFEST, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                _claim(lock, folder, described)
                return cls(settings, LineFiles(folder, settings.most_bytes), described, lock)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise StartupError(f"--record is {folder}, which cannot be used: {error.strerror}") from error

    def wants(self, principal: str, target: ModelInfo) -> bool:
        """Whether completions of this principal by this target are recorded, unless the request forbids it."""
        principals = self._settings.principals
        return (principals is None or principal in principals) and _described(target) == self._target

    def add(self, text: str, read_prompt: Callable[[], str]) -> None:
        """Record a completion; `read_prompt` returns its prompt, and is called on the recording thread."""
        if not text:
            return
        if self._room.acquire(blocking=False):
            self._thread.submit(self._write, text, read_prompt)
        else:
            self._warn("the disk is too slow")

    def close(self) -> None:
        """Write the waiting completions, and release the folder."""
        self._thread.shutdown(wait=True)
        os.close(self._lock)

    def _write(self, text: str, read_prompt: Callable[[], str]) -> None:
        try:
            whole = read_prompt() + text if self._settings.prompts else text
            self._files.append(json.dumps({"text": whole}).encode() + b"\n")
        except Exception as error:  # whatever it is, it concerns the recording alone
            self._warn(str(getattr(error, "strerror", None) or error))
        finally:
            self._room.release()

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("completions are not recorded to %s: %s", self._settings.folder, reason)


def _described(target: ModelInfo) -> dict[str, object]:
    """The properties of a target that its texts depend on: not its number format, which changes few of them."""
    names = ("name", "architecture", "parameters", "vocab_size", "tokenizer_fingerprint")
    return {name: getattr(target, name) for name in names}


def _claim(manifest: int, folder: Path, target: dict[str, object]) -> None:
    """Lock a manifest, and write it or compare it with the target.

    Raises:
        StartupError: Another service holds the lock, or the folder is another model's.
    """
    try:
        fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartupError(f"--record is {folder}, into which another service records") from None
    contents = os.pread(manifest, 2**16, 0)
    if not contents:
        os.pwrite(manifest, json.dumps(target, indent=2).encode(), 0)
        return
    try:
        known = json.loads(contents)
        name = known["name"]
    except (ValueError, TypeError, KeyError):
        raise StartupError(f"--record is {folder}, whose {MANIFEST} is damaged; expected another folder") from None
    if known != target:
        other = f"another model named {name}" if name == target["name"] else name
        raise StartupError(
            f"--record is {folder}, which has completions of {other}; expected another folder for {target['name']}"
        )
