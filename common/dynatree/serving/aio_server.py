"""gRPC's asynchronous server, protected against calls that would stop it.

gRPC 1.84 and 1.85 decode the path of a call to an unknown method within the loop that accepts calls. A path that is not
UTF-8 raises an exception there, and the server stops: a single frame from any peer is enough. Calls to known methods
arrive by another way. So this module answers calls to unknown methods itself, before that loop receives them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]


def aio_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """A server for registered methods, which generated code uses; it does not support generic handlers."""
    plain = cygrpc.AioServer
    if not hasattr(plain, "add_registered_method_handlers"):  # there a decoding error ends only its call
        return grpc.aio.server(interceptors=interceptors, options=options)
    cygrpc.AioServer = _AioServer
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = plain


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]  # has no annotations
    async def _request_call(self) -> Any:
        """Answer every call to an unknown method with UNIMPLEMENTED; never returns a call to gRPC's own loop."""
        loop, answering = asyncio.get_running_loop(), set()
        nothing = cygrpc._MethodResolver([], {})
        while True:
            state = await super()._request_call()
            answer = cygrpc._handle_rpc("", nothing, (), state, loop, False)  # UNIMPLEMENTED
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, state, loop, ""))
            answering.add(task)  # the event loop keeps only a weak reference
            task.add_done_callback(answering.discard)
