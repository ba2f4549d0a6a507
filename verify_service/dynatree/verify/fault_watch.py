"""The watch over a target whose numbers are not finite: after a few faults with no good commit between, it has failed.

A single fault may be the request's, whose tokens overflow in float16: the session ends, and nobody else's. A device or
a checkpoint that computes nothing else would end every session that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynatree.common.errors import DeviceFailedError, NotFiniteError
from dynatree.verify.accept import Verdict
from dynatree.verify.scheduler import PassRunner
from dynatree.verify.verifier import Part, Result, Timings

MOST_FAULTS = 5  # choices that failed one after the other; a draft service tries a session twice


class FaultWatch:
    """Looks at the results of passes.

    Args:
        count: Told how many choices of a pass failed.
    """

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._in_a_row = 0

    def over(self, run: PassRunner) -> PassRunner:
        """Run passes, and look at what they come to."""

        async def watched(parts: Sequence[Part]) -> tuple[Sequence[Result], Timings]:
            results, timings = await run(parts)
            return self.judged(results), timings

        return watched

    def judged(self, results: Sequence[Result]) -> Sequence[Result]:
        """The results of a pass; the faults are those of a device that has failed where it has."""
        faults = sum(isinstance(each, NotFiniteError) for each in results)
        if faults:
            self._count(faults)
        if any(isinstance(each, Verdict) for each in results):
            self._in_a_row = 0
        else:
            self._in_a_row += faults
        if not faults or self._in_a_row < MOST_FAULTS:
            return results
        failed = DeviceFailedError(f"{self._in_a_row} choices in a row had numbers that are not finite")
        return [failed if isinstance(each, NotFiniteError) else each for each in results]
