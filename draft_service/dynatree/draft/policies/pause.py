"""Pauses of a draft model that does not pay, and when to try it again."""

from __future__ import annotations

from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.control.track_record import TrackRecord

_TRIALS_OF_READING = 4  # that a session makes for one reading of its prompt


class Pause:
    """Rounds without the draft model. Each trial doubles the next pause, up to `max_pause` rounds.

    A session begins with a share of the last session's pause, at most `max_first_pause` rounds. If it begins with that
    most, the draft has not paid for long, and its trials take at most `trial_share` of all sessions' time.

    If the draft has not read the prompt, the first trial reads it, within the same share of the time. The shortest
    pauses follow, so that the session makes several trials of one reading.

    Attributes:
        passed: Rounds of this pause so far.
    """

    def __init__(self, track_record: TrackRecord, control: ControlSettings) -> None:
        self.passed = 0
        self._track_record = track_record
        self._share = control.trial_share
        self._longest = control.max_pause
        self._length = min(max(track_record.pause // control.first_pause_divisor, 1), control.max_first_pause)
        self._is_long = self._length == control.max_first_pause > 1

    def spent(self, seconds: float) -> None:
        """Take in the seconds of a round."""
        self._track_record.trial_seconds += self._share * seconds

    def reset(self) -> None:
        """Shorten the next pause to one round, because the draft model pays."""
        self._set(1)

    def is_over(self, seconds: float, reading: float, *, hopeless: bool) -> bool:
        """Count one more round, and return whether the draft model is tried in it.

        Args:
            seconds: Expected time of the trial.
            reading: Expected time in which the draft model first reads the prompt; 0 if it has read it.
            hopeless: Whether even a perfect draft would not pay, so that a trial every `max_pause` rounds is enough.
        """
        self.passed += 1
        if self.passed < (self._longest if hopeless else self._length):
            return False
        trials = _TRIALS_OF_READING if reading else self._is_long
        cost = reading + trials * seconds
        if self._track_record.trial_seconds < cost:
            return False
        self._track_record.trial_seconds -= cost
        self.passed = 0
        if reading:
            self._is_long, self._length = False, 1
        self._set(min(2 * self._length, self._longest))
        return True

    def _set(self, length: int) -> None:
        self._length = self._track_record.pause = length
