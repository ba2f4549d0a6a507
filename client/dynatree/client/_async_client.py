"""The client for asyncio."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, Unpack

import grpc

from dynatree.client._accumulator import Accumulator
from dynatree.client._base import MODEL_INFO_REQUEST, BaseClient, ClientSettings, Deadline, draft_stub
from dynatree.client._errors import error_from_rpc
from dynatree.client._request import GenerateOptions, Prompt, build_request
from dynatree.client._types import Chunk, Completion, ServiceInfo
from dynatree.v1 import draft_pb2, draft_pb2_grpc

_Call = grpc.aio.UnaryStreamCall[draft_pb2.GenerateRequest, draft_pb2.GenerateResponse]


class AsyncCompletionStream(Accumulator):
    """A completion, or several, as made: an asynchronous iterator of `Chunk`, to be read once, and a context manager.

    The request is sent when the first chunk is asked for. Leaving the context, or `aclose()`, before the end cancels it
    on the server. So does cancelling the task that waits for a chunk, and dropping the last reference, as a loop that
    is left by `break` does.
    """

    def __init__(self, start: Callable[[], Awaitable[_Call]], address: str, n: int) -> None:
        super().__init__(address, n)
        self._start = start
        self._call: _Call | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk; waits for it.

        Raises:
            DynaTreeError: the request failed; the error carries the text and the tokens received so far.
        """
        if self._ended:
            raise StopAsyncIteration
        try:
            chunk = await self._receive()
        except grpc.RpcError as error:
            raise self._failed(error) from error
        except asyncio.CancelledError:
            # gRPC raises it for every cancellation on this side; only the task's own may pass as one.
            if _being_cancelled():
                self._ended = True
                raise
            if self._ended:  # by aclose(), in another task
                raise StopAsyncIteration from None
            raise self._client_closed() from None
        if chunk is None:
            self._finish()
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Stop; cancels the request unless it has ended. What was received stays in `text` and `token_ids`."""
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        self._ended = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _receive(self) -> Chunk | None:
        """The next chunk; None at the end."""
        if self._call is None:
            self._call = await self._start()
            if self._ended:  # closed while it was connecting
                self._call.cancel()
        while isinstance(response := await self._call.read(), draft_pb2.GenerateResponse):
            if chunk := self._add(response):
                return chunk
        return None


class AsyncClient(BaseClient):
    """A connection to a draft service, for the tasks of one event loop. It never repeats a request by itself."""

    def __init__(self, address: str, **settings: Unpack[ClientSettings]) -> None:
        """Connect to nothing yet; the first call does, and binds the client to its event loop.

        Args:
            address: the draft service, as `host:port` or `unix:PATH`.
            **settings: see `ClientSettings`.

        Raises:
            ValueError: the address, or a number of seconds, is not one.
        """
        super().__init__(address, **settings)
        self._channel: grpc.aio.Channel | None = None

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Complete `prompt`, and return when the completion is whole; of several, the first, with its `alternatives`.

        Cancelling the task cancels the request.

        Args:
            prompt: text, or token ids.
            timeout: the longest that this call may take, in seconds; None is the client's.
            **options: see `GenerateOptions`.

        Raises:
            DynaTreeError: one of its subclasses; see `dynatree.client`. It carries what was received.
            TypeError: there is no such option, or it has the wrong type.
        """
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            async for _ in stream:
                pass
        return stream.completion

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncCompletionStream:
        """The completion of `prompt` as an asynchronous iterator of chunks. Arguments and errors as in `generate`."""
        request = build_request(prompt, **options)

        async def start() -> _Call:
            stub, deadline = await self._connect(timeout)
            call: _Call = stub.Generate(request, timeout=deadline.remaining(), metadata=self._metadata)
            return call

        return AsyncCompletionStream(start, self._address, request.n)

    async def model_info(self, *, timeout: float | None = None) -> ServiceInfo:
        """The models that the service runs (the target as it was last, while its service is down), and its policies.

        Raises:
            DynaTreeError: one of its subclasses.
        """
        stub, deadline = await self._connect(timeout)
        try:
            response = await stub.GetModelInfo(MODEL_INFO_REQUEST, timeout=deadline.remaining())
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._address) from error
        return ServiceInfo.from_pb(response)

    async def close(self) -> None:
        """Close the connection; requests in progress are cancelled. May be called again."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _connect(self, timeout: float | None) -> tuple[draft_pb2_grpc.DraftServiceStub, Deadline]:
        """Wait for the server at the first call; the call's deadline contains the wait."""
        deadline = self._deadline(timeout)
        stub = draft_stub(self._open_channel())
        if not self._connected:
            limit = self._connect_limit(deadline)
            try:
                await stub.GetModelInfo(MODEL_INFO_REQUEST, timeout=limit, wait_for_ready=True)
            except grpc.RpcError as error:
                self._check_answer(error, limit)
            self._connected = True
        return stub, deadline

    def _open_channel(self) -> grpc.aio.Channel:
        """The channel; made here and not in the constructor because gRPC makes it for the running event loop."""
        if self._channel is None:
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self._address, self._channel_options)
            else:
                self._channel = grpc.aio.secure_channel(self._address, self._credentials, self._channel_options)
        return self._channel


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
