"""Tracking of a server's open calls: the principal of each, and the status with which it ends."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from dynatree.common.errors import (
    ContextLengthError,
    DeviceFailedError,
    GrammarError,
    IdleSessionError,
    InvalidArgumentError,
    QuotaError,
    ServiceBusyError,
    ServiceError,
    UnauthenticatedError,
)
from dynatree.common.limits import IDLE_SECONDS
from dynatree.serving.grpc_options import (
    CONTEXT_LENGTH,
    GRAMMAR,
    PROMPT_TOKENS,
    QUEUE,
    QUOTA,
    REFUSED,
    REQUEST_ID,
    RETRY_AFTER,
)
from dynatree.serving.openings import FIRST_MESSAGE_SECONDS, Openings
from dynatree.serving.security import LOCAL, Authentication
from dynatree.serving.standard_calls import StandardCalls

log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]
LONGEST_DETAILS = 1000  # characters; errors quote the caller's input
_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


class CallTracker(grpc.aio.ServerInterceptor):
    """Interceptor that tracks a server's open calls and ends each with the status code of its error.

    Domain errors have their own gRPC codes; any other error becomes INTERNAL, with its details only in the log. Every
    error contains the request's id, which the caller may choose. Handlers receive a `Call` as their context.
    """

    def __init__(
        self,
        idle_seconds: float = IDLE_SECONDS,
        authentication: Authentication | None = None,
        most: int | None = None,
        most_of_one: int | None = None,
    ) -> None:
        """Create a tracker without open calls.

        Args:
            idle_seconds: Seconds that a call may wait for a peer that sends or reads nothing.
            authentication: Determines a call's principal; None means that calls are not authenticated.
            most: Maximum number of open calls, without health and reflection; None means no limit.
            most_of_one: The same for the calls of one principal, if calls are authenticated.

        Attributes:
            poisoned: Set when the device has failed so that every later call would fail too.
        """
        self.poisoned = asyncio.Event()
        self._idle_seconds = idle_seconds
        self._most = most
        self._most_of_one = most_of_one
        self._authentication = authentication or Authentication(LOCAL)
        self._openings = Openings(min(idle_seconds, FIRST_MESSAGE_SECONDS))
        self._standard = StandardCalls()
        # task of each call, which ends when the status is sent -> future that is done when the call's handler is
        self._open: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        self._calls_of: Counter[str] = Counter()  # number of open calls by principal
        self._ending = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap a handler of any kind as a bidirectional one, which gRPC starts before the first message arrives.

        Thus the caller is authenticated before its message is read, and the first message has a deadline.
        """
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # type: ignore[return-value]
        own = handler_call_details.method.startswith("/dynatree.")
        return grpc.stream_stream_rpc_method_handler(
            self._mapped(handler, own), handler.request_deserializer, handler.response_serializer
        )

    @property
    def open(self) -> int:
        """Number of calls whose status has not been sent."""
        return len(self._open)

    async def end(self, grace: float) -> None:
        """Wait up to `grace` seconds for open calls, cancel the remaining ones, and wait for their cleanup."""
        if self._open:
            await asyncio.wait(self._open, timeout=grace)
        self._ending = True
        for task, handled in self._open.items():
            if not handled.done():
                task.cancel()
        if self._open:
            await asyncio.wait(self._open.values())

    def _mapped(self, handler: Any, own: bool) -> Callable[..., Awaitable[None]]:
        async def mapped(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            call = Call(context, self._idle_seconds)
            try:
                if own:
                    call.principal = self._authentication.principal(context)
                call.first = await self._openings.first(context)
                async with self._counted(call.principal) if own else self._standard.counted(context.peer()):
                    await _answer(handler, call)
                return
            except (Exception, asyncio.CancelledError) as error:
                failure = error
            await self._abort(failure, call)

        return mapped

    @asynccontextmanager
    async def _counted(self, principal: str | None) -> AsyncGenerator[None]:
        """Count the current call among the open calls, and refuse it above the limits."""
        handled = self._begin(principal)
        try:
            if self._most is not None and len(self._open) > self._most:
                raise ServiceBusyError(f"{self._most} calls are open, which is the limit")
            if principal and self._most_of_one is not None and self._calls_of[principal] > self._most_of_one:
                raise ServiceBusyError(f"{self._most_of_one} calls of one principal are open, which is the limit")
            yield
        finally:
            handled.set_result(None)

    def _begin(self, principal: str | None) -> asyncio.Future[None]:
        """Register the current task, which is gRPC's own and ends when the status is sent."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = asyncio.get_running_loop().create_future()
        task.add_done_callback(self._open.pop)
        if principal:
            self._calls_of[principal] += 1
            task.add_done_callback(lambda _: self._calls_of.subtract([principal]))
        if self._ending:
            task.cancel()
        return self._open[task]

    async def _abort(self, error: BaseException, context: Call) -> NoReturn:
        if isinstance(error, asyncio.CancelledError):
            if not self._ending or context.cancelled():
                raise error
            try:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the service is shutting down")
            except Exception as told:
                raise (told if isinstance(told, grpc.aio.AbortError) else error) from None  # else the peer is gone
        if isinstance(error, UnauthenticatedError):  # no handler has run that would log the call
            log.info("request refused", extra={"fields": {"request_id": context.request_id, "code": error.code}})
        if isinstance(error, ServiceError):
            await context.abort(grpc.StatusCode[error.code], str(error), _trailing_metadata(error))
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, DecodeError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be decoded")
        log.error("request %s failed", context.request_id, exc_info=error)
        if is_poison(error):
            self.poisoned.set()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the service's device has failed")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the service's log")


class Call:
    """A call's context with its principal; a message is sent completely even if the task that writes it is cancelled.

    Only when the first write returns does gRPC note that a call's initial metadata were sent (grpc/grpc pull request
    21232). After a cancelled write it would send the metadata again with the status. Its core refuses that, and the
    client would not learn why its call ended.

    Attributes:
        principal: The call's principal; None if the server does not authenticate calls.
        request_id: Identifier of the request in logs and errors.
        first: The first message, or `grpc.aio.EOF` if there was none; None once it has been read.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], idle_seconds: float) -> None:
        self.principal: str | None = None
        self.first: Any = None
        self.request_id = _request_id(context)
        self._context = context
        self._idle_seconds = idle_seconds
        self._writing: asyncio.Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """The next message, as `ServicerContext.read` returns it."""
        if self.first is not None:
            first, self.first = self.first, None
            return first
        return await self._context.read()

    def request(self) -> Any:
        """The only message of a call with a unary request.

        Raises:
            InvalidArgumentError: The call has no message.
        """
        if self.first is grpc.aio.EOF:
            raise InvalidArgumentError("the call has no message; expected one")
        return self.first

    async def requests(self) -> AsyncGenerator[Any]:
        """The messages of a call, each of which must arrive within the idle limit.

        Raises:
            IdleSessionError: The peer sent nothing for too long.
        """
        while True:
            try:
                async with asyncio.timeout(self._idle_seconds):
                    message = await self.read()
            except TimeoutError:
                raise IdleSessionError(f"the client sent nothing for {self._idle_seconds:g} s") from None
            if message is grpc.aio.EOF:
                return
            yield message

    async def write(self, message: Any) -> None:
        """Send a message, as `ServicerContext.write` does, within the idle limit.

        Raises:
            IdleSessionError: The peer read nothing for too long.
        """
        self._writing = asyncio.ensure_future(self._context.write(message))
        self._writing.add_done_callback(_retrieve_exception)
        written, _ = await asyncio.wait([self._writing], timeout=self._idle_seconds)
        if not written:
            self._writing = None  # abort does not wait for it; the status follows if the peer reads again
            raise IdleSessionError(f"the client read nothing for {self._idle_seconds:g} s")
        await self._writing

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call, as `ServicerContext.abort` does, after any message that is still being sent."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        named = ((REQUEST_ID, self.request_id), *trailing_metadata)
        short = details if len(details) <= LONGEST_DETAILS else f"{details[:LONGEST_DETAILS]} ..."
        await self._context.abort(code, f"{short} (request {self.request_id})", named)


async def _answer(handler: Any, call: Call) -> None:
    """Run a handler of any kind; an asynchronous generator is always closed before the call ends."""
    if handler.unary_unary:
        await call.write(await handler.unary_unary(call.request(), call))
        return
    if handler.unary_stream:
        answering = handler.unary_stream(call.request(), call)
    else:
        answering = handler.stream_stream(call.requests(), call)
    if not inspect.isasyncgen(answering):  # a coroutine writes through the context, which costs less per message
        await answering
        return
    async with aclosing(answering) as responses:
        async for response in responses:
            await call.write(response)


def is_poison(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, means that this process has lost its device for good.

    A service that kept answering with such errors would attract calls, since it would always have the fewest open.
    CUDA errors are sticky. Torch's class of them is recognised by its name, so that this module need not import torch.
    Running out of memory does not count.
    """
    while error is not None:
        if (
            isinstance(error, DeviceFailedError)
            or type(error).__name__ == "AcceleratorError"
            or "CUDA error" in str(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _request_id(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller's id of the request if it is safe to log, else a new random one."""
    named = dict(context.invocation_metadata() or ()).get(REQUEST_ID, "")
    return named if isinstance(named, str) and _REQUEST_ID.fullmatch(named) else uuid.uuid4().hex[:12]


def _trailing_metadata(error: ServiceError) -> Metadata:
    """Trailing metadata with the error's details, so that clients need not parse the message."""
    match error:
        case ServiceBusyError():
            refused = (REFUSED, QUOTA if isinstance(error, QuotaError) else QUEUE)
            if error.retry_after is None:
                return (refused,)
            return (refused, (RETRY_AFTER, str(max(1, round(1e3 * error.retry_after)))))
        case GrammarError():
            return ((REFUSED, GRAMMAR),)
        case ContextLengthError():
            return ((CONTEXT_LENGTH, str(error.context_length)), (PROMPT_TOKENS, str(error.prompt_tokens)))
    return ()


def _retrieve_exception(writing: asyncio.Future[None]) -> None:
    """Retrieve the exception of a write whose waiting task is gone, since asyncio would log it otherwise."""
    if not writing.cancelled():
        writing.exception()
