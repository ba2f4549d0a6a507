"""The gRPC servicer of DraftService, the API that clients call."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

from dynatree.common.errors import InvalidArgumentError, OutOfRangeError, ServiceError
from dynatree.common.limits import MAX_PRINCIPAL_LENGTH
from dynatree.common.model_info import ModelInfo
from dynatree.common.tree import check_token_ids
from dynatree.common.wire import model_info_to_pb
from dynatree.draft.completion.generation import NOTHING_RECEIVED, Backend, Chunk, Completed
from dynatree.draft.completion.opening import open_generation
from dynatree.draft.generate_call import GenerateCall, check_message, received_from_pb
from dynatree.draft.metrics import DraftMetrics
from dynatree.draft.policies import policy_names
from dynatree.draft.prompt_reader import PromptReader
from dynatree.draft.recording.recorder import Recorder
from dynatree.draft.reload.drafts_in_use import DraftsInUse
from dynatree.draft.reload.replay import RecentTexts
from dynatree.draft.settings import DefaultPolicy
from dynatree.draft.target.replicas import NothingReadyError
from dynatree.draft.text.prompt_text import PromptText, decoded
from dynatree.draft.wire import response_to_pb, started_to_pb
from dynatree.serving.admission import Admission
from dynatree.serving.call_tracker import Call
from dynatree.serving.grpc_options import PRINCIPAL
from dynatree.serving.principals import is_principal
from dynatree.serving.tracing import Span, Tracing
from dynatree.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

Context = Call
SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
VOCABULARY_PART = 2**14  # tokens per message


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Serves completions with one draft model, or without one, and the verify services behind it.

    A verify service may restart with another model, so each opened session reports its target.

    Args:
        drafts: The draft model and the verify services.
        default_policy: The policy of requests that name none.
        admission: The queue that decides which requests run.
        metrics: The metrics of completions.
        tracing: The exporter of spans.
        recent: Recent completions, for the comparison of draft models.
        recorder: Records completions; None records none.
    """

    def __init__(
        self,
        drafts: DraftsInUse,
        default_policy: DefaultPolicy,
        admission: Admission,
        metrics: DraftMetrics,
        tracing: Tracing,
        recent: RecentTexts,
        recorder: Recorder | None,
    ) -> None:
        self._drafts = drafts
        self._admission = admission
        self._metrics = metrics
        self._tracing = tracing
        self._recent = recent
        self._recorder = recorder
        self._tokenizer = drafts.current.source.tokenizer  # every draft model has the same
        self._prompts = PromptReader(self._tokenizer)
        self._default_policy = default_policy
        self._nothing_ready = False  # whether the last request found no verify service ready

    def read_ahead(self) -> None:
        """Begin to read the tokenizer for grammars."""
        self._prompts.read_ahead()

    async def GetModelInfo(  # noqa: N802
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        """Return both models and the policies, default first; the last known target if no verify service answers."""
        default, backend = self._default_policy.name, self._drafts.current
        others = [name for name in policy_names(has_model=backend.source.has_model) if name != default]
        return draft_pb2.DraftServiceGetModelInfoResponse(
            draft=model_info_to_pb(backend.source.info),
            target=model_info_to_pb(backend.replicas.target.info),
            policies=[default, *others],
            chat_template=self._prompts.has_chat_template,
            tool_format=self._prompts.tool_format,
        )

    async def GetVocabulary(  # noqa: N802
        self, request: draft_pb2.GetVocabularyRequest, context: Context
    ) -> AsyncIterator[draft_pb2.GetVocabularyResponse]:
        """Stream the bytes of every token, in parts."""
        vocabulary = await self._prompts.vocabulary(_principal(context))
        for start in range(0, len(vocabulary), VOCABULARY_PART):
            yield draft_pb2.GetVocabularyResponse(tokens=vocabulary[start : start + VOCABULARY_PART])

    async def Tokenize(  # noqa: N802
        self, request: draft_pb2.TokenizeRequest, context: Context
    ) -> draft_pb2.TokenizeResponse:
        """Return the tokens of a prompt."""
        if request.WhichOneof("prompt") is None:
            raise InvalidArgumentError("the request has no prompt; expected the field `text` or `chat`")
        add_special_tokens = not request.HasField("add_special_tokens") or request.add_special_tokens
        principal, target = _principal(context), self._drafts.current.replicas.target.info
        token_ids = await self._prompts.encode(request, target, principal, add_special_tokens=add_special_tokens)
        strings = await self._prompts.strings(token_ids, principal) if request.token_strings else []
        return draft_pb2.TokenizeResponse(token_ids=token_ids, token_strings=strings)

    async def Detokenize(  # noqa: N802
        self, request: draft_pb2.DetokenizeRequest, context: Context
    ) -> draft_pb2.DetokenizeResponse:
        """Return the text of tokens."""
        target = self._drafts.current.replicas.target.info
        if len(request.token_ids) > target.context_length:
            raise OutOfRangeError(
                f"the request has {len(request.token_ids)} token_ids, expected at most {target.context_length}"
            )
        token_ids = tuple(request.token_ids)
        check_token_ids(token_ids, target.vocab_size, "token_ids")
        return draft_pb2.DetokenizeResponse(text=await self._prompts.decode(token_ids, _principal(context)))

    async def Generate(  # noqa: N802
        self, request: draft_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[draft_pb2.GenerateResponse]:
        """Make the completions one after the other, all under one admission: a started request never queues again."""
        span = self._tracing.span("generate", context.invocation_metadata(), request_id=context.request_id)
        try:
            with span, self._drafts.using() as backend:
                async with aclosing(self._responses(backend, request, context, span)) as responses:
                    async for response in responses:
                        yield response
        except BaseException as error:
            self._failed(context, error)
            raise

    async def _responses(
        self, backend: Backend, request: draft_pb2.GenerateRequest, context: Context, span: Span
    ) -> AsyncGenerator[draft_pb2.GenerateResponse]:
        check_message(request)
        principal, target = _principal(context), backend.replicas.target
        if request.WhichOneof("prompt") != "token_ids":
            self._admission.check(principal, self._prompts.least_tokens(request), context.time_remaining())
        prompt_ids = await self._prompts.prompt_ids(request, target.info, principal)
        received = received_from_pb(request, target.info.context_length)
        call = GenerateCall.from_pb(
            request,
            prompt_ids,
            received=received,
            grammar=await self._prompts.grammar(request, received.token_ids, principal),
            special_ids=self._prompts.special_ids(request.stop),
            default_policy=self._default_policy,
            has_model=backend.source.has_model,
            principal=principal,
            # a trace shows candidates, so it shows earlier completions only to a principal that proved who it is
            recalls=context.principal is not None or not request.trace,
            request_id=context.request_id,
        )
        first = call.request(call.first, target)
        prompt_text = PromptText()
        if request.prompt_text and call.begins:
            prompt_text = await self._prompts.prompt_text(request, prompt_ids, principal)
        slots = backend.drafter.slots(len(prompt_ids), first.limit)
        async with self._admission.queued(principal, slots, context.time_remaining(), call.token_need(first)) as turn:
            with span.child("queue"):
                async for ahead in turn.positions():
                    if request.queue_position:
                        yield draft_pb2.GenerateResponse(queue_position=ahead)
            for index in call.indices:
                with span.child("completion", index=index) as completing:
                    opening = open_generation(
                        backend,
                        partial(call.request, index, span=completing),
                        request.resume.target_fingerprint,
                        first.least_context,
                        context.time_remaining(),
                        turn.charge,
                    )
                    async with opening as generation, aclosing(generation.rounds()) as events:
                        self._nothing_ready = False
                        generation.waited(turn.queue_seconds if index == call.first else 0.0)
                        seed = 0 if first.decoding.sampling.greedy else call.seed
                        sent_ids = () if request.WhichOneof("prompt") == "token_ids" else prompt_ids
                        started: draft_pb2.Started | None = started_to_pb(generation, seed, sent_ids, prompt_text)
                        prompt_text = PromptText()  # only the first completion carries it
                        texts: list[str] = []
                        token_ids: list[int] = []
                        async for event in events:
                            if isinstance(event, Chunk):
                                turn.charge.use(len(event.token_ids))
                                texts.append(event.text)
                                token_ids += event.token_ids
                            if isinstance(event, Completed):
                                self._completed(call, index, event, completing)
                                text = "".join((*texts, event.text))
                                self._keep(call, index, generation.target, text, token_ids)
                            yield response_to_pb(event, index=index, started=started)
                            started = None

    def _completed(self, call: GenerateCall, index: int, completion: Completed, span: Span) -> None:
        """Count a completion, record its costs in its span, and log it."""
        statistics = completion.statistics
        self._metrics.completed(completion)
        span.note(
            tokens=statistics.generated_tokens,
            rounds=statistics.rounds,
            accepted=statistics.draft_n_accepted,
            nodes=statistics.draft_n,
            draft_seconds=statistics.draft_seconds,
            wire_seconds=statistics.wire_seconds,
            verify_seconds=statistics.verify_seconds,
            resumes=statistics.resumes,
            resume_seconds=statistics.resume_seconds,
        )
        fields = {
            "request_id": call.request_id,
            "principal": call.principal,
            "index": index,
            "finish_reason": completion.finish_reason.value if completion.finish_reason else None,
            "prompt_tokens": completion.prompt_tokens,
            "cached_tokens": statistics.cached_tokens,
            "generated_tokens": statistics.generated_tokens,
            "rounds": statistics.rounds,
            "tokens_per_round": statistics.tokens_per_round,
            "acceptance_rate": statistics.acceptance_rate,
            "queue_seconds": statistics.queue_seconds,
            "time_to_first_token_seconds": statistics.time_to_first_token_seconds,
            "total_seconds": statistics.total_seconds,
            "resumes": statistics.resumes,
        }
        log.info("completion", extra={"fields": fields})

    def _keep(self, call: GenerateCall, index: int, target: ModelInfo, text: str, token_ids: Sequence[int]) -> None:
        """Keep a completion to compare draft models on and to train one on, unless its request says no.

        What its client received before, if it is a resumed completion, is part of its prompt here.
        """
        if not call.keeps:
            return
        received = call.received if index == call.first else NOTHING_RECEIVED
        before = [*call.prompt_ids, *received.token_ids]
        self._recent.add(before, token_ids)

        def read_prompt() -> str:
            prompt = decoded(self._tokenizer, call.prompt_ids).text
            return decoded(self._tokenizer, before).text[: len(prompt) + received.characters]

        if self._recorder is not None and self._recorder.wants(call.principal, target):
            self._recorder.add(text, read_prompt)

    def _failed(self, context: Context, error: BaseException) -> None:
        """Count and log a failed request; of requests in a row that find no verify service ready, only the first."""
        code = error.code if isinstance(error, ServiceError) else "INTERNAL"
        code = "CANCELLED" if isinstance(error, (CancelledError, GeneratorExit)) else code
        self._metrics.failed(code)
        again, self._nothing_ready = self._nothing_ready, isinstance(error, NothingReadyError)
        if again and self._nothing_ready:
            return  # clients retry every second
        log.info("request ended", extra={"fields": {"request_id": context.request_id, "code": code}})


def _principal(context: Context) -> str:
    """Return the principal of a request: the authenticated one, else the one it names, else ""."""
    if context.principal is not None:
        return str(context.principal)
    named = dict(context.invocation_metadata() or ()).get(PRINCIPAL, "")
    if not isinstance(named, str) or (named and not (is_principal(named) and named.isascii())):
        raise InvalidArgumentError(f"{PRINCIPAL} has at most {MAX_PRINCIPAL_LENGTH} characters, all printable ASCII")
    return named
