"""Tests a session's state on the verify side: the requests, trees and places that it accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynatree.common.decoding import Decoding
from dynatree.common.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError, ServiceError
from dynatree.common.messages import FinishReason, OpenSession
from dynatree.common.model_info import ModelInfo
from dynatree.common.sampling import Sampling, Scheme
from dynatree.common.tree import ROOT, DraftDistribution, TokenTree
from dynatree.engine.kv.kv_range import KVRange
from dynatree.verify.session import SessionRequest, VerifySession

CONTEXT = 400
END = 2
MODEL = ModelInfo("m", "M", 1, 10, CONTEXT, "float32", "cpu", "fingerprint", "0", "device", 1)
RESIDUAL = Sampling(temperature=1.0, scheme=Scheme.RESIDUAL)
PLAIN_TREE = TokenTree((3,), (ROOT,))
DRAWN_TREE = TokenTree((3,), (ROOT,), candidates=(DraftDistribution((3, 4), (0.5, 0.5)), None))


def checked(prompt_ids: tuple[int, ...] = (5, 6, 7), max_new_tokens: int | None = 4, **options: Any) -> SessionRequest:
    own = {name: options.pop(name) for name in ("principal", "generated", "round") if name in options}
    request = OpenSession(prompt_ids, Decoding(max_new_tokens=max_new_tokens, **options), MODEL, **own)
    return SessionRequest.checked(request, MODEL, frozenset({END}))


def session(request: SessionRequest) -> VerifySession:
    return VerifySession(KVRange(0, 0), request, list(request.prompt_ids))


def test_what_a_request_becomes() -> None:
    request = checked(stop_token_ids=(9,), log_probs=True, principal="p", generated=1, round=3)
    decoding = Decoding(max_new_tokens=4, stop_token_ids=(9,), log_probs=True)
    assert request == SessionRequest((5, 6, 7), 6, frozenset({END, 9}), decoding, "p", 1, 3)
    assert checked(top_log_probs=2).decoding == Decoding(max_new_tokens=4, log_probs=True, top_log_probs=2)
    assert checked(ignore_eos=True, stop_token_ids=(9,)).end_tokens == {9}
    assert checked(max_new_tokens=None).limit == CONTEXT
    assert session(request).round == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt_ids": ()}, InvalidArgumentError, "prompt_ids is empty"),
        ({"generated": 3}, InvalidArgumentError, "generated is 3, expected less than the 3 prompt_ids"),
        ({"generated": 4}, InvalidArgumentError, "generated is 4"),
        ({"generated": 2, "max_new_tokens": 1}, OutOfRangeError, "past the limit of 1 new tokens"),
        ({"max_new_tokens": CONTEXT - 2}, OutOfRangeError, "3 in the prompt"),
        ({"prompt_ids": (5, 10)}, InvalidArgumentError, r"prompt_ids\[1\] is 10"),
        ({"stop_token_ids": (10,)}, InvalidArgumentError, r"stop_token_ids\[0\] is 10"),
        ({"top_log_probs": 21}, InvalidArgumentError, r"top_log_probs is 21, expected a number in \[0, 20\]"),
        ({"generated": 1, "prompt_log_probs": True}, InvalidArgumentError, "resumed session has no prompt_log_probs"),
        ({"sampling": Sampling(logit_bias={10: 1.0})}, InvalidArgumentError, "10"),
    ],
)
def test_requests_that_are_refused(options: dict[str, Any], error: type[ServiceError], message: str) -> None:
    with pytest.raises(error, match=message):
        checked(**options)


def test_another_tokenizer_is_refused() -> None:
    other = replace(MODEL, tokenizer_fingerprint="another")
    with pytest.raises(FailedPreconditionError):
        SessionRequest.checked(OpenSession((5,), Decoding(max_new_tokens=1), other), MODEL, frozenset())


def test_a_completion_that_is_over_already() -> None:
    assert checked().finish_reason is None
    assert checked((5, 6, END)).finish_reason is None  # an end-of-sequence token in a prompt ends nothing
    assert checked((5, 6, END), generated=1).finish_reason is FinishReason.STOP
    assert checked((5, END, 6), generated=2).finish_reason is None
    assert checked((5, 6, 7), 2, generated=2).finish_reason is FinishReason.LENGTH
    assert checked((5, 6, 7), 3, generated=2).finish_reason is None


@pytest.mark.parametrize("length", [3, 300])
def test_a_tree_must_follow_the_last_commit(length: int) -> None:
    state = session(checked((5,) * length))
    state.check_place(0, int(str(length)))  # another int object, since numbers are compared by value
    for place, message in (((1, length), "round 1, expected round 0"), ((0, length - 1), f"expected {length}")):
        with pytest.raises(FailedPreconditionError, match=message):
            state.check_place(*place)
    state.round += 300
    state.commit((8, 9), finished=False)
    state.check_place(int("300"), length + 2)
    assert (state.pending, state.remaining, state.unread) == (9, 2, length)
    state.commit((END,), finished=True)
    with pytest.raises(FailedPreconditionError, match="finished"):
        state.check_place(300, length + 3)


def test_distributions_come_where_they_are_wanted() -> None:
    greedy, residual = session(checked()), session(checked(sampling=RESIDUAL))
    for state, tree in ((greedy, PLAIN_TREE), (greedy, TokenTree()), (residual, DRAWN_TREE), (residual, TokenTree())):
        state.check_distributions(tree)
    for state, tree in ((greedy, DRAWN_TREE), (residual, PLAIN_TREE)):
        with pytest.raises(InvalidArgumentError, match="SAMPLING_SCHEME_RESIDUAL"):
            state.check_distributions(tree)
