"""DraftService over gRPC: what clients call."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc

from dynatree.common.errors import InvalidArgumentError, ServiceError
from dynatree.common.model_info import ModelInfo, check_same_tokenizer, token_limit
from dynatree.common.model_thread import ModelThread
from dynatree.common.sampling import Sampling
from dynatree.common.tree import check_token_ids
from dynatree.common.wire import model_info_to_pb
from dynatree.draft.costs import Costs
from dynatree.draft.drafter import Drafter
from dynatree.draft.generation import Generation, GenerationRequest
from dynatree.draft.policies import DRAWING_POLICY, create_policy, policies_that_take_draws, policy_names
from dynatree.draft.verify_client import VerifyClient
from dynatree.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_COMPLETIONS = 64
ASKING_SECONDS = 1.0  # for the target's name; the last known is told instead


@dataclass(frozen=True)
class DefaultPolicy:
    """The policy of requests that name none."""

    name: str
    settings: dict[str, float]


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Serves completions on one drafter and one verify service.

    The verify service may be started anew with another model: every completion asks for it.

    Args:
        ahead: Whether to read on while the verify service works; None: where it has a device of its own.

    Raises:
        FailedPreconditionError: The models' tokenizers differ.
    """

    def __init__(
        self,
        drafter: Drafter,
        thread: ModelThread,
        verify: VerifyClient,
        target: ModelInfo,
        default_policy: DefaultPolicy,
        ahead: bool | None,
    ) -> None:
        self._drafter = drafter
        self._thread = thread
        self._tokenizer_thread = ModelThread("tokenizer")  # a long prompt takes seconds, and others are streaming
        self._verify = verify
        self._default_policy = default_policy
        self._ahead_option = ahead
        self._adopt(target)

    def _adopt(self, target: ModelInfo) -> None:
        """Work with this target from now on; what rounds cost with another is forgotten.

        Raises:
            FailedPreconditionError: Its tokenizer is not the draft's.
        """
        engine = self._drafter.engine
        check_same_tokenizer(engine.info, target)
        known_ids = max(engine.tokenizer.get_vocab().values()) + 1
        self._drafter.vocab_size = min(known_ids, engine.info.vocab_size, target.vocab_size)
        self._costs = Costs(target.forward_costs, engine.info.forward_costs)
        apart = engine.info.device_id != target.device_id
        self._ahead = apart if self._ahead_option is None else self._ahead_option
        self._target = target

    async def _ask_for_target(self, timeout: float | None) -> None:
        """Adopt the verify service's model, if it is not the one that it had when it was asked last.

        Raises:
            ServiceError: The service cannot be reached, or its tokenizer is another one.
        """
        target = await self._verify.model_info(timeout)
        if target != self._target:
            self._adopt(target)
            log.warning("the verify service was started anew, with %s (%s)", target.name, target.dtype)

    async def GetModelInfo(  # noqa: N802
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        """Both models, and the policies with the default first."""
        with suppress(ServiceError):
            await self._ask_for_target(ASKING_SECONDS)
        default = self._default_policy.name
        others = [name for name in policy_names() if name != default]
        return draft_pb2.DraftServiceGetModelInfoResponse(
            draft=model_info_to_pb(self._drafter.engine.info),
            target=model_info_to_pb(self._target),
            policies=[default, *others],
        )

    async def Generate(  # noqa: N802
        self, request: draft_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[draft_pb2.GenerateResponse]:
        """One completion after the other."""
        count = _count(request)
        _check_stop(request.stop)
        prompt_ids = await self._prompt_ids(request)
        seed = request.sampling.seed if request.sampling.HasField("seed") else secrets.randbits(63)
        for index in range(count):
            await self._ask_for_target(context.time_remaining())
            checked = self._checked(request, prompt_ids, (seed + index) % 2**64)
            generation = Generation(checked, self._drafter, self._thread, self._verify)
            async for response in generation.run(timeout=context.time_remaining()):
                response.index = index
                yield response

    def _checked(self, message: draft_pb2.GenerateRequest, prompt_ids: tuple[int, ...], seed: int) -> GenerationRequest:
        new_tokens = message.max_new_tokens if message.HasField("max_new_tokens") else None
        limit = token_limit(len(prompt_ids), new_tokens, self._target)
        if new_tokens is not None:
            token_limit(len(prompt_ids), new_tokens, self._drafter.engine.info)
        check_token_ids(prompt_ids, self._target.vocab_size, "token_ids")
        check_token_ids(prompt_ids, self._drafter.engine.info.vocab_size, "token_ids")
        check_token_ids(message.stop_token_ids, self._target.vocab_size, "stop_token_ids")
        sampling = Sampling.from_pb(
            message.sampling,
            vocab_size=self._target.vocab_size,
            default_seed=seed,
            default_penalty=self._target.repetition_penalty,
        )
        name = message.policy.name or self._default_name(sampling)
        inherited = self._default_policy.settings if name == self._default_policy.name else {}
        policy = create_policy(name, {**inherited, **message.policy.settings}, self._costs)
        if sampling.residual and not policy.takes_draws:
            raise InvalidArgumentError(
                f"policy {name} chooses nodes by their tokens, which scheme residual does not allow; "
                f"expected one of {', '.join(policies_that_take_draws())}"
            )
        return GenerationRequest(
            prompt_ids=prompt_ids,
            limit=limit,
            bounded=new_tokens is not None,
            sampling=replace(sampling, seed=seed),
            stop=tuple(message.stop),
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            log_probs=message.log_probs,
            trace=message.trace,
            policy=policy,
            ahead=self._ahead,
        )

    def _default_name(self, sampling: Sampling) -> str:
        """The policy of a request that names none: the service's, or one that can, where that cannot draw at random."""
        name = self._default_policy.name
        return name if not sampling.residual or name in policies_that_take_draws() else DRAWING_POLICY

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
        return tuple(self._drafter.engine.tokenizer(text, verbose=False)["input_ids"])


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
