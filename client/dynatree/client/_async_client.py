"""The client for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from dynatree.client._accumulator import Accumulator
from dynatree.client._attempts import Attempts
from dynatree.client._base import (
    ASKING_WHY,
    HEALTH_METHOD,
    MODEL_INFO_REQUEST,
    VOCABULARY_REQUEST,
    BaseClient,
    ClientSettings,
    Deadline,
    cause_of,
    draft_stub,
    is_serving,
)
from dynatree.client._completion import Chunk, Completion
from dynatree.client._grpc_loop import FromGrpcLoop, on_grpc_loop
from dynatree.client._request import (
    GenerateOptions,
    Message,
    Prompt,
    build_detokenize_request,
    build_request,
    build_tokenize_request,
)
from dynatree.client._service_info import ServiceInfo
from dynatree.client._tokens import Tokens
from dynatree.client._tracing import Metadata
from dynatree.v1 import draft_pb2, draft_pb2_grpc

T = TypeVar("T")
_Call = FromGrpcLoop[draft_pb2.GenerateResponse]


class AsyncCompletionStream(Accumulator):
    """One or several completions in progress: an asynchronous iterator of `Chunk`, and an asynchronous context manager.

    The stream can be read once. The request is sent when the first chunk is awaited. Leaving the context, or calling
    `aclose()`, before the end cancels the request on the server. So does cancelling the task that waits for a chunk, or
    dropping the last reference to the stream, for example by a `break` out of a loop over `client.stream(...)`.
    """

    def __init__(
        self,
        start: Callable[[draft_pb2.GenerateRequest, Metadata], Awaitable[_Call]],
        address: str,
        request: draft_pb2.GenerateRequest,
        attempts: Attempts,
    ) -> None:
        super().__init__(address, request, attempts)
        self._start = start
        self._call: _Call | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Wait for the next chunk, and return it.

        Raises:
            DynaTreeError: the request failed; the error has the text and the tokens received so far.
        """
        if self._ended:
            raise StopAsyncIteration
        try:
            chunk = await self._receive()
        except asyncio.CancelledError:
            # gRPC raises this for every cancellation by the client; only the task's own must propagate.
            if _being_cancelled():
                self._cancel()
                raise
            if self._ended:  # by aclose(), in another task
                raise StopAsyncIteration from None
            raise self._client_closed() from None
        if chunk is None:
            self._finish()
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Cancel the request unless it has ended. The results received so far stay in `text` and `token_ids`."""
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        self._ended = True
        if self._call is not None:
            self._call.cancel()
        self._span.end(len(self.token_ids))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _receive(self) -> Chunk | None:
        """Wait for the next chunk; None at the end."""
        while True:
            try:
                if self._call is None:
                    self._call = await self._start(self._remaining(), self._span.metadata)
                    if self._ended:  # closed while it was connecting
                        self._call.cancel()
                async for response in self._call:
                    if chunk := self._add(response):
                        return chunk
                return None
            except grpc.aio.UsageError:  # the client was closed meanwhile
                raise self._client_closed() from None
            except grpc.RpcError as error:
                if self._is_whole:  # only the status was lost
                    return None
                pause = None if self._ended else self._pause(error)
                if pause is None:
                    raise self._failed(error) from error
                self._call = None
                await asyncio.sleep(pause)
                if self._ended:  # closed meanwhile
                    raise asyncio.CancelledError from None


class AsyncClient(BaseClient):
    """A connection to one or several draft services, for the tasks of one or several event loops.

    When a service is lost, its requests resume on another one, or on the same one once it is back. They continue after
    the tokens received so far: no token is repeated or lost. `resume=False` disables this.
    """

    def __init__(self, address: str, **settings: Unpack[ClientSettings]) -> None:
        """Create the client; it connects at the first call.

        Args:
            address: the address of the draft service, or several addresses, as for `Client`.
            **settings: see `ClientSettings`.

        Raises:
            ValueError: the address, or the value of a setting, is invalid.
            TypeError: a setting has the wrong type, or does not exist.
            OSError: a certificate or key file cannot be read.
        """
        super().__init__(address, **settings)
        self._channels: list[grpc.aio.Channel] = []
        self._servers: list[draft_pb2_grpc.DraftServiceStub] = []

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Complete `prompt`, and return the whole completion; if n > 1, the first one, with its `alternatives`.

        Cancelling the task cancels the request.

        Args:
            prompt: text, token ids, or the messages of a chat, for the target's chat template.
            timeout: the longest that this call may take, in seconds; None means the client's `timeout`.
            metadata: gRPC metadata of this call, (key, value) pairs. They replace the client's own pairs of equal keys.
            **options: see `GenerateOptions`.

        Raises:
            DynaTreeError: the request failed; see `dynatree.client` for the subclasses. The error has the text and the
                tokens received so far.
            TypeError: an option has the wrong type, or does not exist.
            ValueError: `timeout` is not positive, or `metadata` would send a token over a plain connection to another
                machine.
            RuntimeError: the client is closed.
        """
        async with self.stream(prompt, timeout=timeout, metadata=metadata, **options) as stream:
            async for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> AsyncCompletionStream:
        """Return an asynchronous iterator of the chunks of a completion. Arguments and errors as in `generate`."""
        request = build_request(prompt, **options)
        sent = self._with(metadata)
        deadline: Deadline | None = None
        servers = self._servers_in_turn()

        async def start(request: draft_pb2.GenerateRequest, traced: Metadata) -> _Call:
            nonlocal deadline
            if deadline is None:
                deadline = await self._connect(timeout)
            return FromGrpcLoop(partial(self._responses, next(servers), request, deadline.remaining(), sent + traced))

        attempts = self._attempts(lambda: None if deadline is None else deadline.remaining())
        return AsyncCompletionStream(start, self._address, request, attempts)

    async def _responses(
        self, server: int, request: draft_pb2.GenerateRequest, timeout: float | None, metadata: Metadata
    ) -> AsyncGenerator[draft_pb2.GenerateResponse]:
        call = self._stubs()[server].Generate(request, timeout=timeout, metadata=metadata)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def model_info(self, *, timeout: float | None = None, metadata: Metadata = ()) -> ServiceInfo:
        """Return the service's models and policies. While the verify service is down, the target is the last known.

        Args:
            timeout: as for `generate`.
            metadata: as for `generate`.

        Raises:
            DynaTreeError: the call failed; see `dynatree.client` for the subclasses.
        """
        sent = self._with(metadata)

        async def ask(stub: draft_pb2_grpc.DraftServiceStub, seconds: float | None) -> ServiceInfo:
            return ServiceInfo.from_pb(await stub.GetModelInfo(MODEL_INFO_REQUEST, timeout=seconds, metadata=sent))

        return await self._ask(ask, await self._connect(timeout))

    async def vocabulary(self, *, timeout: float | None = None, metadata: Metadata = ()) -> tuple[bytes, ...]:
        """Return the bytes that each token adds to a text, indexed by token id; they may be parts of characters.

        Args:
            timeout: as for `generate`.
            metadata: as for `generate`.

        Raises:
            DynaTreeError: the call failed; see `dynatree.client` for the subclasses.
        """
        sent = self._with(metadata)

        async def ask(stub: draft_pb2_grpc.DraftServiceStub, seconds: float | None) -> tuple[bytes, ...]:
            parts = stub.GetVocabulary(VOCABULARY_REQUEST, timeout=seconds, metadata=sent)
            return tuple([token async for part in parts for token in part.tokens])

        return await self._ask(ask, await self._connect(timeout))

    async def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        add_special_tokens: bool = True,
        special_tokens: bool = False,
        continue_final_message: bool = False,
        token_strings: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> Tokens:
        """Return the tokens of a prompt. By default they are those that `generate` completes.

        Args:
            prompt: text, or the messages of a chat.
            add_special_tokens: whether the tokenizer adds its special tokens at the beginning or end of a text.
            special_tokens: as for `generate`.
            continue_final_message: as for `generate`.
            token_strings: whether to return the tokens' spellings in the vocabulary.
            tools: as for `generate`.
            chat_template_kwargs: as for `generate`.
            timeout: as for `generate`.
            metadata: as for `generate`.

        Raises:
            DynaTreeError: the call failed; see `dynatree.client` for the subclasses.
            TypeError: an argument has the wrong type.
        """
        request = build_tokenize_request(
            prompt,
            add_special_tokens=add_special_tokens,
            special_tokens=special_tokens,
            continue_final_message=continue_final_message,
            token_strings=token_strings,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        sent = self._with(metadata)

        async def ask(stub: draft_pb2_grpc.DraftServiceStub, seconds: float | None) -> Tokens:
            return Tokens.from_pb(await stub.Tokenize(request, timeout=seconds, metadata=sent))

        return await self._ask(ask, await self._connect(timeout))

    async def detokenize(
        self, token_ids: Sequence[int], *, timeout: float | None = None, metadata: Metadata = ()
    ) -> str:
        """Return the text of token ids, including the names of special tokens.

        Args:
            token_ids: the ids of the tokens.
            timeout: as for `generate`.
            metadata: as for `generate`.

        Raises:
            DynaTreeError: the call failed; see `dynatree.client` for the subclasses.
            TypeError: an argument has the wrong type.
        """
        request = build_detokenize_request(token_ids)
        sent = self._with(metadata)

        async def ask(stub: draft_pb2_grpc.DraftServiceStub, seconds: float | None) -> str:
            response: draft_pb2.DetokenizeResponse = await stub.Detokenize(request, timeout=seconds, metadata=sent)
            return response.text

        return await self._ask(ask, await self._connect(timeout))

    async def is_serving(self, *, timeout: float = 1.0) -> bool:
        """Whether at least one draft service accepts requests, which requires a verify service that does.

        Args:
            timeout: the longest wait for the answer of each draft service, in seconds.
        """
        return await on_grpc_loop(partial(self._any_serves, timeout))

    async def _any_serves(self, timeout: float) -> bool:
        self._stubs()
        asked = [asyncio.ensure_future(self._serves(channel, timeout)) for channel in self._channels]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return True
            return False
        finally:
            for each in asked:
                each.cancel()

    async def _serves(self, channel: grpc.aio.Channel, timeout: float) -> bool:
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_METHOD)
        try:
            return is_serving(await check(b"", timeout=timeout, wait_for_ready=True))
        except grpc.RpcError:
            return False

    async def _ask(
        self, ask: Callable[[draft_pb2_grpc.DraftServiceStub, float | None], Awaitable[T]], deadline: Deadline
    ) -> T:
        """Ask the servers in turn, and return the first answer."""
        return await on_grpc_loop(partial(self._first_answer, ask, deadline))

    async def _first_answer(
        self, ask: Callable[[draft_pb2_grpc.DraftServiceStub, float | None], Awaitable[T]], deadline: Deadline
    ) -> T:
        attempts = self._attempts_at_question(deadline)
        for server in self._servers_in_turn():
            try:
                return await ask(self._stubs()[server], deadline.remaining())
            except grpc.RpcError as error:
                pause = self._pause(attempts, error)
            await asyncio.sleep(pause)
            self._check_open()
        raise AssertionError("the last attempt raises")

    async def close(self) -> None:
        """Close the connection, and cancel requests in progress. Further calls have no effect."""
        self._closed = True
        await on_grpc_loop(self._close_channels)

    async def _close_channels(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _connect(self, timeout: float | None) -> Deadline:
        """Wait for a server if this is the first call; return the call's deadline, which includes the wait."""
        deadline = self._deadline(timeout)
        if not self._connected:
            await on_grpc_loop(partial(self._find_server, deadline))
            self._connected = True
        return deadline

    async def _find_server(self, deadline: Deadline) -> None:
        stubs = self._stubs()
        wait = self._connect_wait(deadline, len(stubs))
        for server, seconds in wait:
            stub = stubs[server]
            try:
                await stub.GetModelInfo(
                    MODEL_INFO_REQUEST, timeout=seconds, wait_for_ready=True, metadata=self._metadata
                )
            except grpc.RpcError as error:
                if wait.goes_on_after(error):
                    continue
                self._check_answer(error, wait.limit, await self._cause(stub))
            break

    def _stubs(self) -> list[draft_pb2_grpc.DraftServiceStub]:
        """Return the servers' stubs. Runs on gRPC's event loop, since a new channel binds to the running loop."""
        if self._closed:
            raise grpc.aio.UsageError("the client is closed")
        if not self._channels:
            self._channels = [self._open(address) for address in self._addresses]
            self._servers = [draft_stub(channel) for channel in self._channels]
        return self._servers

    async def _cause(self, stub: draft_pb2_grpc.DraftServiceStub) -> str:
        try:
            await stub.GetModelInfo(MODEL_INFO_REQUEST, timeout=ASKING_WHY, metadata=self._metadata)
        except grpc.RpcError as error:
            return cause_of(error)
        return ""

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, self._options(address))
        return grpc.aio.secure_channel(address, self._credentials, self._options(address))


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
