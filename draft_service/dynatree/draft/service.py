"""DraftService over gRPC: what clients call."""

from __future__ import annotations

import logging
import math
import secrets
from asyncio import CancelledError
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from dynatree.common.admission import Admission
from dynatree.common.call_tracker import Call
from dynatree.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
    PeerFailedError,
    PeerUnavailableError,
    ServiceBusyError,
    ServiceError,
)
from dynatree.common.grpc_options import PRINCIPAL
from dynatree.common.limits import MAX_PRINCIPAL_LENGTH, MAX_STOP_TOKENS
from dynatree.common.log_probs import check_log_probs
from dynatree.common.model_info import ModelInfo, token_limit
from dynatree.common.principals import is_principal
from dynatree.common.sampling import Sampling
from dynatree.common.seeds import completion_seed
from dynatree.common.token_quota import Charge, TokenNeed
from dynatree.common.tracing import NOTHING as NO_SPAN
from dynatree.common.tracing import OFF, Span, Tracing
from dynatree.common.tree import check_token_ids
from dynatree.common.wire import model_info_to_pb, sampling_from_pb, top_log_probs_to_pb
from dynatree.draft.generation import NOTHING, Backend, Chunk, Generation, GenerationRequest, Received
from dynatree.draft.generation import Completion as DoneCompletion
from dynatree.draft.metrics import DraftMetrics
from dynatree.draft.policies import RESIDUAL_POLICY, Setting, create_policy, policy_names, residual_policies
from dynatree.draft.prompt_text import PromptText, decoded, written
from dynatree.draft.prompts import Message, PromptEncoder
from dynatree.draft.replicas import NothingReadyError
from dynatree.draft.target import Target
from dynatree.draft.target_session import TargetChangedError
from dynatree.draft.tokenizer_thread import TokenizerThread
from dynatree.draft.vocabulary import token_bytes
from dynatree.draft.wire import policy_settings_from_pb, response_to_pb
from dynatree.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

Context = Call
SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_COMPLETIONS = 64
TARGET_CHANGES = 5  # of the verify service, while one session is opened
VOCABULARY_PART = 2**14  # tokens a message
ID_BYTES = 4  # of a token id
# How an opening ends that no verify service took up, or that one lost: its caller is charged nothing.
NOT_BEGUN = (
    InvalidArgumentError,
    OutOfRangeError,
    FailedPreconditionError,
    ServiceBusyError,
    PeerUnavailableError,
    TargetChangedError,
)


@dataclass(frozen=True)
class DefaultPolicy:
    """The policy of requests that name none."""

    name: str
    settings: dict[str, Setting]


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Serves completions on one draft model and the verify services behind it.

    A verify service may be started anew with another model: every session that it opens says which one it has.

    Args:
        backend: The draft model and the way to the verify services.
        default_policy: The policy of requests that name none.
        admission: Whose completions run, and whose wait.
        metrics: Counts completions.
        tracing: Where spans go.
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
        self._nothing_ready = False  # as a request has found, and its line said
        self._vocabulary: list[bytes] = []  # made when somebody asks for it

    async def GetModelInfo(  # noqa: N802
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        """Both models, and the policies with the default first; the last known target where none answers."""
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
        """The bytes of every token, in parts."""
        if not self._vocabulary:
            self._vocabulary = await self._tokenizer_thread.run(
                _principal(context), 0, lambda: self._vocabulary or token_bytes(self._backend.engine.tokenizer)
            )
        for start in range(0, len(self._vocabulary), VOCABULARY_PART):
            yield draft_pb2.GetVocabularyResponse(tokens=self._vocabulary[start : start + VOCABULARY_PART])

    async def Tokenize(  # noqa: N802
        self, request: draft_pb2.TokenizeRequest, context: Context
    ) -> draft_pb2.TokenizeResponse:
        """The tokens of a prompt."""
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
        """The text of tokens."""
        target = self._backend.replicas.target.info
        if len(request.token_ids) > target.context_length:
            raise OutOfRangeError(f"there are {len(request.token_ids)} token_ids; at most {target.context_length} fit")
        token_ids = tuple(request.token_ids)
        check_token_ids(token_ids, target.vocab_size, "token_ids")
        decode = partial(self._encoder.decoded, token_ids)
        text = await self._tokenizer_thread.run(_principal(context), ID_BYTES * len(token_ids), decode)
        return draft_pb2.DetokenizeResponse(text=text)

    async def Generate(  # noqa: N802
        self, request: draft_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[draft_pb2.GenerateResponse]:
        """One completion after the other, all under one admission: a request that has begun waits for nobody here."""
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
        # for the first completion, and with its first token: who has that has them
        begins = first == 0 and not received.token_ids
        prompt_log_probs = request.prompt_log_probs and begins
        checked = self._checked(request, prompt_ids, seed, principal, target, received, prompt_log_probs)
        slots = self._backend.drafter.slots(len(prompt_ids), checked.limit)
        prompt_text = PromptText()
        if request.prompt_text and begins:
            prompt_text = await self._prompt_text(request, prompt_ids, principal)
        tokens = _tokens(checked, count - first)
        async with self._admission.queued(principal, slots, context.time_remaining(), tokens) as turn:
            with span.child("queue"):
                async for ahead in turn.positions():
                    if request.queue_position:
                        yield draft_pb2.GenerateResponse(queue_position=ahead)
            fingerprint = request.resume.target_fingerprint
            for index in range(first, count):
                new_request = partial(self._checked, request, prompt_ids, completion_seed(seed, index), principal)
                if index == first:
                    new_request = partial(new_request, received=received, prompt_log_probs=prompt_log_probs)
                with span.child("completion", index=index) as completing:
                    new_request = partial(new_request, request_id=context.request_id, span=completing)
                    async with (
                        self._opened(
                            new_request, fingerprint, checked.least_context, context.time_remaining(), turn.charge
                        ) as generation,
                        aclosing(generation.rounds()) as events,
                    ):
                        generation.waited(turn.queue_seconds if index == first else 0.0)
                        started: draft_pb2.Started | None = draft_pb2.Started(
                            seed=0 if checked.sampling.greedy else seed,
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
                            if isinstance(event, DoneCompletion):
                                self._completed(context, principal, index, event, completing)
                            yield response_to_pb(event, index=index, started=started)
                            started = None

    def _completed(self, context: Context, principal: str, index: int, completion: DoneCompletion, span: Span) -> None:
        """Count a completion, note in its span what it took, and write its line."""
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
        """Count a request that has failed, and write its line; of those that find nothing ready, the first one's."""
        code = error.code if isinstance(error, ServiceError) else "INTERNAL"
        code = "CANCELLED" if isinstance(error, (CancelledError, GeneratorExit)) else code
        self._metrics.failed(code)
        if isinstance(error, NothingReadyError):
            if self._nothing_ready:
                return  # clients try again every second
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
        """An open completion, whose request was made for the target that its verify service has now.

        It needs a context of at least `needed` tokens. Its prompt is charged.

        Raises:
            FailedPreconditionError: There is a fingerprint, and no verify service that is ready has it.
            ServiceError: No verify service is ready, or they failed or refused.
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
        raise PeerFailedError("the verify service changes its target all the time")

    def _checked(
        self,
        message: draft_pb2.GenerateRequest,
        prompt_ids: tuple[int, ...],
        seed: int,
        principal: str,
        target: Target,
        received: Received = NOTHING,
        prompt_log_probs: bool = False,
        request_id: str = "",
        span: Span = NO_SPAN,
    ) -> GenerationRequest:
        """The request for a completion, as far as the draft side can check it; the verify service checks its own part.

        Raises:
            ServiceError: It asks for what there is not.
        """
        token_limit(len(prompt_ids), _new_tokens(message), target.info)
        check_token_ids(prompt_ids, target.info.vocab_size, "token_ids")
        check_token_ids(received.token_ids, target.info.vocab_size, "resume.token_ids")
        check_log_probs(message.top_log_probs, len(prompt_ids) if prompt_log_probs else 0)
        penalty = target.info.repetition_penalty
        sampling = replace(sampling_from_pb(message.sampling, default_seed=seed, default_penalty=penalty), seed=seed)
        name = message.policy.name or self._default_name(sampling)
        inherited = self._default_policy.settings if name == self._default_policy.name else {}
        policy = create_policy(name, {**inherited, **policy_settings_from_pb(message.policy)}, target.costs)
        if sampling.residual and not policy.supports_residual:
            raise InvalidArgumentError(
                f"policy {name} chooses nodes by their tokens, which scheme residual does not allow; "
                f"expected one of {', '.join(residual_policies())}"
            )
        learnt = sampling.residual and policy.learns_from_others  # perhaps of the noise that this seed has
        request = GenerationRequest(
            prompt_ids=prompt_ids,
            max_new_tokens=_new_tokens(message),
            sampling=replace(sampling, seed=secrets.randbits(63)) if learnt else sampling,
            seed=seed,
            stop=tuple(message.stop),
            stop_token_ids=(*message.stop_token_ids, *self._encoder.special_ids(message.stop)),
            ignore_eos=message.ignore_eos,
            log_probs=message.log_probs or message.top_log_probs > 0,
            top_log_probs=message.top_log_probs,
            prompt_log_probs=prompt_log_probs,
            trace=message.trace,
            policy=policy,
            target=target,
            principal=principal,
            received=received,
            request_id=request_id,
            span=span,
        )
        if len(request.begun_ids) > request.limit:
            raise OutOfRangeError(
                f"resume has {len(received.token_ids)} tokens; at most {request.limit - len(prompt_ids)} are to be made"
            )
        return request

    def _default_name(self, sampling: Sampling) -> str:
        """The policy of a request that names none: the service's, or one that can, where that cannot draw at random."""
        name = self._default_policy.name
        return name if not sampling.residual or name in residual_policies() else RESIDUAL_POLICY

    async def _prompt_ids(
        self, message: draft_pb2.GenerateRequest, target: ModelInfo, principal: str
    ) -> tuple[int, ...]:
        """The prompt's tokens; one that cannot fit the target's context for certain is refused before it is copied."""
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
        """The tokens of a prompt of text, or of a chat."""
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
        """Tokens that a prompt of text, or a chat, has at least; without making them."""
        characters = sum(map(len, _texts(message)))
        return max(math.ceil(characters / self._longest_token), len(message.chat.messages))


def _principal(context: Context) -> str:
    """On whose behalf a request is made: as it was found out, or by its own word; "" where it names nobody."""
    if context.principal is not None:
        return str(context.principal)
    named = dict(context.invocation_metadata() or ()).get(PRINCIPAL, "")
    if not isinstance(named, str) or (named and not (is_principal(named) and named.isascii())):
        raise InvalidArgumentError(f"{PRINCIPAL} has at most {MAX_PRINCIPAL_LENGTH} characters, all printable ASCII")
    return named


def _texts(message: draft_pb2.GenerateRequest | draft_pb2.TokenizeRequest) -> Iterator[str]:
    """The texts of a prompt of text, or of a chat."""
    yield message.text
    for each in message.chat.messages:
        yield from (each.role, each.content, each.name)


def _new_tokens(message: draft_pb2.GenerateRequest) -> int | None:
    return message.max_new_tokens if message.HasField("max_new_tokens") else None


def _tokens(request: GenerationRequest, completions: int) -> TokenNeed:
    """What a request may use whose first completion to make is `request`; the later ones read the prompt again."""
    return TokenNeed(
        least=len(request.begun_ids) + (completions - 1) * len(request.prompt_ids),
        most=completions * request.limit,
        open_ended=request.max_new_tokens is None,
    )


@contextmanager
def _prefill(charge: Charge, tokens: int) -> Iterator[None]:
    """Charge a prompt whose prefill begins in the context, also where it is cancelled or fails."""
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
    """The first completion to make, and what the client has of it."""
    resume = message.resume
    if resume.index >= count:
        raise InvalidArgumentError(f"resume.index is {resume.index}, expected a number below n, {count}")
    if resume.round > context_length:
        raise OutOfRangeError(f"resume.round is {resume.round}, and a context of {context_length} has fewer rounds")
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
