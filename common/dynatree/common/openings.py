"""Calls that were begun, and whose first message has not come."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from dynatree.common.errors import IdleSessionError, ServiceBusyError

FIRST_MESSAGE_SECONDS = 30.0  # from a call's headers; 4 MiB come within it at 1.2 Mbit/s
MAX_OPENINGS = 1024


class Openings:
    """Reads the first message of each call, which must come in time.

    A call without a message costs its caller nothing, and the server 13 KiB. So of those that wait the one that has
    waited longest is ended for one more than there may be: a caller whose message follows its headers is never it.

    Args:
        seconds: The longest that a first message may take.
        most: Calls that may wait for theirs.
    """

    def __init__(self, seconds: float = FIRST_MESSAGE_SECONDS, most: int = MAX_OPENINGS) -> None:
        self._seconds = seconds
        self._most = most
        self._waiting: dict[asyncio.Timeout, None] = {}  # the longest first

    async def first(self, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """The first message of a call; `grpc.aio.EOF` where it has none.

        Raises:
            IdleSessionError: It did not come in time.
            ServiceBusyError: Too many calls wait for theirs, this one longest.
        """
        deadline = asyncio.timeout(self._seconds)
        try:
            async with deadline:
                self._waiting[deadline] = None
                if len(self._waiting) > self._most:
                    self._end_oldest()
                return await context.read()
        except TimeoutError:
            if deadline in self._waiting:
                raise IdleSessionError(f"no request came within {self._seconds:g} s of the call's headers") from None
            raise ServiceBusyError(
                f"{self._most} later calls wait for their first message, the most that may"
            ) from None
        finally:
            self._waiting.pop(deadline, None)

    def _end_oldest(self) -> None:
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        oldest.reschedule(asyncio.get_running_loop().time())
