"""The draft that new requests use, and the replaced one until its last request ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dynatree.draft.completion.generation import Backend


@dataclass(eq=False)
class _Use:
    """A backend and the number of requests that use it."""

    backend: Backend
    requests: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)


class DraftsInUse:
    """Gives each request the backend that is current when the request arrives, until the request ends."""

    def __init__(self, backend: Backend) -> None:
        self._use = _Use(backend)

    @property
    def current(self) -> Backend:
        """The backend of new requests."""
        return self._use.backend

    @contextmanager
    def using(self) -> Iterator[Backend]:
        """The current backend, for a request that lasts as long as the context."""
        use = self._use
        use.requests += 1
        try:
            yield use.backend
        finally:
            use.requests -= 1
            if use is not self._use and not use.requests:
                use.unused.set()

    def replace(self, backend: Backend) -> Awaitable[object]:
        """Give new requests another backend, and return an awaitable of the end of the last request on the old one."""
        old, self._use = self._use, _Use(backend)
        if not old.requests:
            old.unused.set()
        return old.unused.wait()
