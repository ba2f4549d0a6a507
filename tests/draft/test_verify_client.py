"""What the draft service makes of a verify service that answers wrongly."""

import asyncio

import pytest

from dynatree.common.errors import PeerFailedError
from dynatree.common.messages import Commit, VerifyTimings
from dynatree.common.tree import TokenTree
from dynatree.common.wire import commit_to_pb
from dynatree.draft.target.verify_client import VerifySession
from dynatree.v1 import verify_pb2

TIMINGS = VerifyTimings(0.1, 0.0, 0.0, 0.1)


class ScriptedCall:
    """A stream that answers every request with one commit."""

    def __init__(self, commit):
        self._commit = commit

    async def write(self, request):
        pass

    async def read(self):
        return verify_pb2.VerifyResponse(commit=commit_to_pb(self._commit))


def verified(commit):
    last = Commit(next_round=4, base_length=20, token_ids=(7,), accepted_nodes=(), timings=TIMINGS)
    return asyncio.run(VerifySession(ScriptedCall(commit), "somewhere").verify(TokenTree(), last))


def test_a_commit_goes_on_where_the_last_one_ended():
    assert verified(Commit(5, 22, (8, 9), (0,), TIMINGS)).token_ids == (8, 9)


@pytest.mark.parametrize("base_length", [21, 24])
def test_a_commit_that_does_not_go_on_where_the_last_one_ended(base_length):
    """Tokens in between would be lost without anybody's knowing."""
    with pytest.raises(PeerFailedError, match=f"committed 2 tokens to 20, and says that there are {base_length}"):
        verified(Commit(5, base_length, (8, 9), (0,), TIMINGS))
