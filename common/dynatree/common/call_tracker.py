"""The open calls of a server, and the status with which each ends."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from dynatree.common.errors import IdleSessionError, ServiceBusyError, ServiceError
from dynatree.common.grpc_options import RETRY_AFTER
from dynatree.common.limits import IDLE_SECONDS

log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]


class CallTracker(grpc.aio.ServerInterceptor):
    """The open calls of this package's services, each ended with the code that its error has.

    Domain errors have their gRPC codes; anything else becomes INTERNAL with an id, its detail only in the log.
    """

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        """`idle_seconds`: how long a call may wait for a peer that reads nothing."""
        self._idle_seconds = idle_seconds
        # each call's task, which ends when its status is sent, and a future that is done when its handler is
        self._open: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        self._ending = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap the handlers of this package; health and reflection map their own errors.

        Its bidirectional handlers read and write through the context, so they are awaited like unary ones.
        """
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/dynatree."):
            return handler  # type: ignore[no-any-return]
        if handler.unary_unary:
            return handler._replace(unary_unary=self._awaited(handler.unary_unary))  # type: ignore[no-any-return]
        if handler.unary_stream:
            return handler._replace(unary_stream=self._stream(handler.unary_stream))  # type: ignore[no-any-return]
        return handler._replace(stream_stream=self._awaited(handler.stream_stream))  # type: ignore[no-any-return]

    async def end(self, grace: float) -> None:
        """Wait `grace` seconds for the open calls, then end those that are left, and wait for them to clean up."""
        if self._open:
            await asyncio.wait(self._open, timeout=grace)
        self._ending = True
        for task, handled in self._open.items():
            if not handled.done():
                task.cancel()
        if self._open:
            await asyncio.wait(self._open.values())

    def _awaited(self, behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def mapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            handled = self._begin()
            whole = _WholeMessages(context, self._idle_seconds)
            try:
                return await behavior(request, whole)
            except (Exception, asyncio.CancelledError) as error:
                failure = error
            finally:
                handled.set_result(None)
            return await self._abort(failure, whole)

        return mapped

    def _stream(self, behavior: Callable[..., AsyncIterator[Any]]) -> Callable[..., Awaitable[Any]]:
        """Written from here, not by gRPC, so that the generator is closed before the call ends, whatever ends it."""

        async def written(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with aclosing(behavior(request, context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    await context.write(response)

        return self._awaited(written)

    def _begin(self) -> asyncio.Future[None]:
        """The task that runs a call is gRPC's own, and ends when the status is sent."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = asyncio.get_running_loop().create_future()
        task.add_done_callback(self._open.pop)
        if self._ending:
            task.cancel()
        return self._open[task]

    async def _abort(self, error: BaseException, context: _WholeMessages) -> NoReturn:
        if isinstance(error, asyncio.CancelledError):
            if not self._ending or context.cancelled():
                raise error
            try:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the service is shutting down")
            except Exception as told:
                raise (told if isinstance(told, grpc.aio.AbortError) else error) from None  # or the peer has just left
        if isinstance(error, ServiceError):
            await context.abort(grpc.StatusCode[error.code], str(error), _trailing_metadata(error))
        if isinstance(error, grpc.aio.AbortError):
            raise error
        request_id = uuid.uuid4().hex[:12]
        log.error("request %s failed", request_id, exc_info=error)
        await context.abort(
            grpc.StatusCode.INTERNAL, f"internal error; the service's log has it as request {request_id}"
        )


class _WholeMessages:
    """A call's context whose messages are sent whole, even where the task that writes them is cancelled meanwhile.

    gRPC notes that a call's initial metadata are sent when the first write returns (grpc/grpc pull request 21232).
    After a write that was cancelled it would send them again with the status, which its core refuses: the client would
    not be told why its call ended.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], idle_seconds: float) -> None:
        self._context = context
        self._idle_seconds = idle_seconds
        self._writing: asyncio.Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """As the context's own, but not for longer than a peer may read nothing.

        Raises:
            IdleSessionError: The peer read nothing for too long.
        """
        self._writing = asyncio.ensure_future(self._context.write(message))
        self._writing.add_done_callback(_retrieve_exception)
        written, _ = await asyncio.wait([self._writing], timeout=self._idle_seconds)
        if not written:
            self._writing = None  # the status goes out behind it, should the peer read again
            raise IdleSessionError(f"the client read nothing for {self._idle_seconds:g} s")
        await self._writing

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Metadata = ()) -> NoReturn:
        """As the context's own, after the message that is on its way, if one is."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._context.abort(code, details, trailing_metadata)


def _trailing_metadata(error: ServiceError) -> Metadata:
    """When to try again, where that is known."""
    if not isinstance(error, ServiceBusyError) or error.retry_after is None:
        return ()
    return ((RETRY_AFTER, str(max(1, round(1e3 * error.retry_after)))),)


def _retrieve_exception(writing: asyncio.Future[None]) -> None:
    """Where the task that waits is gone nobody else does, and asyncio would log it."""
    if not writing.cancelled():
        writing.exception()
