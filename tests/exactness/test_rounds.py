"""Tests that after every round the target's KV cache is that of a fresh prefill, and the draft's that of its tokens."""

import math
import random
from contextlib import suppress
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynatree.common.decoding import Decoding
from dynatree.common.sampling import Sampling, Scheme
from dynatree.common.tree import TokenTree
from dynatree.draft.growth.draft_model import EngineDraftModel
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies import create_policy
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from dynatree.verify.session import SessionRequest
from dynatree.verify.verifier import Part, Verifier, verdicts_of
from tests.support.model_zoo import ARCHITECTURES, CONTEXT, save_random_model
from tests.support.trees import random_trees

pytestmark = pytest.mark.early

TOLERANCE = 1e-5


def prefill(engine, token_ids):
    """Return a fresh prefill's keys and values `[layers, 2, heads, n, dim]`."""
    kv = engine.kv_cache.reserve(len(token_ids))
    try:
        engine.forward([Segment(kv, 0, token_ids, range(len(token_ids)), keep=[])])
        return engine.kv_cache.slots(kv, len(token_ids)).clone()
    finally:
        engine.kv_cache.release(kv)


def greedy(engine, prompt, count):
    """Decode plainly in a fresh range, one token per forward pass."""
    kv = engine.kv_cache.reserve(len(prompt) + count)
    (logits,) = engine.forward([Segment(kv, 0, prompt, range(len(prompt)), keep=[len(prompt) - 1])])
    tokens = [logits[0].argmax().item()]
    while len(tokens) < count:
        position = len(prompt) + len(tokens) - 1
        (logits,) = engine.forward([Segment(kv, position, tokens[-1:], [position])])
        tokens.append(logits[0].argmax().item())
    engine.kv_cache.release(kv)
    return tokens


def opened(verifier, request):
    """Open a session and read its prompt; return it and its first commit."""
    session = verifier.open(request)
    (verdict,), _ = verifier.run([Part(session, prompt_tokens=session.unread)])
    return session, verdict


def assert_slots(engine, kv, token_ids):
    assert (engine.kv_cache.slots(kv, len(token_ids)) - prefill(engine, token_ids)).abs().max() <= TOLERANCE


@pytest.fixture(scope="module")
def engines_of(tmp_path_factory):
    """Return a target, a hostile draft of its architecture with other weights, and the target again as a draft.

    Almost nothing of the hostile draft is accepted.
    """

    @cache
    def loaded(architecture):
        folder = tmp_path_factory.mktemp(architecture)
        target = save_random_model(folder / "target", architecture, seed=1)
        draft = save_random_model(folder / "draft", architecture, seed=2)
        return (
            load_engine(ModelSettings(str(target), sessions=3, speculative_slots=256)),
            load_engine(ModelSettings(str(draft), sessions=3, speculative_slots=512)),
            load_engine(ModelSettings(str(target), sessions=3, speculative_slots=512)),
        )

    return loaded


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engines(request, engines_of):
    return engines_of(request.param)


def grafted(tree, continuation, depth):
    """Return the tree with the first `depth` tokens of the true continuation as a path, so that they are accepted."""
    token_ids, parents = list(tree.token_ids), list(tree.parents)
    node = -1
    for token in continuation[:depth]:
        edge = (node, token)
        edges = list(zip(parents, token_ids, strict=True))
        if edge in edges:
            node = edges.index(edge)
        else:
            parents.append(node)
            token_ids.append(token)
            node = len(token_ids) - 1
    return TokenTree(tuple(token_ids), tuple(parents))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(2, 2047), min_size=1, max_size=12),
    trees=st.lists(st.tuples(random_trees(max_nodes=20, max_depth=6), st.integers(0, 6)), min_size=1, max_size=4),
)
def test_the_kv_cache_equals_a_fresh_prefill_after_every_round(engines, prompt, trees):
    target = engines[0]
    verifier = Verifier(target, 64)
    truth = greedy(target, prompt, 40)
    session, verdict = opened(verifier, SessionRequest(tuple(prompt), CONTEXT, frozenset(), Decoding(Sampling())))
    committed = [*prompt, *verdict.token_ids]
    try:
        for tree, depth in trees:
            produced = len(committed) - len(prompt)
            tree = grafted(tree, truth[produced:], depth)
            (verdict,), _ = verifier.run([Part(session, tree)])
            assert len(verdict.accepted) >= depth
            committed.extend(verdict.token_ids)
            assert session.length == len(committed)
            assert_slots(target, session.kv, committed[:-1])
            assert session.pending == committed[-1]
        assert committed[len(prompt) :] == truth[: len(committed) - len(prompt)]
    finally:
        verifier.close(session)


COUNTED = Sampling(frequency_penalty=1.5, presence_penalty=0.5, logit_bias=dict.fromkeys(range(90, 94), 20.0))
DRAFTS = {
    "draft=target": (True, Sampling()),
    "draft=target, counts": (True, COUNTED),
    "hostile draft": (False, Sampling()),
}
GROWN = {
    "linear": {"depth": 5},
    "fixed": {"depth": 3, "breadth": 3, "tau": 0},
    "dynatree": {"tau": 0, "rho_stop": 1e-9, "rho_deep": 1e-6},
}


def combined():
    """Each family with each draft and policy. `make test` runs all of two families, and one of each other family."""
    for number, family in enumerate(ARCHITECTURES):
        for place, (draft, policy) in enumerate(product(DRAFTS, GROWN)):
            marks = () if family in ("gpt_neox", "llama") or place == number else pytest.mark.long
            name = f"{family}-{policy}-{draft}"
            yield pytest.param(family, *DRAFTS[draft], policy, GROWN[policy], id=name, marks=marks)


@pytest.mark.parametrize(
    ("engines", "accepting", "sampling", "policy", "options"), [*combined()], indirect=["engines"], scope="module"
)
def test_the_drafts_rows_are_the_committed_tokens(engines, accepting, sampling, policy, options):
    target, hostile, same = engines
    draft = same if accepting else hostile
    verifier, drafter = Verifier(target, 256), Drafter(EngineDraftModel(draft), 256)
    policy = create_policy(policy, options)
    prompt = random.Random(7).choices(range(90, 94) if sampling.counts_generated else range(2, 2048), k=9)
    generated = 4  # tokens of the prompt that a lost session has generated
    request = SessionRequest(tuple(prompt), 60, frozenset(), Decoding(sampling), generated=generated)
    session, verdict = opened(verifier, request)
    drafting = drafter.open(prompt, sampling, 2048, generated=generated)
    drafter.prefill(drafting, policy)
    drafter.commit(drafting, verdict.token_ids)
    committed = [*prompt, *verdict.token_ids]
    accepted = drafted = 0
    while not session.finished:
        tree = drafter.grow(drafting, policy, session.remaining - 1, 256).tree
        assert drafting.committed == committed
        if len(tree):
            assert drafting.num_cached == len(committed)
            assert_slots(draft, drafting.kv, committed)
        (verdict,), _ = verifier.run([Part(session, tree)])
        assert_slots(target, session.kv, [*committed, *verdict.token_ids][:-1])
        committed.extend(verdict.token_ids)
        drafter.commit(drafting, verdict.token_ids)
        assert drafting.num_cached <= len(committed)
        assert_slots(draft, drafting.kv, committed[: drafting.num_cached])
        accepted += len(verdict.accepted)
        drafted += tree.depth
    assert accepted == drafted if accepting else accepted <= drafted / 4
    verifier.close(session)
    drafter.close(drafting)


def test_a_tree_after_re_rooting_is_the_tree_of_a_fresh_start(engines):
    target, _, same = engines
    drafter = Drafter(EngineDraftModel(same), 256)
    policy = create_policy("fixed", {"depth": 4, "breadth": 2, "tau": 0})
    prompt = [5, 6, 7, 8]
    truth = greedy(target, prompt, 30)
    session = drafter.open(prompt, Sampling(), 2048)
    produced = 0
    for step in (1, 2, 1, 3, 5):  # commits inside the tree, and one past it
        drafter.grow(session, policy, 8, 256)
        drafter.commit(session, truth[produced : produced + step])
        produced += step
        reused = drafter.grow(session, policy, 8, 256).tree
        fresh_session = drafter.open([*prompt, *truth[:produced]], Sampling(), 2048)
        fresh = drafter.grow(fresh_session, policy, 8, 256).tree
        assert (reused.token_ids, reused.parents) == (fresh.token_ids, fresh.parents)
        assert torch.allclose(torch.tensor(reused.log_probs), torch.tensor(fresh.log_probs), atol=1e-4)
        drafter.close(fresh_session)
    drafter.close(session)


def test_growth_takes_one_forward_a_level_and_none_for_what_is_known(engines, monkeypatch):
    _, _, draft = engines
    forwards = []
    forward = draft.forward
    monkeypatch.setattr(
        draft, "forward", lambda segments: forwards.append(len(segments[0].token_ids)) or forward(segments)
    )
    drafter = Drafter(EngineDraftModel(draft), 256)
    policy = create_policy("fixed", {"depth": 4, "breadth": 2, "tau": 0})
    session = drafter.open([5, 6, 7, 8], Sampling(), 2048)
    tree = drafter.grow(session, policy, 8, 256).tree
    assert forwards == [4, 2, 4, 8]  # the prompt, then every level except the leaves
    forwards.clear()
    drafter.commit(session, [tree.token_ids[0], tree.token_ids[tree.children[0, drafter_child(tree, 0)]]])
    drafter.grow(session, policy, 8, 256)
    assert forwards == [4, 8]  # levels 3 and 4 below the old root are known; two levels are new
    drafter.close(session)


def test_a_long_prompt_is_read_in_pieces_between_which_others_read_their_levels(engines, monkeypatch):
    _, _, draft = engines
    drafter = Drafter(EngineDraftModel(draft), 256)
    policy, others = (create_policy("fixed", {"depth": 3, "breadth": 2, "tau": 0}) for _ in range(2))
    prompt = random.Random(3).choices(range(2, 2048), k=29)
    whole = drafter.open(prompt, Sampling(), 2048)
    expected = drafter.grow(whole, policy, 8, 256).tree
    drafter.close(whole)
    monkeypatch.setattr("dynatree.draft.growth.drafter.PIECE", 12)
    session, other = (drafter.open(ids, Sampling(), 2048) for ids in (prompt, [5, 6]))
    reading, growing = drafter.prefilling(session, policy), drafter.growing(other, others, 8, 256)
    steps = []
    wanted = {reading: next(reading), growing: next(growing)}
    while wanted:
        steps.append([expansion.tokens for expansion in wanted.values()])
        for each, spent in zip(list(wanted), drafter.expand_all(list(wanted.values())), strict=True):
            with suppress(StopIteration):
                wanted[each] = each.send(spent)
                continue
            del wanted[each]
    assert steps == [[12, 2], [12, 2], [5, 4]]
    drafter.close(other)
    assert_slots(draft, session.kv, prompt)
    tree = drafter.grow(session, policy, 8, 256).tree
    assert (tree.token_ids, tree.parents) == (expected.token_ids, expected.parents)
    drafter.close(session)


def drafter_child(tree, node):
    return next(token for parent, token in tree.children if parent == node)


def test_two_sessions_in_one_forward_are_each_alone(engines):
    target = engines[0]
    verifier = Verifier(target, 64)
    prompts = [[3, 4, 5], [9, 8, 7, 6, 5, 4]]
    truths = [greedy(target, prompt, 20) for prompt in prompts]
    sessions = [
        opened(verifier, SessionRequest(tuple(p), CONTEXT, frozenset(), Decoding(Sampling())))[0] for p in prompts
    ]
    produced = [1, 1]
    while min(produced) < 12:
        batch = []
        for index, session in enumerate(sessions):
            bush = TokenTree((11, 12, 13), (-1, -1, 0))
            batch.append(Part(session, grafted(bush, truths[index][produced[index] :], index + 1)))
        verdicts, _ = verifier.run(batch)
        for index, verdict in enumerate(verdicts):
            start = produced[index]
            assert list(verdict.token_ids) == truths[index][start : start + len(verdict.token_ids)]
            produced[index] += len(verdict.token_ids)
            assert_slots(target, sessions[index].kv, [*prompts[index], *truths[index][: produced[index] - 1]])
    for session in sessions:
        verifier.close(session)


def test_a_commit_that_fails_leaves_the_other_sessions_theirs(engines, monkeypatch):
    target = engines[0]
    verifier = Verifier(target, 64)
    prompts = [[3, 4, 5], [9, 8, 7, 6, 5, 4], [2, 3]]
    truths = [greedy(target, prompt, 6) for prompt in prompts]
    sessions = [
        opened(verifier, SessionRequest(tuple(p), CONTEXT, frozenset(), Decoding(Sampling())))[0] for p in prompts
    ]
    move = target.kv_cache.move

    def failing(kv, sources, start):
        if kv is sessions[1].kv:
            raise RuntimeError("out of memory")
        move(kv, sources, start)

    monkeypatch.setattr(target.kv_cache, "move", failing)
    bush = TokenTree((11, 12, 13), (-1, -1, 0))
    batch = [Part(session, grafted(bush, truth[1:], 2)) for session, truth in zip(sessions, truths, strict=True)]
    results, _ = verifier.run(batch)
    assert isinstance(results[1], RuntimeError)
    with pytest.raises(RuntimeError, match="out of memory"):
        verdicts_of(results)
    for index in (0, 2):
        assert list(results[index].token_ids) == truths[index][1:4]
        assert sessions[index].committed == [*prompts[index], *truths[index][:4]]
        assert_slots(target, sessions[index].kv, sessions[index].committed[:-1])
    for session in sessions:
        verifier.close(session)


@torch.inference_mode()
def test_what_is_read_together_says_what_it_says_one_by_one(engines):
    """The tokens are committed ones read with the root, the start of a continuation, and later nodes of both."""
    draft = engines[1]
    drafter = Drafter(EngineDraftModel(draft), 256)
    policy = create_policy("hybrid", {"breadth": 3, "max_nodes": 40})
    prompt = [*range(50, 60)] * 3
    session = drafter.open(prompt, Sampling(), 2048)
    checked = []
    for committed in ([60, 61, *range(50, 53)], [53], [54, 55, 70], [*range(50, 54)]):
        drafter.commit(session, committed)  # some of it on the path that was read, some beside it
        drafter.grow(session, policy, 20, 40)
        nodes = [(session.root, [])]
        while nodes:
            node, path = nodes.pop()
            text = [*session.committed, *path]
            kv = draft.kv_cache.reserve(len(text))
            (logits,) = draft.forward([Segment(kv, 0, text, range(len(text)), keep=[len(text) - 1])])
            draft.kv_cache.release(kv)
            best = logits[0].log_softmax(-1).topk(3)
            assert [proposal.token for proposal in node.proposals] == best.indices.tolist()
            assert [p.log_prob for p in node.proposals] == pytest.approx(best.values.tolist(), abs=1e-4)
            nodes += [(below, [*path, below.token]) for below in node.children.values() if below.slot is not None]
            checked.append(len(path))
        assert_slots(draft, session.kv, session.committed)
    drafter.close(session)
    assert max(checked) >= 4
    assert len(checked) > 20


@torch.inference_mode()
@pytest.mark.parametrize(
    ("policy", "sampling"),
    [
        ("hybrid", Sampling()),
        ("opt-tree", Sampling(temperature=1.0)),
        ("dyspec", Sampling(temperature=1.0, scheme=Scheme.RESIDUAL)),
    ],
)
def test_a_draft_that_overflows_only_guesses_badly(tmp_path, policy, sampling):
    """In float16 some models give NaN for some texts; the target's tokens are right all the same."""
    path = save_random_model(tmp_path / "draft", "llama", seed=2)
    draft = load_engine(ModelSettings(str(path), speculative_slots=512))
    draft.model.get_input_embeddings().weight[7] = float("nan")
    drafter = Drafter(EngineDraftModel(draft), 256)
    policy = create_policy(policy, {})
    session = drafter.open([5, 6, 7, 5, 6], sampling, 2048)
    for token in (7, 5):
        drafter.commit(session, [token])
        tree = drafter.grow(session, policy, 6, 40).tree
        assert all(math.isfinite(log_prob) for log_prob in tree.log_probs)
    drafter.close(session)
