"""Pauses of a draft model that does not pay, and when to try it again."""

from __future__ import annotations

from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.control.track_record import TrackRecord

_TRIALS_OF_READING = 4  # that a session makes for one reading of its prompt


class Pause:
    """Rounds without the draft model. Each trial doubles the next pause, up to `max_pause` rounds.

    A session begins with a share of the last session's pause, at most `max_first_pause` rounds.

    The trials of all sessions lose at most `trial_share` of all sessions' time, plus one trial. A trial makes a debt of
    its expected time. Its accepted nodes and `trial_share` of each round's time repay the debt; until then there is no
    other trial.

    If the draft has not read the prompt, a trial reads it. Its debt includes the next trials of the session, which may
    follow at once, after the shortest pauses.

    Attributes:
        passed: Rounds of this pause so far.
        tries: Whether the draft model is tried in this round.
    """

    def __init__(self, track_record: TrackRecord, control: ControlSettings) -> None:
        self.passed = 0
        self.tries = False
        self._track_record = track_record
        self._share = control.trial_share
        self._longest = control.max_pause
        self._length = min(max(track_record.pause // control.first_pause_divisor, 1), control.max_first_pause)
        self._paid = 0  # further trials that the debt includes

    def observe(self, seconds: float, saved: float) -> None:
        """Take in a round: its seconds, and the seconds that the draft's accepted nodes saved."""
        repaid = self._share * seconds
        if self.tries:
            repaid += saved
        self._track_record.trial_debt = max(self._track_record.trial_debt - repaid, 0.0)
        self.tries = False

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
        if reading or not self._paid:
            if self._track_record.trial_debt > 0.0:
                return False
            self._paid = _TRIALS_OF_READING if reading else 1
            self._track_record.trial_debt = reading + self._paid * seconds
            if reading:
                self._length = 1
        self._paid -= 1
        self.passed = 0
        self.tries = True
        self._set(min(2 * self._length, self._longest))
        return True

    def _set(self, length: int) -> None:
        self._length = self._track_record.pause = length
