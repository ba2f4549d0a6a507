"""The client for ordinary, synchronous code."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack

import grpc
from grpc.experimental import ChannelOptions

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
from dynatree.client._errors import error_from_rpc
from dynatree.client._request import (
    GenerateOptions,
    Message,
    Prompt,
    build_detokenize_request,
    build_request,
    build_tokenize_request,
)
from dynatree.client._tracing import Metadata
from dynatree.client._types import Chunk, Completion, ServiceInfo, Tokens
from dynatree.v1 import draft_pb2, draft_pb2_grpc

T = TypeVar("T")

# gRPC's usual iterator waits on a condition that it shares with a thread of the channel. A KeyboardInterrupt in the
# midst of that leaves a lock held or the thread waiting, and no close() returns. This one waits in gRPC's core.
_READ_ON_THE_CALLERS_THREAD = ((ChannelOptions.SingleThreadedUnaryStream, 1),)


class _Call(Protocol):
    """The part of a streaming RPC in progress that is used here."""

    def __iter__(self) -> Iterator[draft_pb2.GenerateResponse]: ...

    def cancel(self) -> bool: ...


def _drain(call: Any) -> None:
    """Take what gRPC's core still says of a call that was cancelled, which is there at once.

    With `SingleThreadedUnaryStream` nobody else takes it, and until then the channel keeps the call, 12 KB.
    """
    with suppress(AttributeError):  # of gRPC's own names, should they change: the channel keeps the call
        while call._state.due:
            call._consume_next_event()


class CompletionStream(Accumulator):
    """A completion, or several, as made: an iterator of `Chunk`, to be read once, and a context manager.

    Leaving the context, or `close()`, before the end cancels the request on the server. So does dropping the last
    reference, as a loop that is left by `break` does.
    """

    def __init__(
        self,
        start: Callable[[draft_pb2.GenerateRequest, Metadata], _Call],
        address: str,
        request: draft_pb2.GenerateRequest,
        attempts: Attempts,
    ) -> None:
        super().__init__(address, request, attempts)
        self._start = start
        self._closing = threading.Event()
        self._reading = threading.Lock()  # held by who takes what gRPC says of the call
        self._torn = False  # whether that was interrupted: then gRPC may have taken something, and not noted it
        self._call = start(request, self._span.metadata)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """The next chunk; waits for it.

        Raises:
            DynaTreeError: the request failed; the error carries the text and the tokens received so far.
        """
        if self._ended:
            raise StopIteration
        with self._reading:
            self._torn = True
            chunk = self._next_chunk()
            if chunk is None and self._closing.is_set():
                _drain(self._call)
            self._torn = False
        if chunk is None:
            raise StopIteration
        return chunk

    def _next_chunk(self) -> Chunk | None:
        """The next chunk; None at the end."""
        while True:
            try:
                for response in self._call:
                    if chunk := self._add(response):
                        return chunk
            except grpc.RpcError as error:
                _drain(self._call)
                if self._ended:  # by close(), in another thread
                    return None
                if self._is_whole:  # only the status was lost
                    self._finish()
                    return None
                pause = self._pause(error)
                if pause is None:
                    raise self._failed(error) from error
                if self._closing.wait(pause):
                    return None
                try:
                    self._call = self._start(self._remaining(), self._span.metadata)
                except ValueError:  # the client was closed meanwhile
                    raise self._client_closed() from None
            else:
                self._finish()
                return None

    def close(self) -> None:
        """Stop; cancels the request unless it has ended. What was received stays in `text` and `token_ids`."""
        self._ended = True
        self._closing.set()
        self._call.cancel()
        if not self._torn and self._reading.acquire(blocking=False):  # else another thread reads, and takes it
            try:
                self._torn = True
                _drain(self._call)
                self._torn = False
            finally:
                self._reading.release()
        self._span.end(len(self.token_ids))

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client(BaseClient):
    """A connection to a draft service, or to several, which threads may share.

    A request whose service was lost goes on at another one, or at the same one when that is back, with what was
    received: no token comes twice, and none is lost. `resume=False` switches that off.
    """

    def __init__(self, address: str, **settings: Unpack[ClientSettings]) -> None:
        """Connect to nothing yet; the first call does.

        Args:
            address: the draft service, as `host:port`, `unix:PATH` or, for all that a name stands for,
                `dns:///name:port`; or several of these, comma-separated, which are taken in turn.
            **settings: see `ClientSettings`.

        Raises:
            ValueError: the address, the principal, or a number of seconds, is not one.
            TypeError: an option has the wrong type, or there is no such option.
        """
        super().__init__(address, **settings)
        self._channels = [self._open(each) for each in self._addresses]
        self._stubs = [draft_stub(channel) for channel in self._channels]

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Complete `prompt`, and return when the completion is whole; of several, the first, with its `alternatives`.

        Args:
            prompt: text, token ids, or the messages of a chat, for the target's chat template.
            timeout: the longest that this call may take, in seconds; None is the client's.
            metadata: gRPC metadata of this call, (key, value) pairs; a key that the client sends too is replaced.
            **options: see `GenerateOptions`.

        Raises:
            DynaTreeError: one of its subclasses; see `dynatree.client`. It carries what was received.
            TypeError: there is no such option, or it has the wrong type.
        """
        with self.stream(prompt, timeout=timeout, metadata=metadata, **options) as stream:
            for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
        **options: Unpack[GenerateOptions],
    ) -> CompletionStream:
        """Start to complete `prompt`, and return the chunks as an iterator. Arguments and errors as in `generate`."""
        request = build_request(prompt, **options)
        sent = self._with(metadata)
        deadline = self._connect(timeout)

        def start(request: draft_pb2.GenerateRequest, traced: Metadata) -> _Call:
            stub = self._stubs[self._next_server()]
            call: _Call = stub.Generate(request, timeout=deadline.remaining(), metadata=sent + traced)
            return call

        return CompletionStream(start, self._address, request, self._attempts())

    def model_info(self, *, timeout: float | None = None, metadata: Metadata = ()) -> ServiceInfo:
        """The models that the service runs (the target as it was last, while its service is down), and its policies.

        Args:
            timeout: as for `generate`.
            metadata: as for `generate`.

        Raises:
            DynaTreeError: one of its subclasses.
        """
        sent = self._with(metadata)

        def ask(stub: draft_pb2_grpc.DraftServiceStub, seconds: float | None) -> ServiceInfo:
            return ServiceInfo.from_pb(stub.GetModelInfo(MODEL_INFO_REQUEST, timeout=seconds, metadata=sent))

        return self._ask(ask, self._connect(timeout))

    def vocabulary(self, *, timeout: float | None = None, metadata: Metadata = ()) -> tuple[bytes, ...]:
        """The bytes that each token adds to a text, by its id; not always whole characters.

        Args:
            timeout: as for `generate`.
            metadata: as for `generate`.

        Raises:
            DynaTreeError: one of its subclasses.
        """
        sent = self._with(metadata)

        def ask(stub: draft_pb2_grpc.DraftServiceStub, seconds: float | None) -> tuple[bytes, ...]:
            parts = stub.GetVocabulary(VOCABULARY_REQUEST, timeout=seconds, metadata=sent)
            return tuple(token for part in parts for token in part.tokens)

        return self._ask(ask, self._connect(timeout))

    def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        add_special_tokens: bool = True,
        special_tokens: bool = False,
        continue_final_message: bool = False,
        token_strings: bool = False,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> Tokens:
        """The tokens of a prompt, as `generate` makes them.

        Args:
            prompt: text, or the messages of a chat.
            add_special_tokens: whether a text gets the tokens that the tokenizer adds at its beginning or end.
            special_tokens: as for `generate`.
            continue_final_message: as for `generate`.
            token_strings: whether to return the tokens' spellings.
            timeout: as for `generate`.
            metadata: as for `generate`.

        Raises:
            DynaTreeError: one of its subclasses.
            TypeError: an argument has the wrong type.
        """
        request = build_tokenize_request(
            prompt,
            add_special_tokens=add_special_tokens,
            special_tokens=special_tokens,
            continue_final_message=continue_final_message,
            token_strings=token_strings,
        )
        sent = self._with(metadata)

        def ask(stub: draft_pb2_grpc.DraftServiceStub, seconds: float | None) -> Tokens:
            return Tokens.from_pb(stub.Tokenize(request, timeout=seconds, metadata=sent))

        return self._ask(ask, self._connect(timeout))

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None, metadata: Metadata = ()) -> str:
        """The text of tokens, the names of special tokens included.

        Args:
            token_ids: the tokens.
            timeout: as for `generate`.
            metadata: as for `generate`.

        Raises:
            DynaTreeError: one of its subclasses.
            TypeError: an argument has the wrong type.
        """
        request = build_detokenize_request(token_ids)
        sent = self._with(metadata)

        def ask(stub: draft_pb2_grpc.DraftServiceStub, seconds: float | None) -> str:
            response: draft_pb2.DetokenizeResponse = stub.Detokenize(request, timeout=seconds, metadata=sent)
            return response.text

        return self._ask(ask, self._connect(timeout))

    def is_serving(self, *, timeout: float = 1.0) -> bool:
        """Whether a server takes requests: it answers, and has a verify service that does.

        Args:
            timeout: seconds for each server to answer.
        """
        return any(self._serves(channel, timeout) for channel in self._channels)

    def _serves(self, channel: grpc.Channel, timeout: float) -> bool:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_METHOD)
        try:
            return is_serving(check(b"", timeout=timeout, wait_for_ready=True))
        except grpc.RpcError:
            return False

    def _ask(self, ask: Callable[[draft_pb2_grpc.DraftServiceStub, float | None], T], deadline: Deadline) -> T:
        """The answer of the first server that is there."""
        for left in reversed(range(len(self._stubs))):
            try:
                return ask(self._stubs[self._next_server()], deadline.remaining())
            except grpc.RpcError as error:
                if not left or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise error_from_rpc(error, self._address) from error
        raise AssertionError("there is a server")

    def close(self) -> None:
        """Close the connection; requests in progress are cancelled. May be called again."""
        self._closed = True
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, timeout: float | None) -> Deadline:
        """Wait for a server at the first call; the call's deadline, which contains the wait."""
        deadline = self._deadline(timeout)
        if not self._connected:
            wait = self._connect_wait(deadline, len(self._stubs))
            for server, seconds in wait:
                # Not grpc.channel_ready_future: its thread outlives it, and fails loudly if the client is closed then.
                stub = self._stubs[server]
                try:
                    stub.GetModelInfo(MODEL_INFO_REQUEST, timeout=seconds, wait_for_ready=True, metadata=self._metadata)
                except grpc.RpcError as error:
                    if wait.goes_on_after(error):
                        continue
                    self._check_answer(error, wait.limit, self._cause(stub))
                break
            self._connected = True
        return deadline

    def _cause(self, stub: draft_pb2_grpc.DraftServiceStub) -> str:
        try:
            stub.GetModelInfo(MODEL_INFO_REQUEST, timeout=ASKING_WHY, metadata=self._metadata)
        except grpc.RpcError as error:
            return cause_of(error)
        return ""

    def _open(self, address: str) -> grpc.Channel:
        options = _READ_ON_THE_CALLERS_THREAD + self._options(address)
        if self._credentials is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, self._credentials, options)
