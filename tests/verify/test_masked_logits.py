"""Tests logits under a grammar: masked rows, their log-probabilities, and a grammar that fails in one session."""

import asyncio
import math
import random
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from dynatree import embedded
from dynatree.common.decoding import Decoding
from dynatree.common.errors import InvalidArgumentError
from dynatree.common.grammar import Grammar, GrammarKind
from dynatree.common.sampling import Sampling, Scheme
from dynatree.common.tree import ROOT, DraftDistribution, TokenTree
from dynatree.engine.grammar.compiler import GrammarCompiler
from dynatree.engine.grammar.masking import masked, packed
from dynatree.engine.grammar.state import GrammarState
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.sampling.choosing import choose
from dynatree.verify.accept import Verdict
from dynatree.verify.fault_watch import FaultWatch
from dynatree.verify.log_probs import LEAST_LOG_PROB, log_probs_of
from dynatree.verify.masked_logits import MaskedLogits
from dynatree.verify.node_states import NodeStates
from dynatree.verify.session import SessionRequest, VerifySession
from dynatree.verify.verifier import Part, Verifier, verdicts_of
from tests.support.markov import DecidingTable, Following, Table

NOT = -math.inf
ALLOWED = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
TREE = TokenTree((0, 2, 1, 1), (ROOT, 0, 1, ROOT))
LOGITS = torch.arange(20, dtype=torch.float32).view(5, 4)  # of the root and the nodes


def test_a_row_is_masked_by_the_state_after_its_node():
    found = MaskedLogits(LOGITS, NodeStates(TREE, Following(ALLOWED, 2)))
    expected = torch.where(ALLOWED[[2, 0, 2, 1]], LOGITS[:4], NOT)
    for node in (ROOT, 0, 1, 2):
        assert torch.equal(found.after(node)[0], expected[node + 1])
    assert torch.equal(found.rows((ROOT, 0, 1)), expected[:3])
    assert found.after(1) is found.after(1)
    assert torch.equal(LOGITS, torch.arange(20.0).view(5, 4)), "the logits themselves stay"


def test_a_node_that_the_grammar_forbids_is_never_asked_for():
    """Node 3's token does not follow the root's; only a choice of the target leads to a node."""
    found = MaskedLogits(LOGITS, NodeStates(TREE, Following(ALLOWED, 3)))
    assert found.after(ROOT).isneginf().tolist() == [[True, True, True, False]]
    with pytest.raises(AssertionError, match="forbids"):
        found.after(3)


def test_without_a_grammar_nothing_is_masked():
    found = MaskedLogits(LOGITS, None)
    assert torch.equal(found.after(2), LOGITS[3:4])
    assert torch.equal(found.rows((ROOT, 2)), LOGITS[[0, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 7, 8, 33, 300])
def test_masks_of_bits_forbid_what_the_states_forbid(vocab_size, dtype):
    """None leaves its row; a state may have more bits than there are logits, or fewer."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator).to(dtype)
    allows = torch.rand(4, vocab_size, generator=generator) < 0.5
    long, short = (torch.ones(1, size, dtype=torch.bool) for size in (vocab_size + 40, max(vocab_size - 9, 0)))
    states = [None, Following(allows, 1), Following(allows, 3), Following(long, 0), Following(short, 0)]
    found = masked(logits, packed(states, vocab_size, logits.device))
    assert found.dtype is dtype
    assert torch.equal(found[0], logits[0])
    assert torch.equal(found[1:3], torch.where(allows[[1, 3]], logits[1:3], NOT))
    assert torch.equal(found[3], logits[3])
    assert torch.equal(found[4], logits[4].where(torch.arange(vocab_size) < short.shape[1], NOT))


def rounds(engine, sampling, seed):
    """Tokens, accepted nodes and log-probabilities of some rounds of sessions, two of three under a grammar."""
    chooser = random.Random(seed)
    allows = torch.rand(12, 12, generator=torch.Generator().manual_seed(seed)) < 0.4
    sessions = []
    for start in (3, 8, 10):
        grammar = None if start == 8 else Following(allows | torch.eye(12, dtype=torch.bool), start)
        decoding = Decoding(sampling, log_probs=True, top_log_probs=3)
        request = SessionRequest((start,), 200, frozenset(), decoding, grammar=grammar)
        sessions.append(VerifySession(KVRange(0, 300), request, [start]))
    verifier, found = Verifier(engine, 64), []
    for _ in range(8):
        parts = []
        for session in sessions:
            parents = [chooser.randrange(ROOT, node) for node in range(30)]
            used, tokens = {node: set() for node in range(ROOT, 30)}, []
            for parent in parents:
                tokens.append(chooser.choice([each for each in range(12) if each not in used[parent]]))
                used[parent].add(tokens[-1])
            tree = TokenTree(tuple(tokens), tuple(parents))
            if sampling.residual:
                children = [
                    [tokens[child] for child in range(30) if parents[child] == node] for node in range(ROOT, 30)
                ]
                tree = replace(
                    tree,
                    candidates=tuple(
                        DraftDistribution(tuple(each), (1 / len(each),) * len(each)) if each else None
                        for each in children
                    ),
                )
            parts.append(Part(session, tree))
        found += [
            (each.token_ids, each.accepted, each.log_probs, each.top_log_probs)
            for each in verdicts_of(verifier.run(parts)[0])
        ]
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.3, seed=5, top_k=12, top_p=0.9, repetition_penalty=1.2, logit_bias={7: 1.0}),
        Sampling(temperature=1.0, seed=6, scheme=Scheme.RESIDUAL),
    ],
)
def test_rows_masked_at_once_choose_as_rows_masked_in_turn(sampling, monkeypatch):
    """Where the device decides, the choices after all nodes of a session are one call, so the host waits once."""
    logits = 2 * torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    in_turn = rounds(Table(logits), sampling, 2)
    calls = []
    monkeypatch.setattr(
        "dynatree.verify.verifier.choose", lambda rows, *rest: calls.append(len(rows)) or choose(rows, *rest)
    )
    assert rounds(DecidingTable(logits), sampling, 2) == in_turn
    assert any(accepted for _, accepted, *_ in in_turn)
    assert calls == ([] if sampling.residual else [31] * 24)


def test_a_host_samples_for_the_accepted_path_alone(monkeypatch):
    """With top-p and 150,000 tokens, a row takes some 20 ms, and those of a whole tree longer than its forward pass."""
    calls = []
    monkeypatch.setattr(
        "dynatree.verify.verifier.choose", lambda rows, *rest: calls.append(len(rows)) or choose(rows, *rest)
    )
    logits = 2 * torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    found = rounds(Table(logits), Sampling(temperature=1.0, seed=5, top_p=0.9), 2)
    assert calls == [1] * sum(len(tokens) for tokens, *_ in found)


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

    @property
    def bits(self):
        return b"\xff" if self._steps else b""

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


@pytest.mark.parametrize("engine", [Table, DecidingTable])
@pytest.mark.parametrize("residual", [False, True])
def test_a_grammar_that_fails_ends_its_own_session_alone(residual, engine):
    grammars = (None, Failing(0), Following(torch.ones(4, 4, dtype=torch.bool), 0), Failing(0))
    parts = [part_of(grammar, residual) for grammar in grammars]
    results, _ = Verifier(engine(TURNS), 8).run(parts)
    assert [type(each) for each in results] == [Verdict, InvalidArgumentError, Verdict, InvalidArgumentError]
    assert results[0].token_ids == results[2].token_ids == (1, 2, 3)
    assert [each.session.committed for each in parts] == [[0, 1, 2, 3], [0], [0, 1, 2, 3], [0]]

    faults = []
    watch = FaultWatch(faults.append, lambda: pytest.fail("the device is sound"))
    for _ in range(9):
        assert asyncio.run(watch.judged(results[1:2])) == results[1:2]
    assert not faults


@pytest.mark.parametrize("engine", [Table, DecidingTable])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_grammar_fails_after_the_same_tokens_as_without_a_tree(residual, steps, engine):
    """The round commits every token that plain decoding commits; the next round, whose root fails, is the error."""
    part = part_of(Failing(steps), residual)
    verifier = Verifier(engine(TURNS), 8)
    ((verdict,), _) = verifier.run([part])
    assert verdict.token_ids == (1, 2, 3)[:steps]
    assert verdict.accepted == tuple(range(steps - 1))
    assert len(verdict.log_probs) == steps
    ((error,), _) = verifier.run([Part(part.session)])
    assert isinstance(error, InvalidArgumentError)


@pytest.mark.parametrize("engine", [Table, DecidingTable])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("options", [{"limit": 2}, {"end_tokens": frozenset((1,))}])
def test_nodes_behind_the_end_of_a_completion_may_fail(residual, options, engine):
    ((verdict,), _) = Verifier(engine(TURNS), 8).run([part_of(Failing(1), residual, **options)])
    assert verdict.token_ids == (1,)
    assert verdict.finish_reason is not None


@pytest.mark.parametrize("engine", [Table, DecidingTable])
def test_a_mask_is_computed_once_for_a_node_and_its_commit(engine, monkeypatch):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded.target_path())
    compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id])
    state = compiler.state(Grammar(GrammarKind.REGEX, "x{40}y"))
    computed, compute = [], GrammarState._computed
    monkeypatch.setattr(GrammarState, "_computed", lambda each: computed.append(each) or compute(each))
    [x] = tokenizer.encode("x", add_special_tokens=False)
    logits = torch.zeros(len(tokenizer), len(tokenizer))
    logits[:, x] = 1.0
    request = SessionRequest((x,), 40, frozenset(), Decoding(), grammar=state)
    session = VerifySession(KVRange(0, 90), request, [x])
    verifier, tree = Verifier(engine(logits), 8), TokenTree((x,) * 6, tuple(range(-1, 5)))
    for each in range(1, 4):
        assert verdicts_of(verifier.run([Part(session, tree)])[0])[0].token_ids == (x,) * 7
        assert len(computed) == 7 * each - 1  # the compiler knows the mask before the first token


def test_a_session_whose_grammar_cannot_follow_its_commit_is_not_unmasked():
    """A state that is lost would let every later token pass."""
    session = VerifySession(
        KVRange(0, 9), SessionRequest((0,), 9, frozenset(), Decoding(), grammar=Following(ALLOWED, 0)), [0]
    )
    with pytest.raises(AssertionError):
        session.commit([1], finished=False)
