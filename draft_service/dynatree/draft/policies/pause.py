"""When a draft model that does not pay is tried again."""

from __future__ import annotations

from dynatree.draft.control import ControlSettings
from dynatree.draft.track_record import TrackRecord


class Pause:
    """Rounds without the draft model: after each trial twice as many as before, at most `max_pause`.

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
        """The draft pays: the next pause is of one round."""
        self._set(1)

    def is_over(self, *, hopeless: bool) -> bool:
        """Let one more round pass; True if the draft is to be tried in it.

        Args:
            hopeless: Even a perfect draft would not pay, so that every `max_pause`-th round is enough.
        """
        self.passed += 1
        if self.passed < (self._longest if hopeless else self._length):
            return False
        self.passed = 0
        self._set(min(2 * self._length, self._longest))
        return True

    def _set(self, length: int) -> None:
        self._length = self._track_record.pause = length
