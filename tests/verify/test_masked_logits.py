"""Tests logits under a grammar: masked rows, their log-probabilities, and a grammar that fails in one session."""

import asyncio
import math

import numpy as np
import pytest
import torch

from dynatree.common.decoding import Decoding
from dynatree.common.errors import InvalidArgumentError
from dynatree.common.sampling import Sampling, Scheme
from dynatree.common.tree import ROOT, DraftDistribution, TokenTree
from dynatree.engine.kv.kv_range import KVRange
from dynatree.verify.accept import Verdict
from dynatree.verify.fault_watch import FaultWatch
from dynatree.verify.log_probs import LEAST_LOG_PROB, log_probs_of
from dynatree.verify.masked_logits import MaskedLogits
from dynatree.verify.session import SessionRequest, VerifySession
from dynatree.verify.verifier import Part, Verifier
from tests.support.markov import Following, Table

NOT = -math.inf
ALLOWED = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
TREE = TokenTree((0, 2, 1, 1), (ROOT, 0, 1, ROOT))
LOGITS = torch.arange(20, dtype=torch.float32).view(5, 4)  # of the root and the nodes


def test_a_row_is_masked_by_the_state_after_its_node():
    masked = MaskedLogits(LOGITS, TREE, Following(ALLOWED, 2))
    expected = torch.where(ALLOWED[[2, 0, 2, 1]], LOGITS[:4], NOT)
    for node in (ROOT, 0, 1, 2):
        assert torch.equal(masked.after(node)[0], expected[node + 1])
    assert torch.equal(masked.rows((ROOT, 0, 1)), expected[:3])
    assert masked.after(1) is masked.after(1)
    assert torch.equal(LOGITS, torch.arange(20.0).view(5, 4)), "the logits themselves stay"


def test_a_node_that_the_grammar_forbids_is_never_asked_for():
    """Node 3's token does not follow the root's; only a choice of the target leads to a node."""
    masked = MaskedLogits(LOGITS, TREE, Following(ALLOWED, 3))
    assert masked.after(ROOT).isneginf().tolist() == [[True, True, True, False]]
    with pytest.raises(AssertionError, match="forbids"):
        masked.after(3)


def test_without_a_grammar_nothing_is_masked():
    masked = MaskedLogits(LOGITS, TREE, None)
    assert torch.equal(masked.after(2), LOGITS[3:4])
    assert torch.equal(masked.rows((ROOT, 2)), LOGITS[[0, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_masked_rows(dtype):
    """Forbidden tokens have -9999, and stand behind the allowed ones, lowest id first."""
    rows = torch.tensor([[1.0, NOT, 3.0, NOT, 3.0], [NOT, NOT, NOT, 0.5, NOT], [0.0, 0.0, 0.0, 0.0, 0.0]], dtype=dtype)
    values, top = log_probs_of(rows, [4, 1, 3], 4)
    both = -math.log(2 + math.exp(-2))
    assert values == pytest.approx((both, LEAST_LOG_PROB, -math.log(5)), abs=1e-6)
    ids, log_probs = ([tuple(pair[place] for pair in each) for each in top] for place in (0, 1))
    assert ids == [(2, 4, 0, 1), (3, 0, 1, 2), (0, 1, 2, 3)]
    assert log_probs[0] == pytest.approx((both, both, both - 2, LEAST_LOG_PROB), abs=1e-6)
    assert log_probs[1] == (0.0, LEAST_LOG_PROB, LEAST_LOG_PROB, LEAST_LOG_PROB)


@pytest.mark.parametrize("top", [0, 2])
def test_log_probs_of_masked_rows_in_chunks(top):
    """Rows of several chunks, some masked, have the values that each row has alone."""
    rows = torch.randn(150, 9, generator=torch.Generator().manual_seed(0))
    rows[::3, :8] = NOT
    rows[1::3, 4:] = NOT
    tokens = [8, 1, 5] * 50
    values, likeliest = log_probs_of(rows, tokens, top)
    alone = [log_probs_of(rows[place : place + 1], [token], top) for place, token in enumerate(tokens)]
    assert values == tuple(each[0] for each, _ in alone)
    assert likeliest == tuple(each[0] for _, each in alone if top)


class Failing:
    """A grammar that becomes too complex after `steps` tokens."""

    def __init__(self, steps):
        self._steps = steps
        self.error = None if steps else InvalidArgumentError("the grammar cannot be followed further")

    def allowed(self, vocab_size):
        return np.full(vocab_size, self._steps > 0)

    def after(self, token):
        return Failing(self._steps - 1) if self._steps else None

    def after_all(self, token_ids):
        state = self
        for token in token_ids:
            state = state.after(token)
        return state


TURNS = torch.full((4, 4), -30.0)
TURNS[[0, 1, 2, 3], [1, 2, 3, 0]] = 30.0  # each token is followed by the next


def part_of(grammar, residual, **options):
    """A session after the token 0, whose tree has the two tokens that follow."""
    sampling = Sampling(temperature=1.0, seed=1, scheme=Scheme.RESIDUAL) if residual else Sampling()
    options = {"limit": 9, "end_tokens": frozenset(), **options}
    session = SessionRequest((0,), decoding=Decoding(sampling, log_probs=True), grammar=grammar, **options)
    tokens, certain = (1, 2), tuple(DraftDistribution((token,), (1.0,)) for token in (1, 2))
    tree = TokenTree(tokens, (ROOT, 0), candidates=(*certain, None) if residual else ())
    return Part(VerifySession(KVRange(0, 9), session, [0]), tree)


@pytest.mark.parametrize("residual", [False, True])
def test_a_grammar_that_fails_ends_its_own_session_alone(residual):
    grammars = (None, Failing(0), Following(torch.ones(4, 4, dtype=torch.bool), 0), Failing(0))
    parts = [part_of(grammar, residual) for grammar in grammars]
    results, _ = Verifier(Table(TURNS), 8).run(parts)
    assert [type(each) for each in results] == [Verdict, InvalidArgumentError, Verdict, InvalidArgumentError]
    assert results[0].token_ids == results[2].token_ids == (1, 2, 3)
    assert [each.session.committed for each in parts] == [[0, 1, 2, 3], [0], [0, 1, 2, 3], [0]]

    faults = []
    watch = FaultWatch(faults.append, lambda: pytest.fail("the device is sound"))
    for _ in range(9):
        assert asyncio.run(watch.judged(results[1:2])) == results[1:2]
    assert not faults


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_grammar_fails_after_the_same_tokens_as_without_a_tree(residual, steps):
    """The round commits every token that plain decoding commits; the next round, whose root fails, is the error."""
    part = part_of(Failing(steps), residual)
    verifier = Verifier(Table(TURNS), 8)
    ((verdict,), _) = verifier.run([part])
    assert verdict.token_ids == (1, 2, 3)[:steps]
    assert verdict.accepted == tuple(range(steps - 1))
    assert len(verdict.log_probs) == steps
    ((error,), _) = verifier.run([Part(part.session)])
    assert isinstance(error, InvalidArgumentError)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("options", [{"limit": 2}, {"end_tokens": frozenset((1,))}])
def test_nodes_behind_the_end_of_a_completion_may_fail(residual, options):
    ((verdict,), _) = Verifier(Table(TURNS), 8).run([part_of(Failing(1), residual, **options)])
    assert verdict.token_ids == (1,)
    assert verdict.finish_reason is not None


def test_a_session_whose_grammar_cannot_follow_its_commit_is_not_unmasked():
    """A state that is lost would let every later token pass."""
    session = VerifySession(
        KVRange(0, 9), SessionRequest((0,), 9, frozenset(), Decoding(), grammar=Following(ALLOWED, 0)), [0]
    )
    with pytest.raises(AssertionError):
        session.commit([1], finished=False)
