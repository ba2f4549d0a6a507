"""gRPC's asynchronous server, which no call can end.

gRPC 1.84 and 1.85 decode the path of a call to an unknown method within the loop that takes calls. A path that is no
UTF-8 raises there, and the server stops: one frame of anybody would do. Calls to known methods come another way. So
those to unknown ones are answered here, whatever their path, before that loop gets them.
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
    """A server of methods that are registered, as generated code does; it has no generic handlers."""
    plain = cygrpc.AioServer
    if not hasattr(plain, "add_registered_method_handlers"):  # it decodes paths where an error ends the call alone
        return grpc.aio.server(interceptors=interceptors, options=options)
    cygrpc.AioServer = _AioServer
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = plain


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]  # has no annotations
    async def _request_call(self) -> Any:
        """The next call to an unknown method, of which none is left to gRPC's own loop."""
        loop, answering = asyncio.get_running_loop(), set()
        nothing = cygrpc._MethodResolver([], {})
        while True:
            state = await super()._request_call()
            answer = cygrpc._handle_rpc("", nothing, (), state, loop, False)  # UNIMPLEMENTED
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, state, loop, ""))
            answering.add(task)  # the loop itself would let go of it
            task.add_done_callback(answering.discard)
