"""A completion's session on a verify service, and on another one where that service is lost.

Which token comes next depends on the committed tokens, the seed and the position alone, so a session can be opened
anywhere on the prompt and the tokens that are committed. Its first commit is then one more token of the completion: the
answer to an empty tree. So a fault costs the nodes of the tree that was on its way and a prefill, and no token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Collection
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self, TypeVar

import grpc

from dynatree.common.channel import Metadata
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
from dynatree.draft.replica import Replica
from dynatree.draft.replicas import Replicas
from dynatree.draft.target import Target
from dynatree.draft.verify_client import VerifySession

log = logging.getLogger(__name__)

T = TypeVar("T")


PAUSE_SECONDS = 0.2  # before services that were tried are tried again


class TargetChangedError(Exception):
    """The verify service has another target than the request was made for."""


@dataclass(frozen=True)
class Patience:
    """How long a verify service may take before it counts as lost; times are seconds.

    An answer that is late is no proof: others' prompts may be read before. So a service whose answer is later than
    `rounds` of its usual rounds is asked for its health, and lost where it does not answer that either.

    Attributes:
        rounds: Of the usual length, until it is asked.
        least: Until it is asked, however short its rounds.
        most: Until it is asked, however long its rounds.
        health: For the answer about its health.
        stuck: After which an answer to a tree is given up although its health is answered: a device that hangs.
    """

    rounds: float = 10.0
    least: float = 1.0
    most: float = 10.0
    health: float = 2.0
    stuck: float = 120.0

    def before_asking(self, round_seconds: float) -> float:
        """Seconds to wait for an answer."""
        return min(max(self.rounds * round_seconds, self.least), self.most)


PATIENCE = Patience()


class TargetSession:
    """One session of a completion, kept alive across verify services; a context, `open` and then `verify`.

    Invariant: `_committed` are the prompt and every token that `open` and `verify` have returned, in order.

    Args:
        replicas: The verify services.
        replica: The one to open on.
        request: The session.
        timeout: Seconds until the client's deadline; None without one.
        resume_seconds: The longest that a session may be without a service; 0: a session that is lost has failed.
        patience: When a service counts as lost that does not answer.
        metadata: Of the streams: the request's id, and the trace that it belongs to.

    Attributes:
        max_tree_nodes: Of the largest tree that the service takes.
        resumes: How often the session went on elsewhere.
        resume_seconds: From each loss to the next token, summed.
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
        self._stream: VerifySession | None = None
        self._lost = False  # the service of the stream hangs
        self._committed = list(request.prompt_ids)
        self._like: ModelInfo | None = None

    @property
    def target(self) -> Target:
        """The target of the service that has the session."""
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
            TargetChangedError: The service has another target by now.
            PeerUnavailableError: No service could be reached in time.
            ServiceError: A service refused the request, or all that could be reached have no room for it.
        """
        self._like = like
        try:
            opened = await self._open_on(self._replica)
        except (PeerUnavailableError, PeerFailedError, ServiceBusyError) as failure:
            opened = await self._again(failure)
        if opened.target.context_length != like.context_length:
            raise TargetChangedError
        if self._request.max_new_tokens is None:  # it ends where it would have ended here, wherever it goes on
            self._request = replace(self._request, max_new_tokens=like.context_length - self._request.prompt_tokens)
        self._committed.extend(opened.commit.token_ids)
        return opened

    async def verify(self, tree: TokenTree, last: Commit) -> Commit:
        """Have the tree that follows the commit `last` checked; the commit of an empty tree where the session was lost.

        Raises:
            PeerUnavailableError: No service could be reached in time.
            PeerFailedError: A service failed, and then another.
            DeadlineExceededError: The client's deadline has passed.
        """
        assert self._stream is not None
        sent = time.monotonic()
        try:
            if self._replica.ready or self._other([self._replica]) is None:
                commit = await self._patiently(self._stream.verify(tree, last), self._patience.stuck)
                self._replica.observe(time.monotonic() - sent)
            else:
                commit = await self._resumed(PeerUnavailableError("the verify service stops"), tree, last, sent)
        except (PeerUnavailableError, PeerFailedError) as failure:
            commit = await self._resumed(failure, tree, last, sent)
        self._committed.extend(commit.token_ids)
        return commit

    async def _resumed(self, failure: ServiceError, tree: TokenTree, last: Commit, sent: float) -> Commit:
        """What another service commits next, as if it had answered an empty tree."""
        generated = self._request.generated + len(self._committed) - len(self._request.prompt_ids)
        self._request = replace(
            self._request,
            prompt_ids=tuple(self._committed),
            generated=generated,
            round=last.next_round + 1,
            prompt_log_probs=False,  # they came with the first session
        )
        opened = await self._again(failure)
        elapsed = time.monotonic() - sent
        self.resumes += 1
        self.resume_seconds += elapsed
        log.info("a completion goes on at %s after %.2f s, with %d tokens", self._replica.address, elapsed, generated)
        return replace(
            opened.commit,
            drafted=len(tree),
            tree_depth=tree.depth,
            trimmed=len(tree),
            timings=replace(opened.commit.timings, total=elapsed),
            resumed=True,
        )

    async def _again(self, failure: ServiceError) -> SessionOpened:
        """Open the session on one service after the other, until one takes it or the time is over.

        A request for a first session that all have refused for want of room is refused; one that goes on waits.
        """
        until = time.monotonic() + self._window
        if self._until is not None:
            until = min(until, self._until)
        avoid = {self._replica}
        while (left := until - time.monotonic()) > 0:
            replica = self._other(avoid)
            if replica is None:
                if isinstance(failure, ServiceBusyError) and not self._request.generated:
                    break
                avoid.clear()  # one may be back by now, or have room
                await self._replicas.changed(min(PAUSE_SECONDS, left))
                continue
            try:
                return await self._open_on(replica)
            except (ServiceBusyError, PeerUnavailableError) as error:
                failure = error
            except (OutOfRangeError, FailedPreconditionError):
                if not self._request.generated:
                    raise  # else another one took it: this one has a shorter context, or another target by now
            except PeerFailedError as error:
                if isinstance(failure, PeerFailedError):
                    raise  # two failed one after the other: it may be the request
                failure = error
            avoid.add(replica)
        others = [each.target.info for each in self._replicas.all if each.ready and each.target]
        none = self._like is not None and not any(each.same_tokens(self._like) for each in others)
        if others and none and isinstance(failure, PeerUnavailableError):
            raise PeerUnavailableError(f"{failure}; another one is ready, and gives other tokens: {others[0]}")
        raise failure

    def _other(self, avoid: Collection[Replica]) -> Replica | None:
        """Another service that can have the session; None where there is none."""
        return self._replicas.choose(self._like, avoid, self._request.least_context)

    async def _open_on(self, replica: Replica) -> SessionOpened:
        self._leave()
        left = None if self._until is None else self._until - time.monotonic()
        self._replica = replica
        try:
            self._stream, self._lost = replica.session(left, self._metadata), False
        except grpc.aio.UsageError as error:  # it is gone, and its channel closed
            raise PeerUnavailableError("the verify service is gone") from error
        replica.sessions += 1
        opened = await self._patiently(self._stream.open(self._request), math.inf)
        target = replica.adopt(opened.target)
        assert self._like is not None
        if not target.info.same_tokens(self._like):
            if self._request.generated:
                raise PeerUnavailableError("the verify service has another target by now")
            raise TargetChangedError
        self.max_tree_nodes = opened.max_tree_nodes
        return opened

    def _leave(self) -> None:
        """Leave the service that has the session, whatever the session is at."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
            self._replica.sessions -= 1

    async def _patiently(self, answer: Awaitable[T], most: float) -> T:
        """The answer of the stream's service, for as long as that lives; `most` seconds at most.

        Raises:
            PeerUnavailableError: It hangs.
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
        """Ask a service whose answer is late for its health, again and again; end the stream where it gives none."""
        began = time.monotonic() - late
        stream, replica = self._stream, self._replica
        while await replica.answers(self._patience.health) and time.monotonic() - began < most:
            await asyncio.sleep(late)
        log.warning("the verify service at %s did not answer for %.1f s", replica.address, time.monotonic() - began)
        self._lost = True
        replica.doubt()
        assert stream is not None
        stream.cancel()
