"""DraftService over gRPC: what clients call."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc

from dynatree.common.admission import Admission
from dynatree.common.errors import InvalidArgumentError, ServiceError
from dynatree.common.grpc_options import PRINCIPAL
from dynatree.common.model_info import ModelInfo, token_limit
from dynatree.common.model_thread import ModelThread
from dynatree.common.sampling import Sampling
from dynatree.common.tree import check_token_ids
from dynatree.common.wire import model_info_to_pb, sampling_from_pb
from dynatree.draft.generation import Backend, Generation, GenerationRequest
from dynatree.draft.policies import RESIDUAL_POLICY, Setting, create_policy, policy_names, residual_policies
from dynatree.draft.target import Target
from dynatree.draft.wire import policy_settings_from_pb, response_to_pb
from dynatree.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_COMPLETIONS = 64
MAX_PRINCIPAL_LENGTH = 256
ASKING_SECONDS = 1.0  # for the target's name; the last known is told instead


@dataclass(frozen=True)
class DefaultPolicy:
    """The policy of requests that name none."""

    name: str
    settings: dict[str, Setting]


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Serves completions on one draft model and one verify service.

    The verify service may be started anew with another model: every session that it opens says which one it has.

    Args:
        backend: The draft model and the way to the verify service.
        target: The model that the verify service had at the start.
        default_policy: The policy of requests that name none.
        admission: Whose completions run, and whose wait.
        ahead: Whether to read on while the verify service works; None: where it has a device of its own.

    Raises:
        FailedPreconditionError: The models' tokenizers differ.
    """

    def __init__(
        self,
        backend: Backend,
        target: ModelInfo,
        default_policy: DefaultPolicy,
        admission: Admission,
        ahead: bool | None = None,
    ) -> None:
        self._backend = backend
        self._admission = admission
        self._tokenizer_thread = ModelThread("tokenizer")  # a long prompt takes seconds, and others are streaming
        self._default_policy = default_policy
        self._ahead = ahead
        self._known_ids = max(backend.engine.tokenizer.get_vocab().values()) + 1
        self._target = self._new_target(target)

    def _new_target(self, info: ModelInfo) -> Target:
        return Target.of(info, self._backend.engine.info, self._known_ids, self._ahead)

    def _adopt(self, info: ModelInfo) -> None:
        """Draft for this target from now on; what rounds cost with another is forgotten.

        Raises:
            FailedPreconditionError: Its tokenizer is not the draft's.
        """
        if info != self._target.info:
            self._target = self._new_target(info)
            log.warning("the verify service was started anew, with %s (%s)", info.name, info.dtype)

    async def GetModelInfo(  # noqa: N802
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        """Both models, and the policies with the default first; the last known target where none answers."""
        with suppress(ServiceError):
            self._adopt(await self._backend.verify.model_info(ASKING_SECONDS))
        default = self._default_policy.name
        others = [name for name in policy_names() if name != default]
        return draft_pb2.DraftServiceGetModelInfoResponse(
            draft=model_info_to_pb(self._backend.engine.info),
            target=model_info_to_pb(self._target.info),
            policies=[default, *others],
        )

    async def Generate(  # noqa: N802
        self, request: draft_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[draft_pb2.GenerateResponse]:
        """One completion after the other, all under one admission: a request that has begun waits for nobody here."""
        count = _count(request)
        _check_stop(request.stop)
        prompt_ids = await self._prompt_ids(request)
        seed = request.sampling.seed if request.sampling.HasField("seed") else secrets.randbits(63)
        principal = _principal(context)
        slots = self._backend.drafter.slots(self._checked(request, prompt_ids, seed, principal).limit)
        async with self._admission.queued(principal, slots, context.time_remaining()) as turn:
            async for ahead in turn.positions():
                if request.queue_position:
                    yield draft_pb2.GenerateResponse(queue_position=ahead)
            for index in range(count):
                new_request = partial(self._checked, request, prompt_ids, (seed + index) % 2**64, principal)
                async with (
                    self._opened(new_request, context.time_remaining()) as generation,
                    aclosing(generation.rounds()) as events,
                ):
                    generation.waited(turn.queue_seconds if index == 0 else 0.0)
                    async for event in events:
                        yield response_to_pb(event, index=index)

    @asynccontextmanager
    async def _opened(
        self, new_request: Callable[[], GenerationRequest], timeout: float | None
    ) -> AsyncIterator[Generation]:
        """An open completion, whose request was made for the target that the verify service has now."""
        while True:
            request = new_request()
            async with Generation.open(request, self._backend, timeout) as generation:
                if generation.target == request.target.info:
                    yield generation
                    return
            self._adopt(generation.target)

    def _checked(
        self, message: draft_pb2.GenerateRequest, prompt_ids: tuple[int, ...], seed: int, principal: str
    ) -> GenerationRequest:
        """The request for a completion, as far as the draft side can check it; the verify service checks its own part.

        Raises:
            ServiceError: It asks for what there is not.
        """
        new_tokens = message.max_new_tokens if message.HasField("max_new_tokens") else None
        if new_tokens is not None:
            token_limit(len(prompt_ids), new_tokens, self._backend.engine.info)
        check_token_ids(prompt_ids, self._backend.engine.info.vocab_size, "token_ids")
        penalty = self._target.info.repetition_penalty
        sampling = replace(sampling_from_pb(message.sampling, default_seed=seed, default_penalty=penalty), seed=seed)
        name = message.policy.name or self._default_name(sampling)
        inherited = self._default_policy.settings if name == self._default_policy.name else {}
        policy = create_policy(name, {**inherited, **policy_settings_from_pb(message.policy)}, self._target.costs)
        if sampling.residual and not policy.supports_residual:
            raise InvalidArgumentError(
                f"policy {name} chooses nodes by their tokens, which scheme residual does not allow; "
                f"expected one of {', '.join(residual_policies())}"
            )
        return GenerationRequest(
            prompt_ids=prompt_ids,
            max_new_tokens=new_tokens,
            sampling=sampling,
            stop=tuple(message.stop),
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            log_probs=message.log_probs,
            trace=message.trace,
            policy=policy,
            target=self._target,
            principal=principal,
        )

    def _default_name(self, sampling: Sampling) -> str:
        """The policy of a request that names none: the service's, or one that can, where that cannot draw at random."""
        name = self._default_policy.name
        return name if not sampling.residual or name in residual_policies() else RESIDUAL_POLICY

    async def _prompt_ids(self, message: draft_pb2.GenerateRequest) -> tuple[int, ...]:
        kind = message.WhichOneof("prompt")
        if kind is None:
            raise InvalidArgumentError("the request has no prompt; expected the field `text` or `token_ids`")
        if kind == "token_ids":
            prompt_ids = tuple(message.token_ids.ids)
        else:
            prompt_ids = await self._tokenizer_thread.run(self._encode, message.text)
        if not prompt_ids:
            raise InvalidArgumentError("the prompt is empty; expected at least one token")
        return prompt_ids

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.engine.tokenizer(text, verbose=False)["input_ids"])


def _principal(context: Context) -> str:
    """On whose behalf a request is made, by its own word: "" where it names nobody."""
    named = dict(context.invocation_metadata() or ()).get(PRINCIPAL, "")
    if not isinstance(named, str) or len(named) > MAX_PRINCIPAL_LENGTH:
        raise InvalidArgumentError(f"{PRINCIPAL} is longer than {MAX_PRINCIPAL_LENGTH} characters")
    return named


def _count(message: draft_pb2.GenerateRequest) -> int:
    count = message.n if message.HasField("n") else 1
    if not 1 <= count <= MAX_COMPLETIONS:
        raise InvalidArgumentError(f"n is {count}, expected a number in [1, {MAX_COMPLETIONS}]")
    return count


def _check_stop(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(f"{len(stops)} stop strings, at most {MAX_STOP_STRINGS} are accepted")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidArgumentError(f"stop[{index}] has {len(stop)} characters, expected 1 to {MAX_STOP_LENGTH}")
