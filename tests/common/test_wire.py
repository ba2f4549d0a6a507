"""Tests that domain values survive the conversion to messages and back."""

from dataclasses import replace

import pytest

from dynatree.common.decoding import Decoding
from dynatree.common.errors import FailedPreconditionError, InvalidArgumentError
from dynatree.common.messages import Commit, FinishReason, OpenSession, SessionOpened, VerifyTimings
from dynatree.common.model_info import ForwardCost, ModelInfo, check_same_tokenizer
from dynatree.common.sampling import Sampling
from dynatree.common.wire import (
    model_info_from_pb,
    model_info_to_pb,
    open_session_from_pb,
    open_session_to_pb,
    session_opened_from_pb,
    session_opened_to_pb,
    top_log_probs_from_pb,
)
from dynatree.v1 import tree_pb2, verify_pb2

INFO = ModelInfo(
    name="some-model",
    architecture="GPTNeoXForCausalLM",
    parameters=2**40,
    vocab_size=50304,
    context_length=2048,
    dtype="bfloat16",
    device="cuda:1",
    tokenizer_fingerprint="ab" * 32,
    version="1.2.3",
    device_id="0123456789abcdef",
    step_bytes=2**41,
    streamed_bytes=3 * 2**30,
    forward_costs=(ForwardCost(1, 0.25), ForwardCost(64, 0.5)),  # exact in float32
    repetition_penalty=1.25,
    fingerprint="cd" * 32,
    numerics="x86 kernels",
)


def test_model_information_comes_back_as_it_went():
    message = tree_pb2.ModelInfo.FromString(model_info_to_pb(INFO).SerializeToString())
    assert len(message.ListFields()) == len(tree_pb2.ModelInfo.DESCRIPTOR.fields), "every field is carried"
    assert model_info_from_pb(message) == INFO


def test_a_message_that_leaves_everything_out_has_no_tokenizer():
    assert model_info_from_pb(tree_pb2.ModelInfo()).repetition_penalty == 1.0
    with pytest.raises(FailedPreconditionError, match=r"\(unnamed\).*\(none and ab"):
        check_same_tokenizer(model_info_from_pb(tree_pb2.ModelInfo()), INFO)


def test_log_probabilities_come_back_as_they_went():
    decoding = Decoding(Sampling(seed=3), 4, log_probs=True, top_log_probs=2, prompt_log_probs=True)
    request = OpenSession((5, 6, 7), decoding, INFO)
    message = verify_pb2.OpenSession.FromString(open_session_to_pb(request).SerializeToString())
    sent = {name: getattr(INFO, name) for name in ("name", "tokenizer_fingerprint", "device_id")}
    draft = model_info_from_pb(tree_pb2.ModelInfo(**sent))
    assert open_session_from_pb(message, default_seed=0) == replace(request, draft=draft)
    places = ((5, -0.5), (6, -1.0)), ((7, -0.25), (5, -2.0))
    commit = Commit(
        next_round=0,
        base_length=5,
        token_ids=(6, 7),
        accepted_nodes=(),
        timings=VerifyTimings(0.0, 0.0, 0.0, total=0.0),
        finish_reason=FinishReason.LENGTH,
        log_probs=(-1.0, -0.25),
        top_log_probs=places,
    )
    opened = SessionOpened(INFO, 256, commit, prompt_log_probs=(-2.0, -0.5), prompt_top_log_probs=places[::-1])
    returned = verify_pb2.SessionOpened.FromString(session_opened_to_pb(opened).SerializeToString())
    assert session_opened_from_pb(returned) == opened


@pytest.mark.parametrize(("tokens", "log_probs", "places"), [(2, 1, 1), (2, 2, 0), (3, 3, 2), (1, 1, 2)])
def test_likeliest_tokens_that_do_not_fit_their_positions_are_malformed(tokens, log_probs, places):
    message = tree_pb2.TopLogProbs(token_ids=[5] * tokens, log_probs=[-1.0] * log_probs)
    with pytest.raises(InvalidArgumentError, match=f"{tokens} token_ids and {log_probs} log_probs .* at {places} pos"):
        top_log_probs_from_pb(message, places)
