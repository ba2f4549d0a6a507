"""The draft service's side of the stream to the verify service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from dynatree.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
    PeerFailedError,
    PeerUnavailableError,
    ServiceBusyError,
    ServiceError,
    StartupError,
)
from dynatree.common.grpc_options import CHANNEL_OPTIONS, RETRY_AFTER
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
from dynatree.v1 import verify_pb2, verify_pb2_grpc

# Errors that the verify service blames on the request keep their code; it was the client's request.
PASSED_ON = {
    grpc.StatusCode[error.code]: error for error in (InvalidArgumentError, OutOfRangeError, FailedPreconditionError)
}


class VerifyClient:
    """A channel to one verify service."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = verify_pb2_grpc.VerifyServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def target(self, timeout: float) -> ModelInfo:
        """The target model, waiting up to `timeout` seconds for the service to come up.

        Raises:
            StartupError: It did not, or it refused.
        """
        try:
            return await self._ask(timeout, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise StartupError(f"no verify service answered at {self._address} within {timeout:g} s") from error
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise StartupError(f"the service at {self._address} is no verify service of DynaTree") from error
            raise StartupError(f"the verify service at {self._address} refused: {error.details()}") from error

    async def model_info(self, timeout: float | None) -> ModelInfo:
        """The target model, of a service that is up.

        Raises:
            PeerUnavailableError: It is not.
            ServiceError: It refused.
        """
        try:
            return await self._ask(timeout)
        except grpc.aio.AioRpcError as error:
            raise translated(error.code(), error.details(), self._address) from error

    async def _ask(self, timeout: float | None, *, wait_for_ready: bool = False) -> ModelInfo:
        request = verify_pb2.VerifyServiceGetModelInfoRequest()
        response = await self._stub.GetModelInfo(request, timeout=timeout, wait_for_ready=wait_for_ready)
        return model_info_from_pb(response.model)

    @asynccontextmanager
    async def session(self, timeout: float | None) -> AsyncIterator[VerifySession]:
        """A stream for one session, cancelled on exit however that comes about."""
        call = self._stub.Verify(timeout=timeout)
        try:
            yield VerifySession(call, self._address)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the channel and whatever runs on it."""
        await self._channel.close()


class VerifySession:
    """One open stream: one request, one answer."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address

    async def open(self, request: OpenSession) -> SessionOpened:
        """Open the session; the answer carries the target and the first commit.

        Raises:
            ServiceError: As `verify`.
        """
        response = await self._exchange(verify_pb2.VerifyRequest(open=open_session_to_pb(request)))
        return session_opened_from_pb(response.opened)

    async def verify(self, tree: TokenTree, last: Commit) -> Commit:
        """Send the tree that follows the commit `last`; returns its own commit.

        Raises:
            PeerUnavailableError: The service went away.
            PeerFailedError: The commit does not go on where the last one ended.
            ServiceError: It refused the request; the code is its own where the request was at fault.
        """
        message = tree_to_pb(tree, round_=last.next_round, base_length=last.base_length)
        response = await self._exchange(verify_pb2.VerifyRequest(tree=message))
        commit = commit_from_pb(response.commit)
        if commit.base_length != last.base_length + len(commit.token_ids):
            raise PeerFailedError(
                f"the verify service at {self._address} committed {len(commit.token_ids)} tokens to "
                f"{last.base_length}, and says that there are {commit.base_length}"
            )
        return commit

    async def _exchange(self, request: verify_pb2.VerifyRequest) -> verify_pb2.VerifyResponse:
        try:
            await self._call.write(request)
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise translated(error.code(), error.details(), self._address, error.trailing_metadata()) from error
        except asyncio.InvalidStateError as error:  # the stream was over before the write
            raise await self._ended() from error
        if response is grpc.aio.EOF:
            raise await self._ended()
        assert isinstance(response, verify_pb2.VerifyResponse)
        return response

    async def _ended(self) -> ServiceError:
        call = self._call
        return translated(await call.code(), await call.details(), self._address, await call.trailing_metadata())


def translated(code: grpc.StatusCode, details: str | None, address: str, metadata: Any = ()) -> ServiceError:
    """What a client is told of a status that the verify service at `address` ended a call with."""
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        after = dict(metadata or ()).get(RETRY_AFTER, "")
        return ServiceBusyError(details or code.name, int(after) / 1e3 if after.isdecimal() else None)
    if code in PASSED_ON:
        return PASSED_ON[code](details or code.name)
    if code == grpc.StatusCode.UNAVAILABLE:
        return PeerUnavailableError(f"the verify service at {address} is out of reach: {details}")
    return PeerFailedError(f"the verify service at {address} ended the session with {code.name}: {details}")
