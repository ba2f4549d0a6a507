"""The gRPC servicer of DraftService, the API that clients call."""

from __future__ import annotations

import logging
import math
import secrets
from asyncio import CancelledError
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from dynatree.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
    PeerFailedError,
    PeerUnavailableError,
    ServiceBusyError,
    ServiceError,
)
from dynatree.common.limits import MAX_PRINCIPAL_LENGTH, MAX_STOP_TOKENS
from dynatree.common.log_probs import check_log_probs
from dynatree.common.model_info import ModelInfo, token_limit
from dynatree.common.sampling import Sampling
from dynatree.common.seeds import completion_seed
from dynatree.common.tree import check_token_ids
from dynatree.common.wire import decoding_from_pb, model_info_to_pb, top_log_probs_to_pb
from dynatree.draft.completion.generation import (
    NOTHING_RECEIVED,
    Backend,
    Chunk,
    Completed,
    Generation,
    GenerationRequest,
    Received,
)
from dynatree.draft.metrics import DraftMetrics
from dynatree.draft.policies import RESIDUAL_POLICY, Policy, create_policy, policy_names, residual_policies
from dynatree.draft.settings import DefaultPolicy
from dynatree.draft.target.replicas import NothingReadyError
from dynatree.draft.target.target import Target
from dynatree.draft.target.target_session import TargetChangedError
from dynatree.draft.text.prompt_text import PromptText, decoded, written
from dynatree.draft.text.prompts import Message, PromptEncoder
from dynatree.draft.text.tokenizer_thread import TokenizerThread
from dynatree.draft.text.vocabulary import token_bytes
from dynatree.draft.wire import policy_settings_from_pb, response_to_pb
from dynatree.serving.admission import Admission
from dynatree.serving.call_tracker import Call
from dynatree.serving.grpc_options import PRINCIPAL
from dynatree.serving.principals import is_principal
from dynatree.serving.token_quota import Charge, TokenNeed
from dynatree.serving.tracing import NO_SPAN, OFF, Span, Tracing
from dynatree.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

Context = Call
SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_COMPLETIONS = 64
TARGET_CHANGES = 5  # attempts to open one session while verify services change their targets
VOCABULARY_PART = 2**14  # tokens per message
ID_BYTES = 4  # size of a token id
# Errors of an opening whose prefill no verify service began, or whose verify service was lost: nothing is charged.
NOT_BEGUN = (
    InvalidArgumentError,
    OutOfRangeError,
    FailedPreconditionError,
    ServiceBusyError,
    PeerUnavailableError,
    TargetChangedError,
)


@dataclass(frozen=True)
class _Asked:
    """One call of Generate, from which the request of each completion is built once its target is known.

    Attributes:
        message: The call's message.
        prompt_ids: The prompt.
        seed: The seed in force.
        principal: The principal.
        first: Index of the first completion to make.
        received: The part of that completion that the client already has.
        request_id: The call's id in logs.
    """

    message: draft_pb2.GenerateRequest
    prompt_ids: tuple[int, ...]
    seed: int
    principal: str
    first: int
    received: Received
    request_id: str

    @property
    def begins(self) -> bool:
        """Whether the client has no token yet. Facts about the prompt are sent with the first token."""
        return self.first == 0 and not self.received.token_ids


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Serves completions with one draft model and the verify services behind it.

    A verify service may restart with another model, so each opened session reports its target.

    Args:
        backend: The draft model and the verify services.
        default_policy: The policy of requests that name none.
        admission: The queue that decides which requests run.
        metrics: The metrics of completions.
        tracing: The exporter of spans.
    """

    def __init__(
        self,
        backend: Backend,
        default_policy: DefaultPolicy,
        admission: Admission,
        metrics: DraftMetrics,
        tracing: Tracing = OFF,
    ) -> None:
        self._backend = backend
        self._admission = admission
        self._metrics = metrics
        self._tracing = tracing
        self._tokenizer_thread = TokenizerThread()
        self._default_policy = default_policy
        self._encoder = PromptEncoder(backend.engine.tokenizer)
        self._longest_token = max(map(len, backend.engine.tokenizer.get_vocab()))  # characters
        self._nothing_ready = False  # whether the log already says that no verify service is ready
        self._vocabulary: list[bytes] = []  # built at the first GetVocabulary

    async def GetModelInfo(  # noqa: N802
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        """Return both models and the policies, default first; the last known target if no verify service answers."""
        default = self._default_policy.name
        others = [name for name in policy_names() if name != default]
        return draft_pb2.DraftServiceGetModelInfoResponse(
            draft=model_info_to_pb(self._backend.engine.info),
            target=model_info_to_pb(self._backend.replicas.target.info),
            policies=[default, *others],
            chat_template=self._encoder.has_chat_template,
        )

    async def GetVocabulary(  # noqa: N802
        self, request: draft_pb2.GetVocabularyRequest, context: Context
    ) -> AsyncIterator[draft_pb2.GetVocabularyResponse]:
        """Stream the bytes of every token, in parts."""
        if not self._vocabulary:
            self._vocabulary = await self._tokenizer_thread.run(
                _principal(context), 0, lambda: self._vocabulary or token_bytes(self._backend.engine.tokenizer)
            )
        for start in range(0, len(self._vocabulary), VOCABULARY_PART):
            yield draft_pb2.GetVocabularyResponse(tokens=self._vocabulary[start : start + VOCABULARY_PART])

    async def Tokenize(  # noqa: N802
        self, request: draft_pb2.TokenizeRequest, context: Context
    ) -> draft_pb2.TokenizeResponse:
        """Return the tokens of a prompt."""
        if request.WhichOneof("prompt") is None:
            raise InvalidArgumentError("the request has no prompt; expected the field `text` or `chat`")
        add_special_tokens = not request.HasField("add_special_tokens") or request.add_special_tokens
        principal, target = _principal(context), self._backend.replicas.target.info
        token_ids = await self._encoded(request, target, principal, add_special_tokens=add_special_tokens)
        strings: list[str] = []
        if request.token_strings:
            spell = partial(self._encoder.strings, token_ids)
            strings = await self._tokenizer_thread.run(principal, ID_BYTES * len(token_ids), spell)
        return draft_pb2.TokenizeResponse(token_ids=token_ids, token_strings=strings)

    async def Detokenize(  # noqa: N802
        self, request: draft_pb2.DetokenizeRequest, context: Context
    ) -> draft_pb2.DetokenizeResponse:
        """Return the text of tokens."""
        target = self._backend.replicas.target.info
        if len(request.token_ids) > target.context_length:
            raise OutOfRangeError(
                f"the request has {len(request.token_ids)} token_ids, expected at most {target.context_length}"
            )
        token_ids = tuple(request.token_ids)
        check_token_ids(token_ids, target.vocab_size, "token_ids")
        decode = partial(self._encoder.decoded, token_ids)
        text = await self._tokenizer_thread.run(_principal(context), ID_BYTES * len(token_ids), decode)
        return draft_pb2.DetokenizeResponse(text=text)

    async def Generate(  # noqa: N802
        self, request: draft_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[draft_pb2.GenerateResponse]:
        """Make the completions one after the other, all under one admission: a started request never queues again."""
        span = self._tracing.span("generate", context.invocation_metadata(), request_id=context.request_id)
        try:
            with span:
                async with aclosing(self._responses(request, context, span)) as responses:
                    async for response in responses:
                        yield response
        except BaseException as error:
            self._failed(context, error)
            raise

    async def _responses(
        self, request: draft_pb2.GenerateRequest, context: Context, span: Span
    ) -> AsyncGenerator[draft_pb2.GenerateResponse]:
        count = _count(request)
        _check_stop(request.stop, request.stop_token_ids)
        target = self._backend.replicas.target
        principal = _principal(context)
        if request.WhichOneof("prompt") != "token_ids":
            self._admission.check(principal, self._least_tokens(request), context.time_remaining())
        prompt_ids = await self._prompt_ids(request, target.info, principal)
        first, received = _received(request, count, target.info.context_length)
        seed = request.sampling.seed if request.sampling.HasField("seed") else secrets.randbits(63)
        asked = _Asked(request, prompt_ids, seed, principal, first, received, context.request_id)
        checked = self._request(asked, first, target)
        slots = self._backend.drafter.slots(len(prompt_ids), checked.limit)
        prompt_text = PromptText()
        if request.prompt_text and asked.begins:
            prompt_text = await self._prompt_text(request, prompt_ids, principal)
        tokens = _tokens(checked, count - first)
        async with self._admission.queued(principal, slots, context.time_remaining(), tokens) as turn:
            with span.child("queue"):
                async for ahead in turn.positions():
                    if request.queue_position:
                        yield draft_pb2.GenerateResponse(queue_position=ahead)
            for index in range(first, count):
                with span.child("completion", index=index) as completing:
                    new_request = partial(self._request, asked, index, span=completing)
                    async with (
                        self._opened(
                            new_request,
                            request.resume.target_fingerprint,
                            checked.least_context,
                            context.time_remaining(),
                            turn.charge,
                        ) as generation,
                        aclosing(generation.rounds()) as events,
                    ):
                        generation.waited(turn.queue_seconds if index == first else 0.0)
                        started: draft_pb2.Started | None = draft_pb2.Started(
                            seed=0 if checked.decoding.sampling.greedy else seed,
                            prompt_ids=() if request.WhichOneof("prompt") == "token_ids" else prompt_ids,
                            target_fingerprint=generation.fingerprint,
                            max_new_tokens=generation.max_new_tokens,
                            prompt_log_probs=generation.prompt_log_probs,
                            prompt_top_log_probs=top_log_probs_to_pb(generation.prompt_top_log_probs),
                            prompt_text=prompt_text.text,
                            prompt_text_offsets=prompt_text.offsets,
                        )
                        prompt_text = PromptText()
                        async for event in events:
                            if isinstance(event, Chunk):
                                turn.charge.use(len(event.token_ids))
                            if isinstance(event, Completed):
                                self._completed(context, principal, index, event, completing)
                            yield response_to_pb(event, index=index, started=started)
                            started = None

    def _completed(self, context: Context, principal: str, index: int, completion: Completed, span: Span) -> None:
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
            "request_id": context.request_id,
            "principal": principal,
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

    def _failed(self, context: Context, error: BaseException) -> None:
        """Count and log a failed request; while no verify service is ready, only the first such request is logged."""
        code = error.code if isinstance(error, ServiceError) else "INTERNAL"
        code = "CANCELLED" if isinstance(error, (CancelledError, GeneratorExit)) else code
        self._metrics.failed(code)
        if isinstance(error, NothingReadyError):
            if self._nothing_ready:
                return  # clients retry every second
            self._nothing_ready = True
        log.info("request ended", extra={"fields": {"request_id": context.request_id, "code": code}})

    @asynccontextmanager
    async def _opened(
        self,
        new_request: Callable[[Target], GenerationRequest],
        fingerprint: str,
        needed: int,
        timeout: float | None,
        charge: Charge,
    ) -> AsyncIterator[Generation]:
        """Open a completion, with a request built for the current target of its verify service.

        A target with a context of at least `needed` tokens is preferred. The prompt is charged.

        Raises:
            FailedPreconditionError: No ready verify service has the fingerprint that the request names.
            ServiceError: No verify service is ready, or the verify services failed or refused.
        """
        for _ in range(TARGET_CHANGES):
            replica = self._backend.replicas.first(fingerprint, needed)
            self._nothing_ready = False
            assert replica.target is not None
            async with AsyncExitStack() as stack:
                request = new_request(replica.target)
                opening = Generation.open(request, self._backend, replica, timeout)
                try:
                    with _prefill(charge, len(request.begun_ids)):
                        generation = await stack.enter_async_context(opening)
                except TargetChangedError:
                    continue
                yield generation
                return
        raise PeerFailedError("the verify service keeps changing its target")

    def _request(self, asked: _Asked, index: int, target: Target, span: Span = NO_SPAN) -> GenerationRequest:
        """Build the request of completion `index`, checked as far as the draft side can.

        Raises:
            ServiceError: A field of the message is invalid or out of range.
        """
        message, prompt_ids, info = asked.message, asked.prompt_ids, target.info
        received = asked.received if index == asked.first else NOTHING_RECEIVED
        seed = completion_seed(asked.seed, index)
        decoding = decoding_from_pb(message, default_seed=seed, default_penalty=info.repetition_penalty)
        token_limit(len(prompt_ids), decoding.max_new_tokens, info)
        check_token_ids(prompt_ids, info.vocab_size, "token_ids")
        check_token_ids(received.token_ids, info.vocab_size, "resume.token_ids")
        prompt_log_probs = decoding.prompt_log_probs and asked.begins and index == asked.first
        check_log_probs(decoding.top_log_probs, len(prompt_ids) if prompt_log_probs else 0)
        policy = self._policy(message.policy, decoding.sampling, target)
        # what such a policy has learnt may depend on the noise of this seed
        learnt = decoding.sampling.residual and policy.learns_from_others
        sampling = replace(decoding.sampling, seed=secrets.randbits(63) if learnt else seed)
        stop_token_ids = (*decoding.stop_token_ids, *self._encoder.special_ids(message.stop))
        request = GenerationRequest(
            prompt_ids=prompt_ids,
            decoding=replace(
                decoding, sampling=sampling, stop_token_ids=stop_token_ids, prompt_log_probs=prompt_log_probs
            ),
            stop=tuple(message.stop),
            trace=message.trace,
            policy=policy,
            target=target,
            seed=seed,
            principal=asked.principal,
            received=received,
            request_id=asked.request_id,
            span=span,
        )
        if len(request.begun_ids) > request.limit:
            raise OutOfRangeError(
                f"resume has {len(received.token_ids)} tokens, expected at most {request.limit - len(prompt_ids)}"
            )
        return request

    def _policy(self, message: draft_pb2.Policy, sampling: Sampling, target: Target) -> Policy:
        """Create a completion's policy from the name and settings of the request, or from the service's default.

        Raises:
            InvalidArgumentError: The name is unknown, a setting is wrong, or the policy does not support residual
                sampling.
        """
        name = message.name or self._default_name(sampling)
        inherited = self._default_policy.settings if name == self._default_policy.name else {}
        policy = create_policy(name, {**inherited, **policy_settings_from_pb(message)}, target.costs)
        if sampling.residual and not policy.supports_residual:
            raise InvalidArgumentError(
                f"policy {name} chooses nodes by their tokens, which scheme residual does not allow; "
                f"expected one of {', '.join(residual_policies())}"
            )
        return policy

    def _default_name(self, sampling: Sampling) -> str:
        """Policy of a request that names none: the service's default, or one that supports residual sampling."""
        name = self._default_policy.name
        return name if not sampling.residual or name in residual_policies() else RESIDUAL_POLICY

    async def _prompt_ids(
        self, message: draft_pb2.GenerateRequest, target: ModelInfo, principal: str
    ) -> tuple[int, ...]:
        """Return the prompt's tokens; a prompt that certainly exceeds the target's context is refused uncopied."""
        kind = message.WhichOneof("prompt")
        if kind is None:
            raise InvalidArgumentError("the request has no prompt; expected the field `text`, `token_ids` or `chat`")
        if kind == "token_ids":
            token_limit(len(message.token_ids.ids), _new_tokens(message), target)
            prompt_ids = tuple(message.token_ids.ids)
        else:
            prompt_ids = await self._encoded(message, target, principal)
        if not prompt_ids:
            raise InvalidArgumentError("the prompt is empty; expected at least one token")
        token_limit(len(prompt_ids), _new_tokens(message), target)
        return prompt_ids

    async def _prompt_text(
        self, message: draft_pb2.GenerateRequest, prompt_ids: tuple[int, ...], principal: str
    ) -> PromptText:
        tokenizer = self._backend.engine.tokenizer
        read = partial(decoded, tokenizer, prompt_ids)
        if message.WhichOneof("prompt") == "text":
            read = partial(written, tokenizer, message.text, prompt_ids, special_tokens=message.special_tokens)
        return await self._tokenizer_thread.run(principal, ID_BYTES * len(prompt_ids), read)

    async def _encoded(
        self,
        message: draft_pb2.GenerateRequest | draft_pb2.TokenizeRequest,
        target: ModelInfo,
        principal: str,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[int, ...]:
        """Encode a text prompt or a chat."""
        token_limit(self._least_tokens(message), None, target, at_least=True)
        if message.HasField("chat"):
            messages = [Message(each.role, each.content, each.name) for each in message.chat.messages]
            continues = message.chat.continue_final_message
            encode = partial(self._encoder.chat, messages, continue_final_message=continues)
        else:
            encode = partial(self._encoder.text, message.text, add_special_tokens=add_special_tokens)
        size = sum(len(text.encode()) for text in _texts(message))
        return await self._tokenizer_thread.run(principal, size, partial(encode, special_tokens=message.special_tokens))

    def _least_tokens(self, message: draft_pb2.GenerateRequest | draft_pb2.TokenizeRequest) -> int:
        """Lower bound on the tokens of a text prompt or a chat, found without encoding it."""
        characters = sum(map(len, _texts(message)))
        return max(math.ceil(characters / self._longest_token), len(message.chat.messages))


def _principal(context: Context) -> str:
    """Return the principal of a request: the authenticated one, else the one it names, else ""."""
    if context.principal is not None:
        return str(context.principal)
    named = dict(context.invocation_metadata() or ()).get(PRINCIPAL, "")
    if not isinstance(named, str) or (named and not (is_principal(named) and named.isascii())):
        raise InvalidArgumentError(f"{PRINCIPAL} has at most {MAX_PRINCIPAL_LENGTH} characters, all printable ASCII")
    return named


def _texts(message: draft_pb2.GenerateRequest | draft_pb2.TokenizeRequest) -> Iterator[str]:
    """Yield the texts of a text prompt or a chat."""
    yield message.text
    for each in message.chat.messages:
        yield from (each.role, each.content, each.name)


def _new_tokens(message: draft_pb2.GenerateRequest) -> int | None:
    return message.max_new_tokens if message.HasField("max_new_tokens") else None


def _tokens(request: GenerationRequest, completions: int) -> TokenNeed:
    """Token need of a call whose first completion to make is `request`; each later one reads the prompt again."""
    return TokenNeed(
        least=len(request.begun_ids) + (completions - 1) * len(request.prompt_ids),
        most=completions * request.limit,
        open_ended=request.decoding.max_new_tokens is None,
    )


@contextmanager
def _prefill(charge: Charge, tokens: int) -> Iterator[None]:
    """Charge a prompt if its prefill begins inside the context, even if it is then cancelled or fails."""
    begun = True
    try:
        yield
    except NOT_BEGUN:
        begun = False
        raise
    finally:
        if begun:
            charge.use(tokens)


def _count(message: draft_pb2.GenerateRequest) -> int:
    count = message.n if message.HasField("n") else 1
    if not 1 <= count <= MAX_COMPLETIONS:
        raise InvalidArgumentError(f"n is {count}, expected a number in [1, {MAX_COMPLETIONS}]")
    return count


def _received(message: draft_pb2.GenerateRequest, count: int, context_length: int) -> tuple[int, Received]:
    """Return the index of the first completion to make, and the part of it that the client already has."""
    resume = message.resume
    if resume.index >= count:
        raise InvalidArgumentError(f"resume.index is {resume.index}, expected a number below n, {count}")
    if resume.round > context_length:
        raise OutOfRangeError(f"resume.round is {resume.round}, expected at most {context_length}, the context")
    if len(resume.token_ids) > context_length:
        raise OutOfRangeError(f"resume has {len(resume.token_ids)} tokens, more than the context of {context_length}")
    return resume.index, Received(tuple(resume.token_ids), resume.characters, resume.round)


def _check_stop(stops: Sequence[str], stop_token_ids: Sequence[int]) -> None:
    if len(stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidArgumentError(f"{len(stop_token_ids)} stop_token_ids, at most {MAX_STOP_TOKENS} are accepted")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(f"{len(stops)} stop strings, at most {MAX_STOP_STRINGS} are accepted")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidArgumentError(f"stop[{index}] has {len(stop)} characters, expected 1 to {MAX_STOP_LENGTH}")
