"""The wait that pays: holding a pass back for the trees of sessions that are about to come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynatree.verify.pass_costs import PassCosts

GAP_STEP = 0.3  # weight of one gap in a session's usual gap
LATE_SPREADS = 2.0  # mean deviations from its usual gap after which a silent session is not waited for


@dataclass(eq=False)
class Pace:
    """When a session's last answer went out, how long it usually takes to come back, and with how many rows.

    The gap is that of a session for which the next pass waits. A pass that runs meanwhile may slow the draft down, as
    on one machine, so what comes during a pass only bounds the gap: from below by the time before that pass.
    """

    answered: float | None = None  # None while it waits for a pass
    gap: float | None = None
    spread: float = 0.0  # mean absolute deviation of the gap
    rows: float = 1.0
    _least: float | None = None  # seconds after the answer at which a pass ran without it

    def answer(self, now: float, rows: int) -> None:
        """It has its answer, of a pass in which it had so many rows."""
        self.answered, self.rows, self._least = now, float(rows), None

    def missed(self, now: float) -> None:
        """A pass runs without it."""
        if self.answered is not None and self._least is None:
            self._least = now - self.answered

    def came(self, now: float) -> None:
        """Its next tree is here."""
        if self.answered is not None:
            gap = now - self.answered
            if self.gap is None:
                self.gap = gap if self._least is None else (self._least + gap) / 2
                self.spread = self.gap / 2
            elif self._least is None:
                self.spread += GAP_STEP * (abs(gap - self.gap) - self.spread)
                self.gap += GAP_STEP * (gap - self.gap)
            else:
                self.gap = min(max(self.gap, self._least), gap)
        self.answered = None

    def expected(self, now: float) -> float | None:
        """In how many seconds its next tree should come; None where nobody can say, or it should be here long since."""
        if self.answered is None or self.gap is None:
            return None
        usual = self.answered + self.gap - now
        if usual > 0:
            return usual
        late = usual + LATE_SPREADS * self.spread
        return late if late > 0 else None


@dataclass(frozen=True)
class Ready:
    """What a pass would have that runs now.

    Attributes:
        sessions: In it.
        rows: Of all of them.
        gap: Seconds that they usually take to come back.
    """

    sessions: int
    rows: int
    gap: float


def worth_waiting(
    ready: Ready, coming: Iterable[tuple[float, float]], costs: PassCosts, longest: float
) -> float | None:
    """For how many seconds to wait; None if running now is better.

    Let A be the rows that are ready and B those that are late by d, and g the gap of those who are ready. Waiting
    serves all after d + c(A + B). Running A now leaves the late two ways: a pass of their own after c(A) + c(B), which
    those who are ready find before them when they come back; or the next pass of all, after c(A) + g + c(A + B). So
    wait iff both are worse:

        n_late (c(A) + c(B) - d - c(A + B)) + n_ready max(c(B) - g, 0) > n_ready (d + c(A + B) - c(A))
        n_late (c(A) + g - d)                                          > n_ready (d + c(A + B) - c(A))

    Args:
        ready: A.
        coming: Of each session that is expected: the seconds until then, and its rows.
        costs: c.
        longest: Seconds that nobody is held up beyond.
    """
    now_only = costs.seconds(ready.rows, ready.sessions)
    best, until, late_rows = 0.0, None, 0.0
    for late, (delay, rows) in enumerate(sorted(coming), start=1):
        if delay >= longest:
            break
        late_rows += rows
        behind = costs.seconds(int(late_rows), late)
        both = costs.seconds(int(ready.rows + late_rows), ready.sessions + late)
        own_pass = late * (now_only + behind - delay - both) + ready.sessions * max(behind - ready.gap, 0.0)
        next_pass = late * (now_only + ready.gap - delay)
        gain = min(own_pass, next_pass) - ready.sessions * (delay + both - now_only)
        if gain > best:
            best, until = gain, delay
    return until
