"""Open calls of health and reflection, shared fairly by the connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dynatree.common.errors import ServiceBusyError
from dynatree.serving.fair_queue import FairQueue

MAX_STANDARD_CALLS = 1024


@dataclass(eq=False)
class _Call:
    principal: str  # here the connection, since these calls need no token
    deadline: asyncio.Timeout
    size: int = 1
    displaced: bool = False


class StandardCalls:
    """Bounds the open calls of health and reflection, which need no token and may last forever.

    If too many are open, the newest call of the connection with the most of them is ended. So a connection that has no
    more than its share keeps its calls, however many calls the others make. The connections of a Unix socket have no
    names of their own and count as one.

    Args:
        most: Maximum number of open calls.
    """

    def __init__(self, most: int = MAX_STANDARD_CALLS) -> None:
        self._most = most
        self._open: FairQueue[_Call] = FairQueue(most)

    @asynccontextmanager
    async def counted(self, connection: str) -> AsyncGenerator[None]:
        """Count the current call of a connection while the context is open.

        Raises:
            ServiceBusyError: Too many calls are open, and the connection has more of them than others.
        """
        displaced = self._open.displaced_by(connection, 1)
        if displaced is None:
            raise self._busy()
        for each in displaced:
            self._open.remove(each)
            each.displaced = True
            each.deadline.reschedule(asyncio.get_running_loop().time())
        call = _Call(connection, asyncio.timeout(None))
        try:
            async with call.deadline:
                self._open.append(call)
                yield
        except TimeoutError:
            if call.displaced:
                raise self._busy() from None
            raise
        finally:
            if not call.displaced:
                self._open.remove(call)

    def _busy(self) -> ServiceBusyError:
        return ServiceBusyError(f"{self._most} calls of health and reflection are open, the most that may")
