"""The open calls of a server: who calls, and the status with which each ends."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from dynatree.common.errors import (
    ContextLengthError,
    IdleSessionError,
    InvalidArgumentError,
    QuotaError,
    ServiceBusyError,
    ServiceError,
    UnauthenticatedError,
)
from dynatree.common.grpc_options import CONTEXT_LENGTH, PROMPT_TOKENS, QUEUE, QUOTA, REFUSED, REQUEST_ID, RETRY_AFTER
from dynatree.common.limits import IDLE_SECONDS
from dynatree.common.openings import FIRST_MESSAGE_SECONDS, Openings
from dynatree.common.security import LOCAL, Authentication

log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]
_POISON = ("AcceleratorError", "DeviceFailedError", "LayerStreamError", "RankError")
LONGEST_DETAILS = 1000  # characters; errors quote what was sent
MAX_STANDARD_CALLS = 128  # of health and reflection, of one connection, which may be a proxy's
_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


class CallTracker(grpc.aio.ServerInterceptor):
    """The open calls of a server, each ended with the code that its error has.

    Domain errors have their gRPC codes; anything else becomes INTERNAL, its detail only in the log. Every error names
    the request's id, which is the caller's own where it names one. Handlers get a `Call` for their context.
    """

    def __init__(
        self,
        idle_seconds: float = IDLE_SECONDS,
        authentication: Authentication | None = None,
        most: int | None = None,
    ) -> None:
        """Track nothing yet.

        Args:
            idle_seconds: How long a call may wait for a peer that sends or reads nothing.
            authentication: Finds out who calls; None: nobody is asked.
            most: Calls at once; one more is refused. Health and reflection are not among them. None: any number.

        Attributes:
            poisoned: Set when the device has failed in a way from which no later call recovers.
        """
        self.poisoned = asyncio.Event()
        self._idle_seconds = idle_seconds
        self._most = most
        self._authentication = authentication or Authentication(LOCAL)
        self._openings = Openings(min(idle_seconds, FIRST_MESSAGE_SECONDS))
        self._standard: Counter[str] = Counter()  # calls of health and reflection, by connection
        # each call's task, which ends when its status is sent, and a future that is done when its handler is
        self._open: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        self._ending = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Make a handler of any kind a bidirectional one: gRPC runs those before a message has come.

        So whoever calls is asked who he is first, and his message has a deadline.
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
        """Calls whose status is not sent yet."""
        return len(self._open)

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

    def _mapped(self, handler: Any, own: bool) -> Callable[..., Awaitable[None]]:
        async def mapped(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            call = Call(context, self._idle_seconds)
            try:
                if own:
                    call.principal = self._authentication.principal(context)
                call.first = await self._openings.first(context)
                with self._counted() if own else self._counted_standard(context.peer()):
                    await _answer(handler, call)
                return
            except (Exception, asyncio.CancelledError) as error:
                failure = error
            await self._abort(failure, call)

        return mapped

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Among the open calls, of which there is a most."""
        handled = self._begin()
        try:
            if self._most is not None and len(self._open) > self._most:
                raise ServiceBusyError(f"{self._most} calls are open, the most that may")
            yield
        finally:
            handled.set_result(None)

    @contextmanager
    def _counted_standard(self, peer: str) -> Iterator[None]:
        """Among a connection's calls of health and reflection, which show no token and may watch for ever."""
        if peer.startswith("unix:"):  # whatever the connection: all have one name
            yield
            return
        if self._standard[peer] >= MAX_STANDARD_CALLS:
            raise ServiceBusyError(f"{MAX_STANDARD_CALLS} calls of health and reflection are open, the most that may")
        self._standard[peer] += 1
        try:
            yield
        finally:
            self._standard[peer] -= 1
            if not self._standard[peer]:
                del self._standard[peer]

    def _begin(self) -> asyncio.Future[None]:
        """The task that runs a call is gRPC's own, and ends when the status is sent."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = asyncio.get_running_loop().create_future()
        task.add_done_callback(self._open.pop)
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
                raise (told if isinstance(told, grpc.aio.AbortError) else error) from None  # or the peer has just left
        if isinstance(error, UnauthenticatedError):  # no handler has seen it
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
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the service's log has it")


class Call:
    """A call's context, which knows who calls, and sends messages whole where the task that writes them is cancelled.

    gRPC notes that a call's initial metadata are sent when the first write returns (grpc/grpc pull request 21232).
    After a write that was cancelled it would send them again with the status, which its core refuses: the client would
    not be told why its call ended.

    Attributes:
        principal: On whose behalf the call is made; None where the server asks nobody who he is.
        request_id: Names the request in logs and errors.
        first: The message that came first, `grpc.aio.EOF` where none did; None once it is read.
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
        """As the context's own."""
        if self.first is not None:
            first, self.first = self.first, None
            return first
        return await self._context.read()

    def request(self) -> Any:
        """The one message of a call that has one.

        Raises:
            InvalidArgumentError: It has none.
        """
        if self.first is grpc.aio.EOF:
            raise InvalidArgumentError("the call has no message; expected one")
        return self.first

    async def requests(self) -> AsyncGenerator[Any]:
        """The messages of a call, none of which may keep it waiting for long.

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

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """As the context's own, after the message that is on its way, if one is."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        named = ((REQUEST_ID, self.request_id), *trailing_metadata)
        short = details if len(details) <= LONGEST_DETAILS else f"{details[:LONGEST_DETAILS]} ..."
        await self._context.abort(code, f"{short} (request {self.request_id})", named)


async def _answer(handler: Any, call: Call) -> None:
    """Run a handler of any kind; a generator is closed before the call ends, whatever ends it."""
    if handler.unary_unary:
        await call.write(await handler.unary_unary(call.request(), call))
        return
    if handler.unary_stream:
        answering = handler.unary_stream(call.request(), call)
    else:
        answering = handler.stream_stream(call.requests(), call)
    if not inspect.isasyncgen(answering):  # it writes through the context, which costs less a message
        await answering
        return
    async with aclosing(answering) as responses:
        async for response in responses:
            await call.write(response)


def is_poison(error: BaseException | None) -> bool:
    """Whether an error of the device, or what it led to, leaves this process without that device.

    CUDA's errors stick. A streamed layer that cannot be read has been tried twice, ranks that are out of step stay so,
    and a device that was given up stays so: a service that answered every call with that would draw calls, since it
    always has the fewest. Running out of memory does not. By name, since the package of the wire does not import torch.
    """
    while error is not None:
        if type(error).__name__ in _POISON or "CUDA error" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _request_id(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller's own id of the request, where it names one that a line of a log can hold."""
    named = dict(context.invocation_metadata() or ()).get(REQUEST_ID, "")
    return named if isinstance(named, str) and _REQUEST_ID.fullmatch(named) else uuid.uuid4().hex[:12]


def _trailing_metadata(error: ServiceError) -> Metadata:
    """What a client need not read out of the message."""
    match error:
        case ServiceBusyError():
            refused = (REFUSED, QUOTA if isinstance(error, QuotaError) else QUEUE)
            if error.retry_after is None:
                return (refused,)
            return (refused, (RETRY_AFTER, str(max(1, round(1e3 * error.retry_after)))))
        case ContextLengthError():
            return ((CONTEXT_LENGTH, str(error.context_length)), (PROMPT_TOKENS, str(error.prompt_tokens)))
    return ()


def _retrieve_exception(writing: asyncio.Future[None]) -> None:
    """Where the task that waits is gone nobody else does, and asyncio would log it."""
    if not writing.cancelled():
        writing.exception()
