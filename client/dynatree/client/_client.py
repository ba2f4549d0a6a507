"""The client for ordinary, synchronous code."""

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self, Unpack

import grpc
from grpc.experimental import ChannelOptions

from dynatree.client._accumulator import Accumulator
from dynatree.client._base import MODEL_INFO_REQUEST, BaseClient, ClientSettings, Deadline, draft_stub
from dynatree.client._errors import error_from_rpc
from dynatree.client._request import GenerateOptions, Prompt, build_request
from dynatree.client._types import Chunk, Completion, ServiceInfo
from dynatree.v1 import draft_pb2

# gRPC's usual iterator waits on a condition that it shares with a thread of the channel. A KeyboardInterrupt in the
# midst of that leaves a lock held or the thread waiting, and no close() returns. This one waits in gRPC's core.
_READ_ON_THE_CALLERS_THREAD = ((ChannelOptions.SingleThreadedUnaryStream, 1),)


class _Call(Protocol):
    """The part of a streaming RPC in progress that is used here."""

    def __iter__(self) -> Iterator[draft_pb2.GenerateResponse]: ...

    def cancel(self) -> bool: ...


class CompletionStream(Accumulator):
    """A completion, or several, as made: an iterator of `Chunk`, to be read once, and a context manager.

    Leaving the context, or `close()`, before the end cancels the request on the server. So does dropping the last
    reference, as a loop that is left by `break` does.
    """

    def __init__(self, call: _Call, address: str, n: int) -> None:
        super().__init__(address, n)
        self._call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """The next chunk; waits for it.

        Raises:
            DynaTreeError: the request failed; the error carries the text and the tokens received so far.
        """
        if self._ended:
            raise StopIteration
        try:
            for response in self._call:
                if chunk := self._add(response):
                    return chunk
        except grpc.RpcError as error:
            if self._ended:  # by close(), in another thread
                raise StopIteration from None
            raise self._failed(error) from error
        self._finish()
        raise StopIteration

    def close(self) -> None:
        """Stop; cancels the request unless it has ended. What was received stays in `text` and `token_ids`."""
        self._ended = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client(BaseClient):
    """A connection to a draft service, which threads may share. It never repeats a request by itself."""

    def __init__(self, address: str, **settings: Unpack[ClientSettings]) -> None:
        """Connect to nothing yet; the first call does.

        Args:
            address: the draft service, as `host:port` or `unix:PATH`.
            **settings: see `ClientSettings`.

        Raises:
            ValueError: the address, the principal, or a number of seconds, is not one.
            TypeError: an option has the wrong type, or there is no such option.
        """
        super().__init__(address, **settings)
        options = _READ_ON_THE_CALLERS_THREAD + self._channel_options
        if self._credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, self._credentials, options)
        self._stub = draft_stub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Complete `prompt`, and return when the completion is whole; of several, the first, with its `alternatives`.

        Args:
            prompt: text, or token ids.
            timeout: the longest that this call may take, in seconds; None is the client's.
            **options: see `GenerateOptions`.

        Raises:
            DynaTreeError: one of its subclasses; see `dynatree.client`. It carries what was received.
            TypeError: there is no such option, or it has the wrong type.
        """
        with self.stream(prompt, timeout=timeout, **options) as stream:
            for _ in stream:
                pass
        return stream.completion

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> CompletionStream:
        """Start to complete `prompt`, and return the chunks as an iterator. Arguments and errors as in `generate`."""
        request = build_request(prompt, **options)
        deadline = self._connect(timeout)
        call = self._stub.Generate(request, timeout=deadline.remaining(), metadata=self._metadata)
        return CompletionStream(call, self._address, request.n)

    def model_info(self, *, timeout: float | None = None) -> ServiceInfo:
        """The models that the service runs (the target as it was last, while its service is down), and its policies.

        Raises:
            DynaTreeError: one of its subclasses.
        """
        deadline = self._connect(timeout)
        try:
            response = self._stub.GetModelInfo(MODEL_INFO_REQUEST, timeout=deadline.remaining())
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._address) from error
        return ServiceInfo.from_pb(response)

    def close(self) -> None:
        """Close the connection; requests in progress are cancelled. May be called again."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, timeout: float | None) -> Deadline:
        """Wait for the server at the first call; the call's deadline, which contains the wait."""
        deadline = self._deadline(timeout)
        if not self._connected:
            limit = self._connect_limit(deadline)
            try:
                # Not grpc.channel_ready_future: its thread outlives it, and fails loudly if the client is closed then.
                self._stub.GetModelInfo(MODEL_INFO_REQUEST, timeout=limit, wait_for_ready=True)
            except grpc.RpcError as error:
                self._check_answer(error, limit)
            self._connected = True
        return deadline
