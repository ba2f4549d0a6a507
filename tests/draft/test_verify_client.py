"""Tests how the draft service handles wrong responses of a verify service."""

import asyncio

import grpc
import pytest

from dynatree.common.errors import GrammarError, PeerFailedError
from dynatree.common.messages import Commit, VerifyTimings
from dynatree.common.tree import TokenTree
from dynatree.common.wire import commit_to_pb
from dynatree.draft.target.verify_client import VerifyStream, translated
from dynatree.v1 import verify_pb2

TIMINGS = VerifyTimings(0.1, 0.0, 0.0, 0.1)


class ScriptedCall:
    """A stream that answers every request with one message."""

    def __init__(self, response):
        self._response = response

    async def write(self, request):
        pass

    async def read(self):
        return self._response


def verified(commit):
    """The commit that the draft service reads from the message of `commit`."""
    return answered(verify_pb2.VerifyResponse(commit=commit_to_pb(commit)))


def answered(response):
    last = Commit(next_round=4, base_length=20, token_ids=(7,), accepted_nodes=(), timings=TIMINGS)
    return asyncio.run(VerifyStream(ScriptedCall(response), "somewhere").verify(TokenTree(), last))


def test_a_commit_goes_on_where_the_last_one_ended():
    assert verified(Commit(5, 22, (8, 9), (0,), TIMINGS)).token_ids == (8, 9)


@pytest.mark.parametrize("base_length", [21, 24])
def test_a_commit_that_does_not_go_on_where_the_last_one_ended(base_length):
    """Tokens between the two commits would be lost unnoticed."""
    with pytest.raises(PeerFailedError, match=f"committed 2 tokens after 20, but reports a length of {base_length}"):
        verified(Commit(5, base_length, (8, 9), (0,), TIMINGS))


def test_a_malformed_answer_is_the_verify_services_fault():
    commit = commit_to_pb(Commit(5, 22, (8, 9), (0,), TIMINGS, log_probs=(-1.0, -2.0)))
    commit.top_log_probs.token_ids.extend([8, 9])
    with pytest.raises(PeerFailedError, match="malformed answer: 2 token_ids and 0 log_probs"):
        answered(verify_pb2.VerifyResponse(commit=commit))


def test_a_grammar_that_fails_within_a_session_is_the_callers_fault():
    """Any other tree that is refused is the services' fault."""
    code = grpc.StatusCode.INVALID_ARGUMENT
    error = translated(code, "too complex (request a)", (("dynatree-refused", "grammar"),))
    assert (type(error), str(error)) == (GrammarError, "too complex")
    assert type(translated(code, "too complex")) is PeerFailedError
