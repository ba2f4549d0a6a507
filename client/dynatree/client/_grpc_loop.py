"""The event loop of gRPC's asyncio calls, which runs in its own thread, and the bridge to it from other event loops.

gRPC has one completion queue for all event loops of a process. An operation of a cancelled call may end after its event
loop was closed; the loop that receives the event then prints "Event loop is closed". So all calls run on one loop that
lives as long as the process, and a client works with any number of event loops, at once or one after the other.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Generic, Self, TypeVar

import grpc

AHEAD = 64  # items buffered for a slow reader; further items wait in gRPC, and finally at the server

T = TypeVar("T")


class _GrpcLoop:
    """The event loop and its thread, which the first call starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, callback: Callable[[], object]) -> None:
        """Schedule a callback on the loop; may be called from any thread."""
        loop = self._loop or self._started()  # no lock once it runs: the garbage collector may call this at any point
        loop.call_soon_threadsafe(callback)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.call_soon(grpc.aio.init_grpc_aio)  # keeps gRPC's poller alive without channels
                threading.Thread(target=self._loop.run_forever, name="dynatree-client", daemon=True).start()
            return self._loop


_GRPC_LOOP = _GrpcLoop()


class FromGrpcLoop(Generic[T]):
    """An asynchronous iterator over the items of another one that runs on gRPC's loop.

    It belongs to the event loop on which it was created.

    Args:
        iterate: creates the other iterator; called on gRPC's loop.
    """

    def __init__(self, iterate: Callable[[], AsyncGenerator[T]]) -> None:
        self._iterate = iterate
        self._reader = asyncio.get_running_loop()
        self._items: deque[T | BaseException] = deque()
        self._arrived = asyncio.Event()  # not asyncio.Queue, which prints an error if its loop closes while it waits
        self._room = asyncio.Semaphore(AHEAD)
        self._taken = 0
        self._task: asyncio.Task[None] | None = None
        _GRPC_LOOP.call(self._start)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Wait for the next item, and return it, or raise the iterator's error."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items[0]
        if isinstance(item, BaseException):
            # The error's traceback refers to this frame, which must not refer to the error: only a garbage collection
            # would free such a cycle.
            self._items[0] = StopAsyncIteration()
            try:
                raise item
            finally:
                del item
        self._items.popleft()
        self._taken += 1
        if self._taken % (AHEAD // 2) == 0:
            _GRPC_LOOP.call(self._make_room)
        return item

    def cancel(self) -> None:
        """Cancel the iterator wherever it waits; may be called from any thread."""
        _GRPC_LOOP.call(self._cancel)

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _make_room(self) -> None:
        for _ in range(AHEAD // 2):
            self._room.release()

    async def _run(self) -> None:
        try:
            async with aclosing(self._iterate()) as items:
                async for item in items:
                    await self._room.acquire()
                    self._tell(item)
            self._tell(StopAsyncIteration())
        except asyncio.CancelledError:
            with suppress(RuntimeError):  # as below
                self._tell(asyncio.CancelledError())  # without a traceback, which would refer to this iterator
        except BaseException as error:
            with suppress(RuntimeError):  # the reader's loop is closed
                self._tell(error)

    def _tell(self, item: T | BaseException) -> None:
        self._items.append(item)
        self._reader.call_soon_threadsafe(self._arrived.set)


async def on_grpc_loop(work: Callable[[], Awaitable[T]]) -> T:
    """Await `work()` on gRPC's loop, and return its result; it is cancelled with the waiting task."""

    async def once() -> AsyncGenerator[T]:
        yield await work()

    results = FromGrpcLoop(once)
    try:
        return await anext(results)
    finally:
        results.cancel()
