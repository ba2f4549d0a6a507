"""The loop of a distillation: the target labels and the student trains in turn, with a checkpoint every two minutes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from dynatree.distill.folder import Folder
from dynatree.distill.labels import SEQUENCES, Labeller, Labels
from dynatree.distill.texts import LENGTH
from dynatree.distill.training import BATCH, Training

LABELLING = 0.5  # share of the time in which the target works
CHECKPOINT_SECONDS = 120.0
LINE_SECONDS = 15.0


class Distillation:
    """One training until its time is over.

    Args:
        folder: Where everything is kept.
        training: The student and its position.
        labeller: The target.
        held_back: Labels of texts that are not trained on, by what they are.
        tokenizer: The target's tokenizer, which is saved with the draft.
        dtype: Data type of the saved draft.
        answers: Share of the files of labels that hold answers of the target.
        checkpoint_seconds: Seconds of training between checkpoints.
    """

    def __init__(
        self,
        folder: Folder,
        training: Training,
        labeller: Labeller,
        held_back: dict[str, Labels],
        tokenizer: Any,
        dtype: torch.dtype,
        answers: float,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ) -> None:
        self._folder = folder
        self._training = training
        self._labeller = labeller
        self._held_back = held_back
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._answers = answers
        self._checkpoint_seconds = checkpoint_seconds

    def run(self) -> None:
        """Train, and write a checkpoint at the end.

        Raises:
            StartupError: A file cannot be written; the last checkpoint stays.
        """
        position, seconds = self._training.position, self._training.seconds
        self._training.begin()
        print(f"before: {self._agreement()}", flush=True)
        saved = shown = position.seconds
        loss: float | None = None
        if saved >= seconds:  # an earlier run may have failed between its last state and its draft
            self._folder.write_checkpoint(self._save_draft)
        while position.seconds < seconds:
            if position.files == 0 or self._label_next():
                self._label(position.files)
                position.files += 1
                position.labelling += self._training.tick()
            else:
                last = self._training.step()
                loss = last if loss is None else 0.98 * loss + 0.02 * last
                self._training.tick()
            agreement = ""
            if position.seconds >= min(saved + self._checkpoint_seconds, seconds):
                saved = position.seconds
                self._save()
                agreement = self._agreement()
            if agreement or position.seconds >= shown + LINE_SECONDS:
                shown = position.seconds
                print(self._line(loss, agreement), flush=True)

    def _label_next(self) -> bool:
        """Whether the target has worked less than its share, and its next file will not take longer than is left."""
        position = self._training.position
        ends = position.seconds + position.labelling / position.files
        return position.labelling < LABELLING * position.seconds and ends <= self._training.seconds

    def _label(self, number: int) -> None:
        """Write a file of labels, unless it is there from before an interruption."""
        path = self._folder.labels(number)
        if path.exists():
            return
        before, after = (int(each * self._answers) for each in (number, number + 1))
        labels = self._labeller.answers(number, chat=before % 2 == 1) if after > before else self._labeller.text(number)
        self._folder.write(path, labels.save)

    def _save(self) -> None:
        self._folder.write(self._folder.state, self._training.save)
        self._folder.write_checkpoint(self._save_draft)

    def _save_draft(self, folder: Path) -> None:
        draft: Any = copy.deepcopy(self._training.student)
        draft.to(self._dtype).save_pretrained(folder, max_shard_size="1000GB")  # one file
        self._tokenizer.save_pretrained(folder, save_jinja_files=False)

    def _agreement(self) -> str:
        agreements = (f"{name} {self._training.agreement(labels):.3f}" for name, labels in self._held_back.items())
        return f"agreement on held-back {', '.join(agreements)}"

    def _line(self, loss: float | None, agreement: str) -> str:
        position, seconds = self._training.position, self._training.seconds
        trained = position.steps * BATCH * LENGTH
        training = position.seconds - position.labelling
        parts = [
            f"{minutes(position.seconds)}, {minutes(max(seconds - position.seconds, 0))} left",
            f"step {position.steps}",
            f"{position.files * SEQUENCES * LENGTH / 1e6:.2f} M tokens labelled",
            f"{trained / 1e6:.2f} M trained, {trained / max(training, 1e-9):.0f} a second",
            "" if loss is None else f"loss {loss:.3f}",
            agreement,
        ]
        return "; ".join(part for part in parts if part)


def minutes(seconds: float) -> str:
    """Return a time in minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
