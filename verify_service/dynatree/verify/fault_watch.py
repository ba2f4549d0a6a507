"""The watch over a target whose numbers are not finite: after a few faults with no good commit between, it is tried.

A fault may be the request's, whose tokens overflow in float16, however often it is sent: its session ends, and nobody
else's. A device that computes no finite number for one token alone has failed: it would end every session that comes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from dynatree.common.errors import DeviceFailedError, NotFiniteError
from dynatree.verify.accept import Verdict
from dynatree.verify.scheduler import PassRunner
from dynatree.verify.verifier import Part, Result, Timings

MOST_FAULTS = 5  # choices that fail one after the other before the device is tried


class FaultWatch:
    """Looks at the results of passes.

    Args:
        count: Told how many choices of a pass failed.
        sound: Whether the device still computes finite numbers, by a forward pass of its own.
    """

    def __init__(self, count: Callable[[int], None], sound: Callable[[], Awaitable[bool]]) -> None:
        self._count = count
        self._sound = sound
        self._in_a_row = 0

    def over(self, run: PassRunner) -> PassRunner:
        """Run passes, and look at what they come to."""

        async def watched(parts: Sequence[Part]) -> tuple[Sequence[Result], Timings]:
            results, timings = await run(parts)
            return await self.judged(results), timings

        return watched

    async def judged(self, results: Sequence[Result]) -> Sequence[Result]:
        """The results of a pass; its faults become those of the device where that has failed."""
        faults = sum(isinstance(each, NotFiniteError) for each in results)
        if faults:
            self._count(faults)
        if any(isinstance(each, Verdict) for each in results):
            self._in_a_row = 0
        else:
            self._in_a_row += faults
        if not faults or self._in_a_row < MOST_FAULTS:
            return results
        in_a_row, self._in_a_row = self._in_a_row, 0
        if await self._sound():
            return results
        failed = DeviceFailedError(f"{in_a_row} choices in a row had numbers that are not finite, and so had a trial")
        return [failed if isinstance(each, NotFiniteError) else each for each in results]
