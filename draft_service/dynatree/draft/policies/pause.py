"""Pauses of a draft model that does not pay, and when to try it again."""

from __future__ import annotations

from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.control.track_record import TrackRecord


class Pause:
    """Rounds without the draft model. Each trial doubles the next pause, up to `max_pause` rounds.

    A session begins with a share of the last session's pause, at most `max_first_pause` rounds.

    Attributes:
        passed: Rounds of this pause so far.
    """

    def __init__(self, track_record: TrackRecord, control: ControlSettings) -> None:
        self.passed = 0
        self._track_record = track_record
        self._longest = control.max_pause
        self._length = min(max(track_record.pause // control.first_pause_divisor, 1), control.max_first_pause)

    def reset(self) -> None:
        """Shorten the next pause to one round, because the draft model pays."""
        self._set(1)

    def is_over(self, *, hopeless: bool) -> bool:
        """Count one more round, and return whether the draft model is tried in it.

        Args:
            hopeless: Whether even a perfect draft would not pay, so that a trial every `max_pause` rounds is enough.
        """
        self.passed += 1
        if self.passed < (self._longest if hopeless else self._length):
            return False
        self.passed = 0
        self._set(min(2 * self._length, self._longest))
        return True

    def _set(self, length: int) -> None:
        self._length = self._track_record.pause = length
