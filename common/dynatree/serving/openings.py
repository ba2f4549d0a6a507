"""Opened calls whose first message has not arrived."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from dynatree.common.errors import IdleSessionError, ServiceBusyError

FIRST_MESSAGE_SECONDS = 30.0  # after a call's headers; enough for 4 MiB at 1.2 Mbit/s
MAX_OPENINGS = 1024


class Openings:
    """Reads the first message of each call within a time limit.

    A call without a message costs its caller nothing and the server 13 KiB. So when too many calls wait, the one that
    has waited longest is ended. A caller that sends its message right after the headers is not affected.

    Args:
        seconds: Maximum seconds until the first message.
        most: Maximum number of calls that wait for their first message.
    """

    def __init__(self, seconds: float = FIRST_MESSAGE_SECONDS, most: int = MAX_OPENINGS) -> None:
        self._seconds = seconds
        self._most = most
        self._waiting: dict[asyncio.Timeout, None] = {}  # oldest first

    async def first(self, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """The first message of a call; `grpc.aio.EOF` if it has none.

        Raises:
            IdleSessionError: The message did not arrive in time.
            ServiceBusyError: Too many calls wait for their first message, and this one has waited longest.
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
                raise IdleSessionError(f"no request arrived within {self._seconds:g} s of the call's headers") from None
            raise ServiceBusyError(
                f"{self._most} later calls are waiting for their first message, which is the limit"
            ) from None
        finally:
            self._waiting.pop(deadline, None)

    def _end_oldest(self) -> None:
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        oldest.reschedule(asyncio.get_running_loop().time())
