"""Fault watch: a trial of the device after several consecutive choices from numbers that are not finite.

A fault may be due to the request: its tokens overflow in float16 at every attempt. Then only its session ends. If the
device yields no finite numbers even for a single fixed token, it has failed and would end every later session too.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from dynatree.common.errors import DeviceFailedError, NotFiniteError
from dynatree.common.messages import VerifyTimings
from dynatree.serving.call_tracker import is_poison
from dynatree.verify.accept import Verdict
from dynatree.verify.scheduler import PassRunner
from dynatree.verify.verifier import Part, Result

log = logging.getLogger(__name__)

MOST_FAULTS = 5  # consecutive failed choices after which the device is tried


class FaultWatch:
    """Inspects the results of passes for choices that failed.

    Args:
        count: Callback with the number of failed choices in a pass.
        sound: Function that tries a forward pass; whether the device still computes finite numbers.
    """

    def __init__(self, count: Callable[[int], None], sound: Callable[[], Awaitable[bool]]) -> None:
        self._count = count
        self._sound = sound
        self._in_a_row = 0

    def over(self, run: PassRunner) -> PassRunner:
        """Wrap a pass runner, so that the results of its passes are inspected."""

        async def watched(parts: Sequence[Part]) -> tuple[Sequence[Result], VerifyTimings]:
            results, timings = await run(parts)
            return await self.judged(results), timings

        return watched

    async def judged(self, results: Sequence[Result]) -> Sequence[Result]:
        """The results of a pass; if the device has failed, its faults become `DeviceFailedError`.

        Raises:
            Exception: The trial's error, if this process has lost its device.
        """
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
        if await self._is_sound():
            return results
        failed = DeviceFailedError(f"{in_a_row} choices in a row had logits that are not finite, and a trial failed")
        return [failed if isinstance(each, NotFiniteError) else each for each in results]

    async def _is_sound(self) -> bool:
        """Whether a trial finds the device sound; a trial that raises an error does not.

        The pass has committed, so the error must not reach the scheduler, which would run the pass's parts again. Where
        the process has lost its device, each of them fails at once, and the error ends the service.
        """
        try:
            return await self._sound()
        except Exception as error:
            if is_poison(error):
                raise
            log.error("the trial of the device failed", exc_info=error)
            return False
