"""Hold: delaying a pass for trees that are about to arrive, if the delay pays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynatree.verify.pass_costs import PassCosts

GAP_STEP = 0.3  # weight of the latest gap in a session's mean gap
LATE_SPREADS = 2.0  # mean deviations beyond its usual gap after which a session is no longer expected


@dataclass(eq=False)
class Pace:
    """The rhythm of a session: time of its last answer, usual gap until its next tree, and the tree's rows.

    The gap is the time between answer and next tree while no pass runs. A pass that runs meanwhile may slow the draft
    down, for example on a shared machine. So a tree that arrives during or after such a pass only bounds the gap: from
    above by the time until the tree arrived, and from below by the time until the pass began.
    """

    answered: float | None = None  # None while the session waits for a pass
    gap: float | None = None
    spread: float = 0.0  # mean absolute deviation of the gap
    rows: float = 1.0
    _least: float | None = None  # seconds from the answer to the first pass that ran without the session

    def answer(self, now: float, rows: int) -> None:
        """Record that the session was answered at `now`, after a pass in which it had `rows` rows."""
        self.answered, self.rows, self._least = now, float(rows), None

    def missed(self, now: float) -> None:
        """Record that a pass without the session begins at `now`."""
        if self.answered is not None and self._least is None:
            self._least = now - self.answered

    def came(self, now: float) -> None:
        """Record that the session's next tree arrived at `now`, and update the gap."""
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
        """Seconds until the session's next tree should arrive; None if unknown or long overdue."""
        if self.answered is None or self.gap is None:
            return None
        usual = self.answered + self.gap - now
        if usual > 0:
            return usual
        late = usual + LATE_SPREADS * self.spread
        return late if late > 0 else None


@dataclass(frozen=True)
class Ready:
    """The contents of a pass that would run now.

    Attributes:
        sessions: Number of sessions in the pass.
        rows: Rows of all sessions in the pass.
        gap: Mean seconds from a session's answer to its next tree.
    """

    sessions: int
    rows: int
    gap: float


def worth_waiting(
    ready: Ready, coming: Iterable[tuple[float, float]], costs: PassCosts, longest: float
) -> float | None:
    """Seconds to wait for coming trees; None if running the pass now is better.

    Let A be the ready rows, B the rows that arrive d seconds later, and g the gap of the ready sessions. Waiting serves
    all sessions after d + c(A + B). If A runs now, the late sessions have two options. They get a separate pass after
    c(A) + c(B), which delays the ready sessions when their next trees arrive. Or they join the next common pass, after
    c(A) + g + c(A + B). So wait if and only if both options are worse:

        n_late (c(A) + c(B) - d - c(A + B)) + n_ready max(c(B) - g, 0) > n_ready (d + c(A + B) - c(A))
        n_late (c(A) + g - d)                                          > n_ready (d + c(A + B) - c(A))

    Args:
        ready: The sessions and rows that are ready, A.
        coming: Seconds until arrival and rows, for each expected session.
        costs: Cost model c.
        longest: Maximum seconds to wait.
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
