"""The cost model c(rows, sessions): seconds of a pass, measured at startup and corrected by observed passes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from dynatree.common.model_info import ForwardCost

STEP = 0.2  # weight of the latest pass in a correction
REACH = 0.7  # natural logarithm of the ratio of two sizes over which a correction decays to 1 / e
GUESS = ((1, 0.05), (65, 0.1))  # (rows, seconds) used without measurements


class PassCosts:
    """Seconds of a pass over R rows of S sessions:

        c(R, S) = f(R) m(R) + a (S - 1)

    m is the curve measured for one session, interpolated linearly and extrapolated beyond its last two sizes. f
    corrects m near the sizes of observed passes with one session. a is the cost of each additional session, which reads
    its own context; passes with several sessions correct it. c never decreases with rows.
    """

    def __init__(self, measured: Iterable[ForwardCost]) -> None:
        points = sorted((each.rows, each.seconds) for each in measured if each.rows and 0.0 < each.seconds < math.inf)
        if len(points) < 2:
            points = list(GUESS)
        self._rows = [rows for rows, _ in points]
        self._measured = list(accumulate((seconds for _, seconds in points), max))
        self._factors = [1.0] * len(points)
        self._seconds = self._measured
        self._of_a_session = 0.0

    def seconds(self, rows: int, sessions: int = 1) -> float:
        """Seconds of a pass over `rows` rows of `sessions` sessions; 0 without rows."""
        if not rows:
            return 0.0
        return _on_lines(self._rows, self._seconds, rows) + self._of_a_session * (sessions - 1)

    def observe(self, rows: int, sessions: int, seconds: float) -> None:
        """Correct the model by the measured seconds of a pass."""
        if sessions > 1:
            further = (seconds - self.seconds(rows)) / (sessions - 1)
            self._of_a_session = max(self._of_a_session + STEP * (further - self._of_a_session), 0.0)
            return
        ratio = seconds / _on_lines(self._rows, self._measured, rows)
        for place, size in enumerate(self._rows):
            weight = STEP * math.exp(-abs(math.log(size / rows)) / REACH)
            self._factors[place] += weight * (ratio - self._factors[place])
        corrected = (factor * seconds for factor, seconds in zip(self._factors, self._measured, strict=True))
        self._seconds = list(accumulate(corrected, max))

    def most_rows(self, seconds: float, at_most: int, sessions: int = 1) -> int:
        """The largest number of rows, up to `at_most`, for which a pass of `sessions` takes at most `seconds`."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(middle, sessions) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low


def _on_lines(sizes: list[int], values: list[float], rows: int) -> float:
    after = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
    low, high = sizes[after - 1], sizes[after]
    least, most = values[after - 1], values[after]
    if rows <= sizes[0]:
        return values[0]
    return max(least + (most - least) * (rows - low) / (high - low), 0.0)
