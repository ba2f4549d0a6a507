"""One call of Generate: its message checked, and made into a request for each completion."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from dynatree.common.decoding import check_stop_tokens
from dynatree.common.errors import InvalidArgumentError, OutOfRangeError
from dynatree.common.log_probs import check_log_probs
from dynatree.common.model_info import token_limit
from dynatree.common.sampling import Sampling
from dynatree.common.seeds import completion_seed
from dynatree.common.tree import check_token_ids
from dynatree.common.wire import decoding_from_pb
from dynatree.draft.completion.generation import NOTHING_RECEIVED, GenerationRequest, Received
from dynatree.draft.policies import Policy, create_policy, default_policy, residual_policies
from dynatree.draft.settings import DefaultPolicy
from dynatree.draft.target.target import Target
from dynatree.draft.wire import policy_settings_from_pb
from dynatree.engine.grammar.state import GrammarState
from dynatree.serving.token_quota import TokenNeed
from dynatree.serving.tracing import NO_SPAN, Span
from dynatree.v1 import draft_pb2

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_COMPLETIONS = 64


@dataclass(frozen=True)
class CallGrammar:
    """The states of a call's grammar in which its completions begin.

    Attributes:
        start: The state before the first token.
        resumed: The state after what the client already has of the first completion to make; None if that does not
            follow the grammar.
    """

    start: GrammarState
    resumed: GrammarState | None

    @classmethod
    def following(cls, start: GrammarState, token_ids: Sequence[int]) -> Self:
        """Follow a completion's received tokens. Each costs a mask over the vocabulary, so call it off the event loop.

        The last one may be an end token that only the target has. The verify service, which knows it, checks it.
        """
        before = start.after_all(token_ids[:-1])
        return cls(start, before and (before.after_all(token_ids[-1:]) or before))

    def before(self, *, resumed: bool) -> GrammarState:
        """Return the state in which a completion begins, which may be the `resumed` one.

        Raises:
            InvalidArgumentError: The received tokens do not follow the grammar.
        """
        state = self.resumed if resumed else self.start
        if state is None:
            raise InvalidArgumentError("resume.token_ids do not follow the grammar")
        return state


@dataclass(frozen=True)
class GenerateCall:
    """One call of Generate, from which the request of each completion is built once its target is known.

    Attributes:
        message: The call's message.
        prompt_ids: The prompt.
        grammar: The grammar; None allows any text.
        special_ids: The ids of the special tokens among the stop strings.
        default_policy: The policy of requests that name none.
        has_model: Whether the service has a draft model.
        seed: The seed in force.
        first: Index of the first completion to make.
        received: The part of that completion that the client already has.
        principal: The principal.
        recalls: Whether trees may have candidates from the principal's earlier completions.
        request_id: The call's id in logs.
    """

    message: draft_pb2.GenerateRequest
    prompt_ids: tuple[int, ...]
    grammar: CallGrammar | None
    special_ids: tuple[int, ...]
    default_policy: DefaultPolicy
    has_model: bool
    seed: int
    first: int
    received: Received
    principal: str
    recalls: bool
    request_id: str

    @classmethod
    def from_pb(
        cls,
        message: draft_pb2.GenerateRequest,
        prompt_ids: tuple[int, ...],
        *,
        received: Received,
        grammar: CallGrammar | None,
        special_ids: tuple[int, ...],
        default_policy: DefaultPolicy,
        has_model: bool,
        principal: str,
        recalls: bool,
        request_id: str,
    ) -> Self:
        """Read a message that `check_message` has passed."""
        seed = message.sampling.seed if message.sampling.HasField("seed") else secrets.randbits(63)
        first = message.resume.index
        return cls(
            message,
            prompt_ids,
            grammar,
            special_ids,
            default_policy,
            has_model,
            seed,
            first,
            received,
            principal,
            recalls,
            request_id,
        )

    @property
    def indices(self) -> range:
        """Indices of the completions to make."""
        return range(self.first, _completions(self.message))

    @property
    def begins(self) -> bool:
        """Whether the client has no token yet. Facts about the prompt are sent with the first token."""
        return self.first == 0 and not self.received.token_ids

    @property
    def keeps(self) -> bool:
        """Whether the service may keep the completions for anything but the prefix cache."""
        return not self.message.HasField("store") or self.message.store

    def request(self, index: int, target: Target, span: Span = NO_SPAN) -> GenerationRequest:
        """Build the request of completion `index`, checked as far as the draft side can.

        Raises:
            ServiceError: A field of the message is invalid or out of range.
        """
        message, prompt_ids, info = self.message, self.prompt_ids, target.info
        received = self.received if index == self.first else NOTHING_RECEIVED
        seed = completion_seed(self.seed, index)
        decoding = decoding_from_pb(message, default_seed=seed, default_penalty=info.repetition_penalty)
        token_limit(len(prompt_ids), decoding.max_new_tokens, info)
        check_token_ids(prompt_ids, info.vocab_size, "token_ids")
        check_token_ids(received.token_ids, info.vocab_size, "resume.token_ids")
        prompt_log_probs = decoding.prompt_log_probs and self.begins and index == self.first
        check_log_probs(decoding.top_log_probs, len(prompt_ids) if prompt_log_probs else 0)
        grammar = None if self.grammar is None else self.grammar.before(resumed=index == self.first)
        policy = self._policy(decoding.sampling, target)
        # what such a policy has learnt may depend on the noise of this seed
        learnt = decoding.sampling.residual and policy.learns_from_others
        sampling = replace(decoding.sampling, seed=secrets.randbits(63) if learnt else seed)
        stop_token_ids = (*decoding.stop_token_ids, *self.special_ids)
        check_stop_tokens(stop_token_ids)
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
            principal=self.principal,
            recalls=self.recalls,
            keeps=self.keeps,
            received=received,
            grammar=grammar,
            special_tokens=message.special_tokens_in_text,
            request_id=self.request_id,
            span=span,
        )
        if len(request.begun_ids) > request.limit:
            raise OutOfRangeError(
                f"resume has {len(received.token_ids)} tokens, expected at most {request.limit - len(prompt_ids)}"
            )
        return request

    def token_need(self, request: GenerationRequest) -> TokenNeed:
        """Tokens that the call needs, `request` being its first completion's; later ones read the prompt again."""
        completions = len(self.indices)
        return TokenNeed(
            least=len(request.begun_ids) + (completions - 1) * len(request.prompt_ids),
            most=completions * request.limit,
            open_ended=request.decoding.max_new_tokens is None,
        )

    def _policy(self, sampling: Sampling, target: Target) -> Policy:
        """Create a completion's policy from the name and settings of the message, or from the service's default.

        Raises:
            InvalidArgumentError: The name is unknown, a setting is wrong, the policy needs a draft model and there is
                none, or it does not support residual sampling.
        """
        message, default, has_model = self.message.policy, self.default_policy, self.has_model
        name = message.name or default_policy(default.name, residual=sampling.residual, has_model=has_model)
        inherited = default.settings if name == default.name else {}
        settings = {**inherited, **policy_settings_from_pb(message)}
        policy = create_policy(name, settings, target.costs, has_model=has_model)
        if sampling.residual and not policy.supports_residual:
            raise InvalidArgumentError(
                f"policy {name} chooses nodes by their tokens, which scheme residual does not allow; "
                f"expected one of {', '.join(residual_policies(has_model=has_model))}"
            )
        return policy


def check_message(message: draft_pb2.GenerateRequest) -> None:
    """Check the fields that need no tokenizer, before a long prompt is encoded.

    Raises:
        InvalidArgumentError: The number of completions or a stop is out of range.
    """
    count = _completions(message)
    if not 1 <= count <= MAX_COMPLETIONS:
        raise InvalidArgumentError(f"n is {count}, expected a number in [1, {MAX_COMPLETIONS}]")
    check_stop_tokens(message.stop_token_ids)
    _check_stop(message.stop)


def received_from_pb(message: draft_pb2.GenerateRequest, context_length: int) -> Received:
    """Return the part of the first completion to make that the client already has; the context is the target's.

    Raises:
        ServiceError: The part is invalid or out of range.
    """
    resume, count = message.resume, _completions(message)
    if resume.index >= count:
        raise InvalidArgumentError(f"resume.index is {resume.index}, expected a number below n, {count}")
    if resume.round > context_length:
        raise OutOfRangeError(f"resume.round is {resume.round}, expected at most {context_length}, the context")
    if len(resume.token_ids) > context_length:
        raise OutOfRangeError(f"resume has {len(resume.token_ids)} tokens, more than the context of {context_length}")
    return Received(tuple(resume.token_ids), resume.characters, resume.round)


def _completions(message: draft_pb2.GenerateRequest) -> int:
    return message.n if message.HasField("n") else 1


def _check_stop(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(f"{len(stops)} stop strings, at most {MAX_STOP_STRINGS} are accepted")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidArgumentError(f"stop[{index}] has {len(stop)} characters, expected 1 to {MAX_STOP_LENGTH}")
