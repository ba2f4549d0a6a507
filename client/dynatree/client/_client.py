"""The client for synchronous code."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from dynatree.client._completion import Chunk, Completion
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

# gRPC's default iterator waits on a condition that it shares with a thread of the channel. A KeyboardInterrupt during
# that wait may leave the lock held or the thread waiting, so that close() never returns. With this option, the
# iterator waits in gRPC's core instead.
_READ_ON_THE_CALLERS_THREAD = ((ChannelOptions.SingleThreadedUnaryStream, 1),)


class _Call(Protocol):
    """The used part of the interface of a streaming RPC in progress."""

    def __iter__(self) -> Iterator[draft_pb2.GenerateResponse]: ...

    def cancel(self) -> bool: ...


def _drain(call: Any) -> None:
    """Consume the remaining events of a cancelled call, which are available without waiting.

    With `SingleThreadedUnaryStream` gRPC itself does not consume them, and until then the channel keeps 12 KB per call.
    """
    with suppress(AttributeError):  # if a future gRPC renames its private names, the channel keeps the call
        while call._state.due:
            call._consume_next_event()


class CompletionStream(Accumulator):
    """One or several completions in progress: an iterator of `Chunk`, to be read once, and a context manager.

    Leaving the context, or calling `close()`, before the end cancels the request on the server. So does dropping the
    last reference to the stream, for example by a `break` out of a loop over `client.stream(...)`.
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
        self._reading = threading.Lock()  # held by the thread that consumes the call's events
        self._torn = False  # whether consuming was interrupted; gRPC may then have taken an event without noting it
        self._call = start(request, self._span.metadata)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """Wait for the next chunk, and return it.

        Raises:
            DynaTreeError: the request failed; the error has the text and the tokens received so far.
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
        """Wait for the next chunk; None at the end."""
        while True:
            try:
                for response in self._call:
                    if chunk := self._add(response):
                        return chunk
            except grpc.RpcError as error:
                # The error is the call itself, and its traceback refers to it: only a garbage collection would free it.
                error.__traceback__ = None
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
        """Cancel the request unless it has ended. The results received so far stay in `text` and `token_ids`."""
        self._ended = True
        self._closing.set()
        self._call.cancel()
        if not self._torn and self._reading.acquire(blocking=False):  # else another thread reads, and drains the call
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
    """A connection to one or several draft services, which threads may share.

    When a service is lost, its requests resume on another one, or on the same one once it is back. They continue after
    the tokens received so far: no token is repeated or lost. `resume=False` disables this.
    """

    def __init__(self, address: str, **settings: Unpack[ClientSettings]) -> None:
        """Create the client; it connects at the first call.

        Args:
            address: the draft service's address: `host:port`, `unix:PATH`, or `dns:///name:port` for all addresses that
                the name resolves to. Several addresses are separated by commas, and used in turn.
            **settings: see `ClientSettings`.

        Raises:
            ValueError: the address, or the value of a setting, is invalid.
            TypeError: a setting has the wrong type, or does not exist.
            OSError: a certificate or key file cannot be read.
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
        """Complete `prompt`, and return the whole completion; if n > 1, the first one, with its `alternatives`.

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
        """Start to complete `prompt`, and return an iterator of chunks. Arguments and errors as in `generate`."""
        request = build_request(prompt, **options)
        sent = self._with(metadata)
        deadline, servers = self._connect(timeout), self._servers_in_turn()

        def start(request: draft_pb2.GenerateRequest, traced: Metadata) -> _Call:
            stub = self._stubs[next(servers)]
            call: _Call = stub.Generate(request, timeout=deadline.remaining(), metadata=sent + traced)
            return call

        return CompletionStream(start, self._address, request, self._attempts(deadline.remaining))

    def model_info(self, *, timeout: float | None = None, metadata: Metadata = ()) -> ServiceInfo:
        """Return the service's models and policies. While the verify service is down, the target is the last known.

        Args:
            timeout: as for `generate`.
            metadata: as for `generate`.

        Raises:
            DynaTreeError: the call failed; see `dynatree.client` for the subclasses.
        """
        sent = self._with(metadata)

        def ask(stub: draft_pb2_grpc.DraftServiceStub, seconds: float | None) -> ServiceInfo:
            return ServiceInfo.from_pb(stub.GetModelInfo(MODEL_INFO_REQUEST, timeout=seconds, metadata=sent))

        return self._ask(ask, self._connect(timeout))

    def vocabulary(self, *, timeout: float | None = None, metadata: Metadata = ()) -> tuple[bytes, ...]:
        """Return the bytes that each token adds to a text, indexed by token id; they may be parts of characters.

        Args:
            timeout: as for `generate`.
            metadata: as for `generate`.

        Raises:
            DynaTreeError: the call failed; see `dynatree.client` for the subclasses.
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

        def ask(stub: draft_pb2_grpc.DraftServiceStub, seconds: float | None) -> Tokens:
            return Tokens.from_pb(stub.Tokenize(request, timeout=seconds, metadata=sent))

        return self._ask(ask, self._connect(timeout))

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None, metadata: Metadata = ()) -> str:
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

        def ask(stub: draft_pb2_grpc.DraftServiceStub, seconds: float | None) -> str:
            response: draft_pb2.DetokenizeResponse = stub.Detokenize(request, timeout=seconds, metadata=sent)
            return response.text

        return self._ask(ask, self._connect(timeout))

    def is_serving(self, *, timeout: float = 1.0) -> bool:
        """Whether at least one draft service accepts requests, which requires a verify service that does.

        Args:
            timeout: the longest wait for the answer of each draft service, in seconds.
        """
        return any(self._serves(channel, timeout) for channel in self._channels)

    def _serves(self, channel: grpc.Channel, timeout: float) -> bool:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(HEALTH_METHOD)
        try:
            return is_serving(check(b"", timeout=timeout, wait_for_ready=True))
        except grpc.RpcError:
            return False

    def _ask(self, ask: Callable[[draft_pb2_grpc.DraftServiceStub, float | None], T], deadline: Deadline) -> T:
        """Ask the servers in turn, and return the first answer."""
        attempts = self._attempts_at_question(deadline)
        for server in self._servers_in_turn():
            try:
                return ask(self._stubs[server], deadline.remaining())
            except grpc.RpcError as error:
                pause = self._pause(attempts, error)
            time.sleep(pause)
            self._check_open()
        raise AssertionError("the last attempt raises")

    def close(self) -> None:
        """Close the connection, and cancel requests in progress. Further calls have no effect."""
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
        """Wait for a server if this is the first call; return the call's deadline, which includes the wait."""
        deadline = self._deadline(timeout)
        if not self._connected:
            wait = self._connect_wait(deadline, len(self._stubs))
            for server, seconds in wait:
                # Not grpc.channel_ready_future: its thread outlives it, and prints an error if the client is closed.
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
