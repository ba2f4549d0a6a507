"""A proxy between two gRPC peers that can delay a message, drop it or cut the stream at any message.

It forwards the bytes of any method, and calls a hook for every message before forwarding it. The message is delayed as
long as the hook waits; a hook that never returns drops the message and all that follow on the stream.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from tests.support.loops import end_other_tasks

VERIFY = "/dynatree.v1.VerifyService/Verify"
GENERATE = "/dynatree.v1.DraftService/Generate"

# Takes the method, whether the message is a request, its number on the stream (0 is the first), and its bytes.
Hook = Callable[[str, bool, int, bytes], Awaitable[None]]


async def forward_all(method: str, is_request: bool, number: int, message: bytes) -> None:
    """A hook that forwards every message at once."""


class GrpcProxy(grpc.GenericRpcHandler):
    """Listens at `address`, and forwards to `target`; both are gRPC addresses."""

    def __init__(self, address: str, target: str) -> None:
        self.address = address
        self.hook: Hook = forward_all
        self._target = target
        self._streams: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        """Start to listen."""
        options = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200))
        self._channel = grpc.aio.insecure_channel(self._target, options=options)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(self.address)
        await self._server.start()

    def cut(self) -> None:
        """Break every open stream."""
        for stream in self._streams:
            if not stream.done():
                stream.set_result(None)

    async def stop(self) -> None:
        """End every stream and stop listening."""
        await self._server.stop(0)
        await self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Handle every method as a bidirectional stream, which all methods are on the wire."""
        method = details.method

        async def handler(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await self._forward(method, context)

        return grpc.stream_stream_rpc_method_handler(handler)  # type: ignore[arg-type]

    async def _forward(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        own = ("user-agent", "grpc-accept-encoding", "content-type", "te")
        metadata = [(key, value) for key, value in context.invocation_metadata() or () if key not in own]
        call: Any = self._channel.stream_stream(method)(timeout=context.time_remaining(), metadata=metadata)

        async def requests() -> None:
            number = 0
            while (message := await context.read()) is not grpc.aio.EOF:
                await self.hook(method, True, number, message)
                await call.write(message)
                number += 1
            await call.done_writing()

        # gRPC refuses a status during a write, and the peer would wait for ever
        sending = asyncio.Lock()

        async def responses() -> None:
            number = 0
            while (message := await call.read()) is not grpc.aio.EOF:
                await self.hook(method, False, number, message)
                async with sending:
                    await context.write(message)
                number += 1

        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams.add(broken)
        writing, reading = asyncio.ensure_future(requests()), asyncio.ensure_future(responses())
        try:
            await asyncio.wait({reading, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                await sending.acquire()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                await context.abort(code, await call.details() or "", tuple(await call.trailing_metadata() or ()))
        finally:
            self._streams.discard(broken)
            for each in (writing, reading):
                each.cancel()
            call.cancel()
            await asyncio.gather(writing, reading, return_exceptions=True)


class ProxyLoop:
    """The event loop of the proxies, in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        """Run a coroutine to its end and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def call(self, function: Callable[[], None]) -> None:
        """Schedule a call in the loop's thread."""
        self._loop.call_soon_threadsafe(function)

    @contextmanager
    def proxy(self, address: str, target: str) -> Iterator[GrpcProxy]:
        """Run a proxy within a context."""
        proxy = GrpcProxy(address, target)
        self.run(proxy.start())
        try:
            yield proxy
        finally:
            self.run(proxy.stop())

    def close(self) -> None:
        """End what is left of gRPC's tasks, which would print tracebacks when they are garbage; stop the thread."""
        self.run(end_other_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
