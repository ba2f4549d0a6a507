"""A completion's session on a verify service, resumed on another one if that service is lost.

The next token depends only on the committed tokens, the seed and the position, so any verify service can open a session
on the prompt and the committed tokens. The first commit of that session is the next token of the completion, as if it
answered an empty tree. So a fault costs one prefill and the nodes of the tree in flight, but no token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, TypeVar

import grpc

from dynatree.common.errors import (
    FailedPreconditionError,
    OutOfRangeError,
    PeerFailedError,
    PeerUnavailableError,
    ServiceBusyError,
    ServiceError,
)
from dynatree.common.limits import RESUME_SECONDS
from dynatree.common.messages import Commit, OpenSession, SessionOpened
from dynatree.common.model_info import ModelInfo
from dynatree.common.tree import TokenTree
from dynatree.draft.target.replica import Replica
from dynatree.draft.target.replicas import Replicas
from dynatree.draft.target.target import Target
from dynatree.draft.target.verify_client import VerifyStream
from dynatree.serving.channel import Metadata

log = logging.getLogger(__name__)

T = TypeVar("T")


PAUSE_SECONDS = 0.2  # longest delay before services are tried again


class TargetChangedError(Exception):
    """The verify service's target is not the one that the request was built for."""


@dataclass(frozen=True)
class Patience:
    """How long a verify service may take before it counts as lost; times are seconds.

    A late answer alone is no proof: the service may be reading prompts of other sessions first. So after `rounds` of
    its usual rounds the service gets a health check, and counts as lost if it does not answer that either.

    Attributes:
        rounds: Number of usual rounds to wait before the health check.
        least: Shortest wait before the health check.
        most: Longest wait before the health check.
        health: Timeout of the health check.
        stuck: Longest wait for the answer to a tree while health checks are answered, in case the device hangs. If
            `rounds` of the usual rounds take longer, it is as long as they.
    """

    rounds: float = 10.0
    least: float = 1.0
    most: float = 10.0
    health: float = 2.0
    stuck: float = 120.0

    def before_asking(self, round_seconds: float) -> float:
        """Seconds to wait before the health check of a service with this usual round time."""
        return min(max(self.rounds * round_seconds, self.least), self.most)

    def before_leaving(self, round_seconds: float) -> float:
        """Seconds to wait for the answer to a tree while a service with this usual round time answers health checks."""
        return max(self.rounds * round_seconds, self.stuck)


PATIENCE = Patience()


class RemoteSession:
    """One session of a completion, kept alive across verify services. Use as a context: `open`, then `verify`.

    Invariant: `_committed` holds the prompt and all tokens that `open` and `verify` have returned, in order.

    Args:
        replicas: The verify services.
        replica: The verify service to open the session on.
        request: The request for the session.
        timeout: Seconds until the client's deadline; None: no deadline.
        resume_seconds: Longest time without a verify service; with 0, losing the service fails an open session.
        patience: When a silent service counts as lost.
        metadata: gRPC metadata of the streams: the request's id and its trace.

    Attributes:
        max_tree_nodes: Largest tree that the service accepts, in nodes.
        resumes: Number of times that the session resumed on another service.
        resume_seconds: Seconds from each loss to the next token, summed.
    """

    def __init__(
        self,
        replicas: Replicas,
        replica: Replica,
        request: OpenSession,
        timeout: float | None,
        resume_seconds: float = RESUME_SECONDS,
        patience: Patience = PATIENCE,
        metadata: Metadata = (),
    ) -> None:
        self.max_tree_nodes = 0
        self.resumes = 0
        self.resume_seconds = 0.0
        self._replicas = replicas
        self._replica = replica
        self._request = request
        self._until = None if timeout is None else time.monotonic() + timeout
        self._window = resume_seconds
        self._patience = patience
        self._metadata = metadata
        self._stream: VerifyStream | None = None
        self._lost = False  # whether the stream's service counts as lost
        self._committed = list(request.prompt_ids)
        self._like: ModelInfo | None = None

    @property
    def target(self) -> Target:
        """The target of the session's current service."""
        assert self._replica.target is not None
        return self._replica.target

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._stream is not None:
                await self._stream.end()
        finally:
            self._leave()

    async def open(self, like: ModelInfo) -> SessionOpened:
        """Open the session on a target that gives the tokens of `like`.

        Raises:
            TargetChangedError: The service has changed its target.
            PeerUnavailableError: No service could be reached in time.
            ServiceError: A service refused the request, or no reachable service has room for it.
        """
        self._like = like
        try:
            opened = await self._open_on(self._replica)
        except (PeerUnavailableError, PeerFailedError, ServiceBusyError) as failure:
            opened = await self._again(failure, opening=True)
        if opened.target.context_length != like.context_length:
            raise TargetChangedError
        decoding = self._request.decoding
        if decoding.max_new_tokens is None:  # fix the end now, so that it is the same on another service
            new_tokens = like.context_length - self._request.prompt_tokens
            self._request = replace(self._request, decoding=replace(decoding, max_new_tokens=new_tokens))
        self._committed.extend(opened.commit.token_ids)
        return opened

    async def verify(self, tree: TokenTree, last: Commit) -> Commit:
        """Verify the tree that follows the commit `last`; if the session is lost, return the next service's commit.

        Raises:
            PeerUnavailableError: No service could be reached in time.
            PeerFailedError: Two services failed one after the other.
            DeadlineExceededError: The client's deadline has passed.
        """
        sent = time.monotonic()
        opened = None if self._replica.ready else await self._moved(last)
        try:
            if opened is None:
                assert self._stream is not None
                most = self._patience.before_leaving(self._replica.round_seconds)
                commit = await self._patiently(self._stream.verify(tree, last), most)
                self._replica.observe(time.monotonic() - sent)
        except (PeerUnavailableError, PeerFailedError) as failure:
            self._request = self._rest(last)
            opened = await self._again(failure)
        if opened is not None:
            commit = self._resumed(opened, tree, sent)
        self._committed.extend(commit.token_ids)
        return commit

    async def _moved(self, last: Commit) -> SessionOpened | None:
        """Open the session elsewhere before its service stops; None if no other service takes it yet."""
        other = self._other([self._replica])
        if other is None:
            return None
        self._request = self._rest(last)
        replica, stream, self._stream = self._replica, self._stream, None  # so `_open_on` does not leave it
        assert stream is not None
        opened = None
        try:
            with suppress(ServiceError):  # it has no room, for example
                opened = await self._open_on(other)
        finally:
            if opened is None:
                self._leave()
                self._replica, self._stream, self._lost = replica, stream, False
            else:
                stream.cancel()
                replica.sessions -= 1
        return opened

    def _rest(self, last: Commit) -> OpenSession:
        """Return the request for a session that continues after the commit `last`."""
        return replace(
            self._request,
            prompt_ids=tuple(self._committed),
            generated=self._request.generated + len(self._committed) - len(self._request.prompt_ids),
            round=last.next_round + 1,
            decoding=replace(self._request.decoding, prompt_log_probs=False),  # sent with the first session
        )

    def _resumed(self, opened: SessionOpened, tree: TokenTree, sent: float) -> Commit:
        """Return the first commit of a session that resumed, as if it answered an empty tree."""
        elapsed, generated = time.monotonic() - sent, self._request.generated
        self.resumes += 1
        self.resume_seconds += elapsed
        log.info("a completion continues at %s after %.2f s, with %d tokens", self._replica.address, elapsed, generated)
        return replace(
            opened.commit,
            trimmed=len(tree),
            timings=replace(opened.commit.timings, total=elapsed),
            resumed=True,
        )

    async def _again(self, failure: ServiceError, *, opening: bool = False) -> SessionOpened:
        """Try other services one after the other until one accepts the session or the time is over.

        At its `opening`, the session has lost nothing, so each ready service is tried once, however short the time is.
        If no service has room, a new session is refused, and a resumed session waits.
        """
        deadline = math.inf if self._until is None else self._until
        over = min(time.monotonic() + self._window, deadline)
        until = deadline if opening else over
        avoid = {self._replica}
        while time.monotonic() < until:
            replica = self._other(avoid)
            if replica is None:
                if isinstance(failure, ServiceBusyError) and not self._request.generated:
                    break
                until = over
                avoid.clear()  # a service may be back, or have room again
                await self._replicas.changed(min(PAUSE_SECONDS, until - time.monotonic()))
                continue
            try:
                return await self._open_on(replica)
            except (ServiceBusyError, PeerUnavailableError) as error:
                failure = error
            except (OutOfRangeError, FailedPreconditionError):
                if not self._request.generated:
                    raise  # a resumed session fits elsewhere: this context is shorter, or this target has changed
            except PeerFailedError as error:
                if isinstance(failure, PeerFailedError):
                    raise  # two services failed in a row, so the request may be the cause
                failure = error
            avoid.add(replica)
        others = [each.target.info for each in self._replicas.all if each.ready and each.target]
        none = self._like is not None and not any(each.same_tokens(self._like) for each in others)
        if others and none and isinstance(failure, PeerUnavailableError):
            raise PeerUnavailableError(
                f"{failure}; another verify service is ready, but gives different tokens: {others[0]}"
            )
        raise failure

    def _other(self, avoid: Collection[Replica]) -> Replica | None:
        """Choose another service for the session; None if none fits."""
        return self._replicas.choose(self._like, avoid, self._request.least_context)

    async def _open_on(self, replica: Replica) -> SessionOpened:
        self._leave()
        left = None if self._until is None else self._until - time.monotonic()
        self._replica = replica
        try:
            self._stream, self._lost = replica.stream(left, self._metadata), False
        except grpc.aio.UsageError as error:  # the service was removed and its channel closed
            raise PeerUnavailableError("the verify service was lost") from error
        replica.sessions += 1
        opened = await self._patiently(self._stream.open(self._request), math.inf)
        target = replica.adopt(opened.target)
        assert self._like is not None
        if not target.info.same_tokens(self._like):
            if self._request.generated:
                raise PeerUnavailableError("the verify service now has another target")
            raise TargetChangedError
        self.max_tree_nodes = opened.max_tree_nodes
        return opened

    def _leave(self) -> None:
        """Cancel the stream to the current service, if there is one."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
            self._replica.sessions -= 1

    async def _patiently(self, answer: Awaitable[T], most: float) -> T:
        """Wait for the service's answer while the service is alive, about `most` seconds at most.

        Raises:
            PeerUnavailableError: The service counts as lost.
        """
        loop = asyncio.get_running_loop()
        late = self._patience.before_asking(self._replica.round_seconds)
        asking: list[asyncio.Task[None]] = []
        timer = loop.call_later(late, lambda: asking.append(loop.create_task(self._ask(late, most))))
        try:
            return await answer
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._lost or (task is not None and task.cancelling()):
                raise
            raise PeerUnavailableError("the verify service does not answer") from None
        finally:
            timer.cancel()
            for each in asking:
                each.cancel()

    async def _ask(self, late: float, most: float) -> None:
        """Check the health of a late service repeatedly; cancel the stream if a check fails or `most` is over."""
        began = time.monotonic() - late
        stream, replica = self._stream, self._replica
        while await replica.answers(self._patience.health) and time.monotonic() - began < most:
            await asyncio.sleep(late)
        log.warning("the verify service at %s did not answer for %.1f s", replica.address, time.monotonic() - began)
        self._lost = True
        replica.doubt()
        assert stream is not None
        stream.cancel()
