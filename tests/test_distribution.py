"""Sampling is lossless: 20,000 committed tokens follow the target's own softmax, whatever the policy.

Both models are tables: the logits of the next token depend on the last one alone, so every committed token is a draw
from a known distribution, those after a rejection included, and all of them are counted. Residual sampling is held to
it under every policy that it admits: the policy's own trees and the acceptance here, everything through both services
in the long tests. With shared noise every position is drawn alike (`test_sampled_equality.py` holds all policies to
plain decoding), so one chain and one branching policy stand for the others.
"""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from growing import outcome_of
from model_zoo import save_random_model
from services import running_services
from transformers import AutoModelForCausalLM

from dynatree.client import Client
from dynatree.common.errors import InvalidArgumentError
from dynatree.common.kv_range import KVRange
from dynatree.common.sampling import Sampling, Scheme
from dynatree.common.tree import DraftDistribution
from dynatree.draft.draft_model import EngineDraftModel
from dynatree.draft.draft_session import DraftSession
from dynatree.draft.drafter import Drafter
from dynatree.draft.growing_tree import GrowingTree, Proposal, TrieNode
from dynatree.draft.policies import create_policy, residual_policies
from dynatree.verify.residual import accept_residual
from dynatree.verify.session import Session, SessionRequest
from dynatree.verify.verifier import Part, Verifier

VOCABULARY = 8
DRAWS = 20_000
LENGTH = 100  # tokens of a chain of draws, each after the one before it
BATCH = 50  # chains of which the target verifies the trees together
LEAST_P = 1e-4  # the seeds are fixed, so a test that passes once passes always
TEMPERATURE = 0.8
START = 3
SINGLE = ("linear", {"depth": 1})
BRANCHING = ("dyspec", {"max_nodes": 5, "breadth": 3, "max_depth": 2})
# small trees that branch, so that every way to leave one is taken often
SMALL = {
    "autoregressive": {},
    "dynatree": {"base_depth": 1, "max_depth": 3, "max_nodes": 8, "tau_high": 0.6, "tau_low": 0.3},
    "dyspec": BRANCHING[1],
    "dyspec-threshold": {"threshold": 0.15, "breadth": 3, "max_depth": 3},
    "fixed": {"depth": 2, "breadth": 2, "tau": 0.1},
    "linear": {"depth": 3},
    "sequoia": {"max_nodes": 5, "max_depth": 3},
    "specinfer": {"widths": [2, 2]},
}

CALIBRATED = ("dynatree", "dyspec", "dyspec-threshold", "fixed")


def tables():
    """The logits of the target and of a draft that agrees only in part: `[last token, next token]` each."""
    generator = torch.Generator().manual_seed(0)
    target = 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    return target, target + 0.8 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)


TARGET, DRAFT = tables()


def softmax(table):
    return (table.double() / TEMPERATURE).softmax(-1)


def assert_the_targets(chains, accepted):
    """The tokens of chains of draws, each begun with its first token, are those of the target's softmax."""
    counts = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.double)
    for chain in chains:
        for last, token in pairwise(chain):
            counts[last, token] += 1
    assert counts.sum() >= DRAWS
    assert accepted is None or accepted > 0.2 * DRAWS, "nothing is shown where nothing is accepted"
    assert p_value(counts, softmax(TARGET)) > LEAST_P


def p_value(counts, probabilities):
    """Pearson's chi-square over rows `[contexts, tokens]`, in which cells of fewer than five expected count as one."""
    statistic, freedom = 0.0, 0
    for observed, share in zip(counts, probabilities, strict=True):
        expected = share / share.sum() * observed.sum()
        small = expected < 5
        observed = torch.cat([observed[~small], observed[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
        keep = expected > 0
        statistic += ((observed - expected)[keep] ** 2 / expected[keep]).sum()
        freedom += int(keep.sum()) - 1
    return torch.special.gammaincc(torch.tensor(freedom / 2.0), statistic / 2).item()


def test_the_chi_square_sees_a_small_bias():
    probabilities = softmax(TARGET)
    generator = torch.Generator().manual_seed(0)

    def draws(distributions):
        tokens = torch.multinomial(distributions, DRAWS // VOCABULARY, replacement=True, generator=generator)
        return torch.stack([torch.bincount(row, minlength=VOCABULARY) for row in tokens]).double()

    assert p_value(draws(probabilities), probabilities) > LEAST_P
    bent = probabilities.clone()
    bent[:, :4] *= 1.15
    assert p_value(draws(bent / bent.sum(-1, keepdim=True)), probabilities) < LEAST_P


# The policies' own trees, and the acceptance


class Drawing:
    """Draws continuations as the drafter does, in order and without replacement, from the draft's table."""

    def __init__(self, seed):
        self._random = np.random.default_rng(seed)
        probs = softmax(DRAFT).numpy()
        self._log_probs = np.log(probs)
        self._candidates = [DraftDistribution(tuple(range(VOCABULARY)), tuple(row.tolist())) for row in probs]
        self._noise = iter(())

    def tree(self, policy, last):
        """A tree of the policy below the token `last`."""
        tree = GrowingTree(TrieNode(last), [last], max_nodes=64, max_depth=8, sampled=True)
        level = policy.start(tree)
        while level:
            for index in level:
                self._read(tree.node(index), policy.breadth)
            level = [index for index in policy.grow(tree, level) if tree.depth(index) < tree.max_depth]
        return tree.freeze(policy.select(tree))

    def _read(self, node, breadth):
        noise = next(self._noise, None)
        if noise is None:
            self._noise = iter(self._random.gumbel(size=(4096, VOCABULARY)))
            noise = next(self._noise)
        log_probs = self._log_probs[node.token]
        order = (-(log_probs + noise)).argsort()[:breadth].tolist()
        node.candidates = self._candidates[node.token]
        node.proposals = tuple(Proposal(token, float(log_probs[token])) for token in order)


def test_every_policy_that_draws_is_here():
    assert tuple(sorted(SMALL)) == residual_policies()


@pytest.mark.parametrize("calibrated", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "calibrated"])
@pytest.mark.parametrize("name", SMALL)
def test_trees_of_draws_leave_the_targets_softmax(name, calibrated):
    if calibrated and name not in CALIBRATED:
        with pytest.raises(InvalidArgumentError, match="no setting calibrated"):
            create_policy(name, {"calibrated": 1})
        return
    policy = create_policy(name, SMALL[name] | ({"calibrated": 1} if calibrated else {}))
    drawing, random = Drawing(seed=1), np.random.default_rng(2)
    target = softmax(TARGET).numpy()
    chain, accepted = [START], 0
    while len(chain) <= DRAWS:
        tree = drawing.tree(policy, chain[-1])
        after = [*tree.token_ids, chain[-1]]  # of node -1, the root, the last
        verdict = accept_residual(tree, lambda node, after=after: target[after[node]], lambda depth: random)
        policy.observe(outcome_of(tree, verdict.accepted))  # what is learnt shapes the next trees
        chain += verdict.token_ids
        accepted += len(verdict.accepted)
    assert_the_targets([chain], None if name == "autoregressive" else accepted)


# The drafter and the verifier


class Table:
    """Stands in for an engine: the logits after a token are a row of its table, so there is nothing to remember."""

    def __init__(self, logits):
        self._logits = logits
        self.info = SimpleNamespace(context_length=2 * LENGTH, vocab_size=VOCABULARY)
        self.arena = SimpleNamespace(move=lambda kv, sources, start: None)

    def forward(self, segments):
        kept = [segment.keep if segment.keep is not None else range(len(segment.token_ids)) for segment in segments]
        return [
            self._logits[[segment.token_ids[place] for place in keep]]
            for segment, keep in zip(segments, kept, strict=True)
        ]

    reader = decider = None  # each level is a forward, and the host decides

    def synchronize(self):
        pass


class Chain:
    """The two sides' sessions of one chain of draws."""

    def __init__(self, scheme, seed, policy):
        sampling = Sampling(temperature=TEMPERATURE, seed=seed, scheme=scheme)
        self.verifying = Session(KVRange(0, 0), SessionRequest((START,), LENGTH + 1, frozenset(), sampling), [START])
        self.drafting = DraftSession(KVRange(0, 0), [START], sampling, VOCABULARY)
        self.policy = create_policy(*policy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("scheme", "policy"),
    [(scheme, policy) for scheme in (Scheme.RESIDUAL, Scheme.GUMBEL) for policy in (SINGLE, BRANCHING)],
    ids=lambda value: value.name.lower() if isinstance(value, Scheme) else value[0],
)
def test_committed_tokens_follow_the_targets_softmax(scheme, policy):
    drafter, verifier = Drafter(EngineDraftModel(Table(DRAFT)), 32), Verifier(Table(TARGET), 32)
    chains, accepted = [], 0
    for start in range(0, DRAWS // LENGTH, BATCH):
        batch = [Chain(scheme, start + number, policy) for number in range(BATCH)]
        chains += batch
        while growing := [chain for chain in batch if not chain.verifying.finished]:
            parts = [
                Part(
                    chain.verifying, drafter.grow(chain.drafting, chain.policy, chain.verifying.remaining - 1, 32).tree
                )
                for chain in growing
            ]
            for chain, verdict in zip(growing, verifier.run(parts)[0], strict=True):
                drafter.commit(chain.drafting, verdict.token_ids)
                accepted += len(verdict.accepted)
    assert_the_targets([chain.verifying.committed for chain in chains], accepted)


# Everything


def save_table(folder, table):
    """A model whose logits are those of a table: nothing is added to the embedding of the last token."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_pretrained(save_random_model(folder, "gpt_neox", seed=1, **shape))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers.0" in name and "layernorm" not in name:
                weight.zero_()
        embedding = model.gpt_neox.embed_in.weight
        hidden = model.gpt_neox.final_layer_norm(embedding).double()  # [last token, 32], of rank 8
        model.get_output_embeddings().weight.copy_((torch.linalg.pinv(hidden) @ table.double()).T)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    target, draft = save_table(folder / "target", TARGET), save_table(folder / "draft", DRAFT)
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(target)(torch.arange(VOCABULARY)[None]).logits[0]
    torch.testing.assert_close(logits, TARGET, atol=1e-4, rtol=1e-4)
    with running_services(folder, target, draft) as services, Client(services.draft_address) as client:
        yield client


@pytest.mark.long
@pytest.mark.timeout(1200)  # 20,000 rounds at worst, through both services: minutes on a slow machine
@pytest.mark.parametrize(("scheme", "name"), [*(("residual", name) for name in SMALL), ("gumbel", "dyspec")])
def test_completions_follow_the_targets_softmax(client, scheme, name):
    chains, accepted = [], 0
    for start in range(0, DRAWS // LENGTH, BATCH):
        first = client.generate(
            [START],
            max_new_tokens=LENGTH,
            temperature=TEMPERATURE,
            seed=start,
            scheme=scheme,
            n=BATCH,
            policy=name,
            policy_settings=SMALL[name],
            ignore_eos=True,
        )
        for completion in (first, *first.alternatives):
            chains.append([START, *completion.token_ids])
            accepted += completion.stats.draft_n_accepted
    assert_the_targets(chains, None if name == "autoregressive" else accepted)
