"""The draft service's client of a verify service: model query, health, and one stream per session."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import PurePath
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dynatree.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    GrammarError,
    InvalidArgumentError,
    OutOfRangeError,
    PeerFailedError,
    PeerUnavailableError,
    ServiceBusyError,
    ServiceError,
)
from dynatree.common.messages import Commit, OpenSession, SessionOpened
from dynatree.common.model_info import ModelInfo
from dynatree.common.tree import TokenTree
from dynatree.common.wire import (
    commit_from_pb,
    model_info_from_pb,
    open_session_to_pb,
    session_opened_from_pb,
    tree_to_pb,
)
from dynatree.serving.channel import Connector, Metadata
from dynatree.serving.grpc_options import GRAMMAR, REFUSED, RETRY_AFTER
from dynatree.v1 import verify_pb2, verify_pb2_grpc

log = logging.getLogger(__name__)

M = TypeVar("M")
T = TypeVar("T")
_REQUEST = re.compile(r" \(request [\w.:-]+\)$")
LAST_WORD_SECONDS = 1.0  # timeout for the final status of a session
# If a verify service rejects the opening of a session, the client's request is at fault and the code is passed on. If
# it rejects a tree, the services are at fault, unless the grammar cannot be followed further.
PASSED_ON = {
    grpc.StatusCode[error.code]: error for error in (InvalidArgumentError, OutOfRangeError, FailedPreconditionError)
}


# Statuses that gRPC itself sets, without an answer of the peer.
_GRPCS_OWN = (
    (grpc.StatusCode.CANCELLED, "CANCELLED"),
    (grpc.StatusCode.INTERNAL, "Internal error from Core"),
)
# Codes of transient failures: the same call may succeed a moment later.
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)


class VerifyClient:
    """A channel to one verify service.

    Args:
        address: `host:port` or `unix:PATH`.
        connector: Opens channels.
        server_name: Name expected in the certificate, if DNS gave the address.
    """

    def __init__(self, address: str, connector: Connector, server_name: str | None = None) -> None:
        self.address = address
        self._connector = connector
        self._channel = connector.channel(address, server_name)
        self._stub = verify_pb2_grpc.VerifyServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def model_info(self, timeout: float) -> ModelInfo:
        """Ask for the target model.

        Raises:
            PeerUnavailableError: The service is out of reach.
            FailedPreconditionError: The service is no verify service, or refuses to answer.
        """
        request = verify_pb2.VerifyServiceGetModelInfoRequest()
        try:
            response = await self._stub.GetModelInfo(request, timeout=timeout, metadata=self._connector.metadata())
        except grpc.aio.AioRpcError as error:
            raise self._refusal(error, "is not a verify service of DynaTree") from error
        return model_info_from_pb(response.model)

    async def tokenizer_files(self, timeout: float) -> dict[str, bytes]:
        """Ask for the files of the target's tokenizer, by name.

        Raises:
            PeerUnavailableError: The service is out of reach.
            FailedPreconditionError: The service is too old to send them, or refuses to.
        """
        files: dict[str, bytearray] = {}
        call = self._stub.GetTokenizer(
            verify_pb2.GetTokenizerRequest(), timeout=timeout, metadata=self._connector.metadata()
        )
        try:
            async for part in call:
                files.setdefault(PurePath(part.name).name, bytearray()).extend(part.data)
        except grpc.aio.AioRpcError as error:
            raise self._refusal(error, "is too old to send its tokenizer") from error
        return {name: bytes(data) for name, data in files.items()}

    def _refusal(self, error: grpc.aio.AioRpcError, unknown: str) -> PeerUnavailableError | FailedPreconditionError:
        """Translate the error of a call outside sessions; `unknown` is said of a service without the call's method."""
        if error.code() in PASSING or was_dropped(error.code(), error.details()):
            return PeerUnavailableError("the verify service is out of reach")
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return FailedPreconditionError(f"the service at {self.address} {unknown}")
        return FailedPreconditionError(f"the verify service at {self.address} refused: {error.details()}")

    async def serving(self) -> AsyncGenerator[bool]:
        """Yield whether the service serves, now and after each change; wait for it to come up.

        Raises:
            PeerUnavailableError: The connection was lost.
        """
        call = self._health.Watch(
            health_pb2.HealthCheckRequest(), wait_for_ready=True, metadata=self._connector.metadata()
        )
        try:
            async for response in call:
                yield response.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            raise PeerUnavailableError(f"the verify service is out of reach: {error.code().name}") from error
        finally:
            call.cancel()

    async def answers(self, timeout: float) -> bool:
        """Whether the service answers a health check within `timeout` seconds, whatever the answer."""
        try:
            await self._health.Check(
                health_pb2.HealthCheckRequest(), timeout=timeout, metadata=self._connector.metadata()
            )
        except grpc.aio.AioRpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return True

    async def cause(self) -> str:
        """Return gRPC's reason why there is no connection; "" if there is one, or gRPC gives no reason."""
        request = health_pb2.HealthCheckRequest()
        try:
            await self._health.Check(request, timeout=LAST_WORD_SECONDS, metadata=self._connector.metadata())
        except grpc.aio.AioRpcError as error:
            _, found, last = (error.details() or "").partition("last error: ")
            return last.removeprefix("UNKNOWN: ").removeprefix("UNAVAILABLE: ") if found else ""
        return ""

    def stream(self, timeout: float | None, metadata: Metadata = ()) -> VerifyStream:
        """Open a stream for one session; the caller ends it."""
        call = self._stub.Verify(timeout=timeout, metadata=(*self._connector.metadata(), *metadata))
        return VerifyStream(call, self.address, channel=self._channel)

    async def close(self) -> None:
        """Close the channel and all calls on it."""
        await self._channel.close()


class VerifyStream:
    """One open stream, on which each request gets one answer.

    `address` is for the log only; clients never see addresses. The stream keeps a reference to its `channel`, because
    an unreferenced channel closes.
    """

    def __init__(self, call: Any, address: str, channel: Any = None) -> None:
        self._call = call
        self._channel = channel
        self._address = address

    async def open(self, request: OpenSession) -> SessionOpened:
        """Open the session; the answer carries the target and the first commit.

        Raises:
            PeerUnavailableError: The service is out of reach.
            PeerFailedError: The service failed, or its answer is malformed or does not continue the prompt.
            ServiceError: The service refused the request.
        """
        response = await self._exchange(verify_pb2.VerifyRequest(open=open_session_to_pb(request)), opening=True)
        opened = _decoded(session_opened_from_pb, response.opened)
        self._check_length(opened.commit, len(request.prompt_ids))
        return opened

    async def verify(self, tree: TokenTree, last: Commit) -> Commit:
        """Send the tree that follows the commit `last`, and return the commit that answers it.

        Raises:
            PeerUnavailableError: The service is out of reach.
            PeerFailedError: The service failed, or its answer is malformed or does not continue the last commit.
            DeadlineExceededError: The deadline has passed.
        """
        message = tree_to_pb(tree, round_=last.next_round, base_length=last.base_length)
        response = await self._exchange(verify_pb2.VerifyRequest(tree=message))
        commit = _decoded(commit_from_pb, response.commit)
        self._check_length(commit, last.base_length)
        return commit

    async def end(self) -> None:
        """End the session normally, so that the service sees no cancellation."""
        with suppress(grpc.RpcError, asyncio.InvalidStateError, asyncio.TimeoutError):
            await self._call.done_writing()
            await asyncio.wait_for(self._call.code(), LAST_WORD_SECONDS)
        self.cancel()

    def cancel(self) -> None:
        """Cancel the session at once."""
        self._call.cancel()

    def _check_length(self, commit: Commit, length: int) -> None:
        if commit.base_length != length + len(commit.token_ids):
            raise PeerFailedError(
                f"the verify service committed {len(commit.token_ids)} tokens after {length}, but reports a length of "
                f"{commit.base_length}"
            )

    async def _exchange(self, request: verify_pb2.VerifyRequest, opening: bool = False) -> verify_pb2.VerifyResponse:
        try:
            await self._call.write(request)
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            code, details, metadata = error.code(), error.details(), error.trailing_metadata()
            raise self._translated(code, details, metadata, opening) from error
        except asyncio.InvalidStateError as error:  # the stream was over before the write
            raise await self._ended(opening) from error
        if response is grpc.aio.EOF:
            raise await self._ended(opening)
        assert isinstance(response, verify_pb2.VerifyResponse)
        return response

    async def _ended(self, opening: bool) -> ServiceError:
        call = self._call
        return self._translated(await call.code(), await call.details(), await call.trailing_metadata(), opening)

    def _translated(self, code: grpc.StatusCode, details: str | None, metadata: Any, opening: bool) -> ServiceError:
        error = translated(code, details, metadata, opening)
        if not isinstance(error, ServiceBusyError):
            log.info("the verify service at %s ended a session with %s: %s", self._address, code.name, details)
        return error


def _decoded(decode: Callable[[M], T], message: M) -> T:
    """Decode an answer of the verify service, which is at fault if that fails."""
    try:
        return decode(message)
    except InvalidArgumentError as error:
        raise PeerFailedError(f"the verify service sent a malformed answer: {error}") from error


def translated(code: grpc.StatusCode, details: str | None, metadata: Any = (), opening: bool = False) -> ServiceError:
    """Translate the status that ended a call to an error; `opening`: the call was opening a session."""
    details = _REQUEST.sub("", details or "")  # the draft service names the request itself
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        after = dict(metadata or ()).get(RETRY_AFTER, "")
        return ServiceBusyError(details or code.name, int(after) / 1e3 if after.isdecimal() else None)
    if code == grpc.StatusCode.INVALID_ARGUMENT and dict(metadata or ()).get(REFUSED) == GRAMMAR:
        return GrammarError(details or code.name)
    if opening and code in PASSED_ON:
        return PASSED_ON[code](details or code.name)
    if code == grpc.StatusCode.UNAVAILABLE or was_dropped(code, details):
        return PeerUnavailableError("the verify service is out of reach")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError("the deadline has passed")
    return PeerFailedError(f"the verify service ended the session with {code.name}: {details}")


def was_dropped(code: grpc.StatusCode, details: str | None) -> bool:
    """Whether gRPC itself, not the peer, ended a call.

    gRPC's core drops calls at random while a thousand wait to be accepted. Its asyncio layer makes up a status if a
    write fails because the peer is gone and the peer's own status has not been read yet.
    """
    return (code, details) in _GRPCS_OWN
