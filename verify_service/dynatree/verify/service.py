"""The gRPC service VerifyService: each bidirectional stream is one session."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from dynatree.common.decoding import check_stop_tokens
from dynatree.common.errors import IdleSessionError, InvalidArgumentError, OutOfRangeError, RoundInFlightError
from dynatree.common.limits import IDLE_SECONDS, MAX_PRINCIPAL_LENGTH
from dynatree.common.messages import Commit, SessionOpened, VerifyTimings
from dynatree.common.model_info import token_limit
from dynatree.common.tree import TokenTree
from dynatree.common.wire import (
    commit_to_pb,
    model_info_to_pb,
    open_session_from_pb,
    session_opened_to_pb,
    tree_from_pb,
)
from dynatree.engine.grammar.compiler import GrammarCompiler
from dynatree.engine.model.tokenizer import files_of
from dynatree.engine.model_thread import ModelThread
from dynatree.engine.shared_cores import SharedCores, ShortWaits
from dynatree.serving.admission import Admission
from dynatree.serving.call_tracker import Call
from dynatree.serving.principals import is_principal, joint
from dynatree.serving.tracing import OFF, Span, Tracing
from dynatree.v1 import verify_pb2, verify_pb2_grpc
from dynatree.verify.metrics import VerifyMetrics
from dynatree.verify.scheduler import Scheduler
from dynatree.verify.session import SessionRequest, VerifySession
from dynatree.verify.verifier import Verifier

Context = Call
Requests = AsyncIterator[verify_pb2.VerifyRequest]
Arrival = tuple[verify_pb2.VerifyRequest | None, float]  # a request (None at the end) and its arrival time
FILE_PART = 2**20  # bytes of a tokenizer's file per message
SERVICE_NAME = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name


class VerifyService(verify_pb2_grpc.VerifyServiceServicer):
    """Serves sessions on one verifier; a session always ends with its stream.

    Args:
        verifier: The target model and its sessions.
        thread: Thread on which the verifier runs.
        scheduler: Gathers the sessions' trees and prompts into passes.
        admission: Queue of requests for sessions.
        metrics: Metrics of the service.
        idle_seconds: Seconds that a session waits for the next tree.
        tracing: Destination of spans.
    """

    def __init__(
        self,
        verifier: Verifier,
        thread: ModelThread,
        scheduler: Scheduler,
        admission: Admission,
        metrics: VerifyMetrics,
        idle_seconds: float = IDLE_SECONDS,
        tracing: Tracing = OFF,
    ) -> None:
        self._verifier = verifier
        self._thread = thread
        self._scheduler = scheduler
        self._admission = admission
        self._metrics = metrics
        self._tracing = tracing
        self._idle_seconds = idle_seconds
        self._cores = SharedCores(ShortWaits())
        self._grammars = GrammarCompiler(verifier.engine.tokenizer, verifier.engine.eos_token_ids)
        self._tokenizer: dict[str, bytes] = {}  # its files by name, made at the first use

    def read_ahead(self) -> None:
        """Begin to read the tokenizer for grammars."""
        self._grammars.read_ahead()

    async def GetModelInfo(  # noqa: N802
        self, request: verify_pb2.VerifyServiceGetModelInfoRequest, context: Context
    ) -> verify_pb2.VerifyServiceGetModelInfoResponse:
        """Return the description of the target model."""
        return verify_pb2.VerifyServiceGetModelInfoResponse(model=model_info_to_pb(self._verifier.target))

    async def GetTokenizer(  # noqa: N802
        self, request: verify_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[verify_pb2.GetTokenizerResponse]:
        """Stream the files of the target's tokenizer, in parts."""
        if not self._tokenizer:
            self._tokenizer = await asyncio.to_thread(files_of, self._verifier.engine.tokenizer)
        for name, data in self._tokenizer.items():
            for start in range(0, len(data), FILE_PART):
                yield verify_pb2.GetTokenizerResponse(name=name, data=data[start : start + FILE_PART])

    async def Verify(self, request_iterator: Requests, context: Context) -> None:  # noqa: N802
        """Open a session when its turn comes, then answer each tree with a commit.

        It reads and writes through the context, which costs less per message than an asynchronous generator.
        """
        first, arrival = await _read(context)
        if first is None:
            return
        request = self._check_open(first, context.principal)
        if request.finish_reason is not None:
            await context.write(verify_pb2.VerifyResponse(opened=session_opened_to_pb(self._over(request, arrival))))
            return
        if (grammar := request.decoding.grammar) is not None:
            generated = request.prompt_ids[len(request.prompt_ids) - request.generated :]
            state = await asyncio.to_thread(self._grammars.state, grammar, generated)
            request = replace(request, grammar=state)
        one_device = first.open.draft.device_id == self._verifier.target.device_id
        slots = self._verifier.slots(request)
        async with self._admission.queued(request.principal, slots, context.time_remaining()) as turn:
            await turn.come()
            async with self._thread.held(partial(self._verifier.open, request), self._verifier.close) as session:
                try:
                    with (
                        self._cores.shared() if one_device else nullcontext(),
                        self._tracing.span("verify", context.invocation_metadata(), cached=session.cached) as span,
                    ):
                        await self._serve(session, turn.queue_seconds, context, arrival, span)
                finally:
                    self._scheduler.forget(session)

    async def _serve(
        self, session: VerifySession, queue_seconds: float, context: Context, arrival: float, span: Span
    ) -> None:
        with span.child("prefill", tokens=session.unread):
            commit = await self._scheduler.prefill(session)
        self._metrics.cached(session.cached)
        opened = SessionOpened(
            target=self._verifier.target,
            max_tree_nodes=self._verifier.max_tree_nodes,
            commit=self._answered(commit, arrival),
            queue_seconds=queue_seconds,
            cached_tokens=session.cached,
            prompt_log_probs=session.prompt_log_probs,
            prompt_top_log_probs=session.prompt_top_log_probs,
        )
        await context.write(verify_pb2.VerifyResponse(opened=session_opened_to_pb(opened)))
        following = asyncio.ensure_future(_read(context))
        try:
            while (request := await self._next(following)) is not None:
                arrival = following.result()[1]
                following = asyncio.ensure_future(_read(context))
                commit = await self._round(session, request, following, arrival)
                await context.write(verify_pb2.VerifyResponse(commit=commit_to_pb(commit)))
        finally:
            span.note(rounds=session.round, tokens=session.length)
            following.cancel()

    async def _next(self, following: asyncio.Future[Arrival]) -> verify_pb2.VerifyRequest | None:
        """The next request; None at the end of the stream.

        Raises:
            IdleSessionError: No request arrived in time.
        """
        arrived, _ = await asyncio.wait([following], timeout=self._idle_seconds)
        if not arrived:
            raise IdleSessionError(
                f"no tree arrived for {self._idle_seconds:g} s, which is the limit for an idle session"
            )
        return following.result()[0]

    def _check_open(self, message: verify_pb2.VerifyRequest, caller: str | None) -> SessionRequest:
        if message.WhichOneof("request") != "open":
            raise InvalidArgumentError("the first request of a stream opens the session; expected the field `open`")
        target = self._verifier.target
        prompt_tokens = len(message.open.prompt_ids) - message.open.generated
        token_limit(
            prompt_tokens, message.open.max_new_tokens if message.open.HasField("max_new_tokens") else None, target
        )
        if len(message.open.prompt_ids) > target.context_length:  # before they are copied
            raise OutOfRangeError(
                f"{len(message.open.prompt_ids)} prompt_ids, at most {target.context_length} are accepted"
            )
        check_stop_tokens(message.open.stop_token_ids)
        if message.open.principal and not is_principal(message.open.principal):
            raise InvalidArgumentError(f"a principal has at most {MAX_PRINCIPAL_LENGTH} characters, all printable")
        if message.open.round > target.context_length:
            raise OutOfRangeError(
                f"round is {message.open.round}, expected at most {target.context_length}, the context"
            )
        request = open_session_from_pb(
            message.open, default_seed=secrets.randbits(63), default_penalty=target.repetition_penalty
        )
        if caller is not None:  # a draft service may act only for its own principals
            request = replace(request, principal=joint(caller, request.principal))
        return SessionRequest.checked(request, target, self._verifier.engine.eos_token_ids)

    def _check_tree(self, session: VerifySession, request: verify_pb2.VerifyRequest) -> TokenTree:
        if request.WhichOneof("request") != "tree":
            raise InvalidArgumentError("the session is already open; expected the field `tree`")
        session.check_place(request.tree.round, request.tree.base_length)
        tree = tree_from_pb(
            request.tree,
            max_nodes=self._verifier.max_tree_nodes,
            max_depth=session.remaining,
            vocab_size=self._verifier.target.vocab_size,
        )
        session.check_distributions(tree)
        return tree

    def _over(self, request: SessionRequest, arrival: float) -> SessionOpened:
        """The answer to a resumed completion whose last token had already ended it."""
        timings = VerifyTimings(0.0, 0.0, 0.0, total=time.perf_counter() - arrival)
        commit = Commit(request.round, len(request.prompt_ids), (), (), timings, request.finish_reason)
        return SessionOpened(self._verifier.target, self._verifier.max_tree_nodes, commit)

    async def _round(
        self,
        session: VerifySession,
        request: verify_pb2.VerifyRequest,
        following: asyncio.Future[Arrival],
        arrival: float,
    ) -> Commit:
        """Verify one tree, and refuse a request that arrives in the meantime.

        Raises:
            RoundInFlightError: A second request arrived before this one was answered.
        """
        tree = self._check_tree(session, request)
        verifying = asyncio.ensure_future(self._scheduler.verify(session, tree))
        both: set[asyncio.Future[Any]] = {verifying, following}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if following.done() and following.result()[0] is not None:
                raise RoundInFlightError(
                    "a request arrived before the previous round was answered; expected one round at a time"
                )
            return self._answered(await verifying, arrival)
        finally:
            verifying.cancel()  # passes skip cancelled jobs

    def _answered(self, commit: Commit, arrival: float) -> Commit:
        """Count a commit, and add the seconds since its request arrived and the share of KV slots in use."""
        self._metrics.committed(len(commit.token_ids), commit.trimmed)
        return replace(
            commit,
            timings=replace(commit.timings, total=time.perf_counter() - arrival),
            pass_statistics=replace(commit.pass_statistics, kv_cache_usage=self._admission.usage),
        )


async def _read(context: Context) -> Arrival:
    request = await context.read()
    return None if request is grpc.aio.EOF else request, time.perf_counter()
