"""The folder of a distilled draft: a checkpoint like any other, and beside it the state of the training.

    config.json, model.safetensors, tokenizer.json, ...   the draft, which `--draft-model FOLDER` loads
    distill/run.json                                       what the training depends on; `--resume` compares it
    distill/texts.safetensors                              the tokens of the texts, which may have changed since
    distill/state.pt                                       trained weights, optimizer and position
    distill/labels-*.safetensors                           the target's predictions, by number

Each file is written beside its place and then renamed, so that a reader, a killed process or a full disk never leaves
half of one. The training continues from state.pt alone. The folder distill/ can be deleted when the training is over.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dynatree.common.errors import StartupError
from dynatree.common.shutdown import unfinished


class Folder:
    """The folder `path`, which `check` and `begin` accept or refuse."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.distill = path / "distill"
        self.state = self.distill / "state.pt"
        self.texts = self.distill / "texts.safetensors"
        self._run = self.distill / "run.json"

    def labels(self, number: int) -> Path:
        """Return the path of a file of labels."""
        return self.distill / f"labels-{number:05}.safetensors"

    def check(self, resume: bool) -> None:
        """Refuse a folder that cannot be written, or that is not of a training if one is to be continued.

        Raises:
            StartupError: The message says which.
        """
        if resume and not self._run.exists():
            raise StartupError(f"--resume: {self.path} holds no training of dynatree distill")
        if not resume and self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            hint = "--resume, which continues its training, or " if self._run.exists() else ""
            raise StartupError(f"--out {self.path} already exists; expected {hint}a new or empty folder")
        nearest = next(each for each in (self.path, *self.path.absolute().parents) if each.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise StartupError(f"--out {self.path} cannot be written; expected a folder")

    def begin(self, run: dict[str, Any], resume: bool) -> None:
        """Record what a new training depends on, or compare it with what the training to continue depends on.

        Raises:
            StartupError: The training to continue was begun with others, or the disk is full.
        """
        if not resume:
            self.write(self._run, lambda path: path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8"))
            return
        try:
            begun = json.loads(self._run.read_text(encoding="utf-8"))
            changed = [name for name in run if begun.get(name) != run[name]]
        except (OSError, ValueError, AttributeError):
            raise StartupError(f"--resume: {self._run} cannot be read") from None
        if changed:
            raise StartupError(f"--resume: the training in {self.path} was begun with another {' and '.join(changed)}")

    def write(self, path: Path, save: Callable[[Path], object]) -> None:
        """Write one file; an earlier one stays if that fails.

        Raises:
            StartupError: The file cannot be written, for example because the disk is full.
        """
        with self._beside(path) as temporary:
            temporary.mkdir(parents=True)
            save(temporary / path.name)
            _move(temporary / path.name, path)

    def write_checkpoint(self, save: Callable[[Path], object]) -> None:
        """Write the files of the draft, the weights last; `save` writes them to an empty folder.

        Raises:
            StartupError: They cannot be written.
        """
        with self._beside(self.path / "model") as temporary:
            temporary.mkdir(parents=True)
            save(temporary)
            for file in sorted(temporary.iterdir(), key=lambda file: (file.suffix == ".safetensors", file.name)):
                _move(file, self.path / file.name)

    @contextmanager
    def _beside(self, path: Path) -> Iterator[Path]:
        """Give a folder for unfinished files; remove it in the end."""
        temporary = self.distill / f"unfinished-{path.name}"
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
        try:
            with unfinished(temporary):
                yield temporary
        except Exception as error:  # torch and safetensors raise types of their own
            kept = "; its last checkpoint stays, and --resume continues from it" if self.state.exists() else ""
            raise StartupError(f"--out {self.path} cannot be written: {_reason(error)}{kept}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _move(file: Path, to: Path) -> None:
    """Put a file, complete on the disk, in the place of another one."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    file.chmod(0o644)  # safetensors makes files private, and a container may run as another user
    file.replace(to)


def _reason(error: BaseException) -> str:
    """Return the operating system's reason for a failed write, or the error itself; torch wraps that reason."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return str(error).partition("\n")[0]
