"""Tests that the draft's distribution changes neither the target's distribution nor a greedy token.

Both models are tables: the logits of the next token depend only on the last token. The drafter's real draws, growth
and acceptance run on them. `test_distribution.py` does the same for the policies' defaults.
"""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from dynatree import embedded
from dynatree.client import Client
from dynatree.common.decoding import Decoding
from dynatree.common.sampling import Sampling, Scheme
from dynatree.common.tree import ROOT, DraftDistribution
from dynatree.common.wire import tree_from_pb, tree_to_pb
from dynatree.draft.completion.ahead import DraftingAhead
from dynatree.draft.growth.best_guesses import BestGuesses
from dynatree.draft.growth.draft_model import EngineDraftModel
from dynatree.draft.growth.draft_session import DraftSession
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies import create_policy, residual_policies
from dynatree.draft.policies.growing_tree import GrowingTree, Proposal, TrieNode
from dynatree.engine.kv.kv_range import KVRange
from dynatree.v1 import tree_pb2
from dynatree.verify.layout import depth_first
from dynatree.verify.session import SessionRequest, VerifySession
from dynatree.verify.verifier import Part, Verifier
from tests.support.markov import Table, p_value
from tests.support.services import running_services

VOCABULARY = 5
LENGTH = 100  # tokens of a chain of rounds
BATCH = 50  # chains that are verified together
START = 3
TEMPERATURE = 0.8
LEAST_P = 1e-4  # the seeds are fixed, so a test that passes once passes always
GENERATOR = torch.Generator().manual_seed(0)
TARGET = 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=GENERATOR)
DRAFT = TARGET + 0.8 * torch.randn(VOCABULARY, VOCABULARY, generator=GENERATOR)
# small trees that branch, so that every way to leave one occurs often
SMALL = {
    "dynatree": {"base_depth": 1, "max_depth": 3, "max_nodes": 8, "tau_high": 0.6, "tau_low": 0.3},
    "dyspec": {"max_nodes": 4, "max_depth": 2, "breadth": 4},
    "dyspec-threshold": {"threshold": 0.15, "breadth": 4, "max_depth": 3, "max_nodes": 6},
    "fixed": {"depth": 2, "breadth": 2, "tau": 0.1},
    "linear": {"depth": 3},
    "sequoia": {"max_nodes": 0, "max_depth": 3},
    "specinfer": {"widths": [3, 2]},
}
COLD, HOT, FEW = {"draft_temperature": 0.3}, {"draft_temperature": 2.5}, {"candidates": 2}
REPEATED = {"widths": [3, 2], "replacement": 1, "max_nodes": 5}  # the budget cuts the second level's draws short
CASES = {
    **{f"{name}, cold": (name, SMALL[name] | COLD) for name in SMALL},
    **{f"{name}, hot": (name, SMALL[name] | HOT) for name in SMALL},
    **{f"{name}, few": (name, SMALL[name] | FEW) for name in ("dyspec", "specinfer")},
    "specinfer, repeated": ("specinfer", REPEATED),
    "specinfer, repeated, hot": ("specinfer", REPEATED | HOT),
    "specinfer, repeated, hot, few": ("specinfer", REPEATED | HOT | FEW),
}
IN_MAKE_TEST = ("dyspec, hot", "dyspec, few", "sequoia, cold", "specinfer, repeated", "specinfer, repeated, hot")


class Chain:
    """The sessions of both sides for one sequence of rounds."""

    def __init__(self, case, sampling, vocabulary=VOCABULARY):
        self.policy = create_policy(*case)
        self.verifying = VerifySession(
            KVRange(0, 0), SessionRequest((START,), LENGTH + 1, frozenset(), Decoding(sampling)), [START]
        )
        drawing = self.policy.drawing
        self.drafting = DraftSession(KVRange(0, 0), [START], sampling, vocabulary, drawing=drawing)


def decoded(case, sampling_of, count, target=TARGET, draft=DRAFT):
    """Decode several chains of `count` tokens together under a policy; return them and all of their trees."""
    drafter, verifier = Drafter(EngineDraftModel(Table(draft)), 64), Verifier(Table(target), 64)
    chains, trees = [], []
    while len(chains) * LENGTH < count:
        size = min(BATCH, count // LENGTH - len(chains))
        batch = [Chain(case, sampling_of(len(chains) + number), len(draft)) for number in range(size)]
        chains += batch
        while growing := [chain for chain in batch if not chain.verifying.finished]:
            grown = [
                drafter.grow(chain.drafting, chain.policy, chain.verifying.remaining - 1, 64).tree for chain in growing
            ]
            parts = [Part(chain.verifying, tree) for chain, tree in zip(growing, grown, strict=True)]
            for chain, verdict in zip(growing, verifier.run(parts)[0], strict=True):
                drafter.commit(chain.drafting, verdict.token_ids)
            trees += grown
    return [chain.verifying.committed for chain in chains], trees


def residual(seed):
    return Sampling(temperature=TEMPERATURE, seed=seed, scheme=Scheme.RESIDUAL)


def greedy(seed):
    return Sampling(seed=seed)


def counted(pairs):
    counts = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.double)
    for pair, count in Counter(pairs).items():
        counts[pair] = count
    return counts


def test_every_policy_that_draws_is_here():
    assert {*SMALL, "autoregressive"} == set(residual_policies())


@pytest.mark.parametrize(
    ("case", "count"),
    [
        *((CASES[name], 1_000) for name in IN_MAKE_TEST),
        *(pytest.param(case, 2_000, marks=pytest.mark.long) for case in CASES.values()),
    ],
    ids=[*IN_MAKE_TEST, *(f"{name}, more" for name in CASES)],
)
def test_residual_sampling_follows_the_target_whatever_the_drafts_distribution(case, count):
    chains, trees = decoded(case, residual, count)
    assert max(map(len, trees)) > 1
    counts = counted(pair for chain in chains for pair in pairwise(chain))
    assert counts.sum() == count
    assert p_value(counts, (TARGET.double() / TEMPERATURE).softmax(-1)) > LEAST_P


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_greedy_decoding_walks_trees_of_draws(case):
    """At target temperature 0 and draft temperature above 0, trees consist of draws, but tokens are greedy."""
    name, settings = case
    settings = {"draft_temperature": 1.5, **settings}
    chains, trees = decoded((name, settings), greedy, 2 * LENGTH)
    expected = [START]
    while len(expected) <= LENGTH:
        expected.append(TARGET[expected[-1]].argmax().item())
    assert chains == [expected] * 2
    assert not any(tree.candidates for tree in trees), "greedy acceptance needs no distribution"
    assert len({tree.token_ids[0] for tree in trees if len(tree)}) > 1, "the cycle below has one best first token"


def test_under_shared_noise_the_drafts_temperature_changes_the_trees_alone():
    def gumbel(seed):
        return Sampling(temperature=TEMPERATURE, seed=seed)

    plain, _ = decoded(("autoregressive", {}), gumbel, LENGTH)
    chains, trees = zip(
        *(decoded(("linear", {"depth": 2, **extra}), gumbel, LENGTH) for extra in ({}, HOT)), strict=True
    )
    assert chains == (plain, plain)
    assert trees[0] != trees[1]


@pytest.mark.parametrize("case", ["dyspec, hot", "dyspec, few"])
def test_nothing_is_read_ahead_or_judged_of_draws(case, caplog):
    """Draws are new in every round, and a good draft's first draw is often wrong."""
    chain = Chain(CASES[case], greedy(0) if case == "dyspec, hot" else residual(0))
    drafter = Drafter(EngineDraftModel(Table(DRAFT)), 64)
    drafter.grow(chain.drafting, chain.policy, 4, 64)
    assert not DraftingAhead(drafter, chain.drafting, 4, 2).step()
    guesses = BestGuesses()
    for _ in range(60):
        guesses.observe(chain.drafting, [-1])
    assert not caplog.records


@pytest.mark.parametrize(("settings", "temperature"), [({}, TEMPERATURE), (HOT, 2.5)])
def test_draws_are_the_drafts_at_its_temperature(settings, temperature):
    _, trees = decoded(("linear", {"depth": 2, **settings}), residual, 1_000)
    counts = counted((tree.token_ids[0], tree.token_ids[1]) for tree in trees if len(tree) > 1)
    assert p_value(counts, (DRAFT.double() / temperature).softmax(-1)) > LEAST_P


def test_a_draw_has_the_log_probability_of_its_token():
    chain = Chain(CASES["dyspec, hot"], residual(0))
    Drafter(EngineDraftModel(Table(DRAFT)), 64).grow(chain.drafting, chain.policy, 4, 64)
    root = chain.drafting.root
    probs = dict(zip(root.candidates.token_ids, root.candidates.probs, strict=True))
    assert len(root.proposals) > 1
    for draw in root.proposals:
        assert draw.log_prob == pytest.approx(math.log(probs[draw.token]))


def test_repeated_draws_are_one_node_and_travel_with_the_tree():
    tree = GrowingTree(TrieNode(9), [9], sampled=True, replacement=True)
    tree.node(ROOT).candidates = DraftDistribution((4, 5, 6), (0.5, 0.25, 0.25))
    drawn = [tree.add(ROOT, Proposal(token, math.log(0.25))) for token in (5, 4, 5, 5, 6)]
    assert drawn == [0, 1, 0, 0, 2]
    tree.node(0).candidates = DraftDistribution((7,), (1.0,))
    tree.add(0, Proposal(7, 0.0))
    sent = tree.freeze(range(4))
    assert sent.token_ids == (5, 4, 6, 7)
    assert [each and each.draws for each in sent.candidates] == [(0, 1, 0, 0, 2), (0,), None, None, None]
    message = tree_pb2.TokenTree.FromString(tree_to_pb(sent, round_=0, base_length=1).SerializeToString())
    assert tree_from_pb(message, max_nodes=4, max_depth=2, vocab_size=10).candidates == sent.candidates
    laid_out = sent.take(depth_first(sent, range(4)))
    assert laid_out.token_ids == (5, 7, 4, 6)
    assert [each and each.draws for each in laid_out.candidates] == [(0, 1, 0, 0, 2), (0,), None, None, None]
    # draws after a node that is not sent are not sent either
    assert tree.freeze([0]).candidates[0].draws == (0,)


def test_specinfer_draws_as_often_as_its_widths_say():
    _, trees = decoded(("specinfer", {"widths": [6, 3], "replacement": 1}), residual, 200)
    full = [tree for tree in trees if tree.depth == 2]
    for tree in full:
        inner = [node for node in (ROOT, *range(len(tree))) if tree.children_of(node)]
        assert [len(tree.candidates[node + 1].draws) for node in inner] == [6, *[3] * len(tree.children_of(ROOT))]
    assert any(len(tree.children_of(ROOT)) < 6 for tree in full), "some are repeated"


@pytest.mark.parametrize(("candidates", "children"), [(32, 32), (256, 200)])
def test_a_node_has_as_many_children_as_breadth_and_candidates_admit(candidates, children):
    table = torch.zeros(300, 300)
    settings = {"max_nodes": 250, "max_depth": 1, "breadth": 200, "candidates": candidates}
    drafter = Drafter(EngineDraftModel(Table(table)), 256)
    chain = Chain(("dyspec", settings), residual(0), 300)
    tree = drafter.grow(chain.drafting, chain.policy, 8, 256).tree
    assert len(tree) == children
    assert len(tree.candidates[0].token_ids) == candidates


# DySpec's configurations (sections 5.1 and B.1): 64 and 768 nodes, draft temperature 0.6
AS_EVALUATED = {"draft_temperature": 0.6, "max_depth": 64, "breadth": 256, "candidates": 256}


@pytest.fixture(scope="module")
def embedded_client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedded")
    models = embedded.target_path(), embedded.draft_path()
    with running_services(folder, *models, max_tree_nodes=768) as services, Client(services.draft_address) as client:
        yield client


@pytest.mark.long
@pytest.mark.parametrize("nodes", [64, 768])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "scheme": "residual"}], ids=["greedy", "residual"])
def test_dyspec_as_it_was_evaluated(embedded_client, nodes, sampling):
    """Trees of 64 and 768 nodes take one forward pass each; greedy output equals plain decoding."""
    options = {"max_new_tokens": 8, "ignore_eos": True, "seed": 1}
    settings = {"max_nodes": nodes, **AS_EVALUATED}
    drawn = embedded_client.generate(
        "It was a dark and", policy="dyspec", policy_settings=settings, trace=True, **options, **sampling
    )
    assert max(len(each.token_ids) for each in drawn.trace) == nodes
    if not sampling:
        plain = embedded_client.generate("It was a dark and", policy="autoregressive", **options)
        assert drawn.token_ids == plain.token_ids


@pytest.mark.long
def test_repeated_draws_go_through_both_services(embedded_client):
    settings = {"widths": [6, 3], "replacement": 1, "draft_temperature": 2.0}
    options = {"max_new_tokens": 40, "ignore_eos": True, "seed": 1}
    drawing = {"policy": "specinfer", "policy_settings": settings, **options}
    drawn = embedded_client.generate("Once", temperature=1.0, scheme="residual", **drawing)
    assert len(drawn.token_ids) == 40
    assert drawn.stats.draft_n_accepted
    assert drawn.stats.nodes_per_round < 24, "some are repeated"
    plain = embedded_client.generate("Once", policy="autoregressive", **options)
    assert embedded_client.generate("Once", **drawing).token_ids == plain.token_ids
