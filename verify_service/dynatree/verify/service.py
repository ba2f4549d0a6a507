"""VerifyService over gRPC: one bidirectional stream is one session."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from dynatree.common.errors import InvalidArgumentError, RoundInFlightError
from dynatree.common.model_thread import ModelThread
from dynatree.common.tree import TokenTree
from dynatree.common.wire import model_info_to_pb
from dynatree.v1 import verify_pb2, verify_pb2_grpc
from dynatree.verify.accept import Verdict
from dynatree.verify.session import Session, SessionRequest
from dynatree.verify.verifier import Timings, Verifier

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[verify_pb2.VerifyRequest]
Arrival = tuple[verify_pb2.VerifyRequest | None, float]  # a request, None at the end, and when it came
SERVICE_NAME = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name


class VerifyService(verify_pb2_grpc.VerifyServiceServicer):
    """Serves sessions on one verifier; a session ends with its stream, whatever the reason."""

    def __init__(self, verifier: Verifier, thread: ModelThread) -> None:
        self._verifier = verifier
        self._thread = thread

    async def GetModelInfo(  # noqa: N802
        self, request: verify_pb2.VerifyServiceGetModelInfoRequest, context: Context
    ) -> verify_pb2.VerifyServiceGetModelInfoResponse:
        """The target model."""
        return verify_pb2.VerifyServiceGetModelInfoResponse(model=model_info_to_pb(self._verifier.target))

    async def Verify(self, request_iterator: Requests, context: Context) -> None:  # noqa: N802
        """Open a session, then answer each tree with its commit.

        Reads and writes through the context, which costs less a message than an asynchronous generator does.
        """
        first, arrival = await _read(context)
        if first is None:
            return
        opening = self._thread.run(self._verifier.open, self._check_open(first))
        try:
            session, verdict, timings = await asyncio.shield(opening)
            commit = _commit_to_pb(session, TokenTree(), verdict, timings, arrival)
            await context.write(verify_pb2.VerifyResponse(opened=self._opened(session, commit)))
            request, arrival = await _read(context)
            while request is not None:
                following = asyncio.ensure_future(_read(context))
                try:
                    commit = await self._round(session, request, following, arrival)
                    await context.write(verify_pb2.VerifyResponse(commit=commit))
                    request, arrival = await following
                finally:
                    following.cancel()
        finally:
            # gRPC may cancel a handler more than once; the session is closed all the same
            await asyncio.shield(self._close(opening))

    async def _close(self, opening: asyncio.Future[tuple[Session, Verdict, Timings]]) -> None:
        """Close the session behind any forward that still runs for it; `opening` may not have come to its end."""
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            await self._thread.run(self._verifier.close, opening.result()[0])

    def _check_open(self, message: verify_pb2.VerifyRequest) -> SessionRequest:
        if message.WhichOneof("request") != "open":
            raise InvalidArgumentError("the first request of a stream opens the session; expected the field `open`")
        return SessionRequest.from_pb(
            message.open,
            self._verifier.target,
            self._verifier.engine.eos_token_ids,
            default_seed=secrets.randbits(63),
        )

    def _opened(self, session: Session, commit: verify_pb2.Commit) -> verify_pb2.SessionOpened:
        return verify_pb2.SessionOpened(
            max_tree_nodes=self._verifier.max_tree_nodes,
            context_length=self._verifier.target.context_length,
            commit=commit,
            seed=0 if session.request.sampling.greedy else session.request.sampling.seed,
        )

    async def _round(
        self,
        session: Session,
        request: verify_pb2.VerifyRequest,
        following: asyncio.Future[Arrival],
        arrival: float,
    ) -> verify_pb2.Commit:
        """Verify one tree while watching for a request that comes too early.

        Raises:
            RoundInFlightError: A second request came before this one was answered.
        """
        tree = session.check_tree(request, self._verifier.max_tree_nodes, self._verifier.target.vocab_size)
        verifying = self._thread.run(self._verifier.verify, [(session, tree)])
        both: set[asyncio.Future[Any]] = {verifying, following}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if following.done() and following.result()[0] is not None:
            raise RoundInFlightError("a request came before the round was answered; expected one round at a time")
        verdicts, timings = await verifying
        return _commit_to_pb(session, tree, verdicts[0], timings, arrival)


async def _read(context: Context) -> Arrival:
    request = await context.read()
    return None if request is grpc.aio.EOF else request, time.perf_counter()


def _commit_to_pb(
    session: Session, tree: TokenTree, verdict: Verdict, timings: Timings, arrival: float
) -> verify_pb2.Commit:
    return verify_pb2.Commit(
        next_round=session.round,
        base_length=session.length,
        token_ids=verdict.token_ids,
        accepted_nodes=verdict.accepted,
        acceptance=verify_pb2.AcceptanceStatistics(
            drafted=len(tree), accepted=len(verdict.accepted), tree_depth=tree.depth
        ),
        timings=verify_pb2.VerifyTimings(
            forward_seconds=timings.forward,
            accept_seconds=timings.accept,
            commit_seconds=timings.commit,
            total_seconds=time.perf_counter() - arrival,
        ),
        finish_reason=verdict.finish_reason,
        log_probs=verdict.log_probs,
    )
