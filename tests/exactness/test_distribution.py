"""Tests that sampling is lossless: committed tokens follow the target's distribution, whatever the policy.

Both models are Markov chains: the logits of the next token depend only on the last token. So every committed token is
a draw from a known distribution, also given the two tokens before it. The tables expose a draw that is kept or dropped
because of its token: if nodes of one depth share one row of noise, `MIRROR` is wrong by many standard deviations.
Drawing, growth, verification and acceptance are the product's own code; long tests use both services. With shared
noise, all policies give plain decoding's tokens (`test_sampled_equality.py`), so one policy stands for all there.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dynatree.client import Client
from dynatree.common.decoding import Decoding
from dynatree.common.sampling import Sampling, Scheme
from dynatree.draft.growth.draft_model import EngineDraftModel
from dynatree.draft.growth.draft_session import DraftSession
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies import create_policy, residual_policies
from dynatree.draft.text.translated_context import TranslatedContext
from dynatree.draft.text.translation import Translation
from dynatree.engine.kv.kv_range import KVRange
from dynatree.verify.session import SessionRequest, VerifySession
from dynatree.verify.verifier import Part, Verifier
from tests.support.markov import Following, Table, p_value
from tests.support.model_zoo import save_random_model
from tests.support.other_tokenizers import Letters
from tests.support.services import running_services

pytestmark = pytest.mark.early

BATCH = 50  # chains whose trees the target verifies together
LEAST_P = 1e-4  # the seeds are fixed, so a test that passes once passes always
NEVER = 1e-9  # in place of a probability of zero, which has no logarithm


@dataclass(frozen=True)
class Tables:
    """The logits of the target and of the draft, `[last token, next token]`; chains begin after `start`.

    A draft with another tokenizer has other tokens. `allowed` says which tokens a grammar allows after each.
    """

    target: Tensor
    draft: Tensor
    start: int
    translation: Translation | None = None
    allowed: Tensor | None = None

    @property
    def vocabulary(self):
        return len(self.target)

    @property
    def grammar(self):
        return None if self.allowed is None else Following(self.allowed, self.start)


def tables(target, draft, start):
    """Tables of probabilities by row."""
    return Tables(*(torch.tensor(rows).clamp(min=NEVER).log() for rows in (target, draft)), start)


# Below 3 the draft most likely draws 0, then 1, which the target prefers. After 0 and after 1 it draws either of two
# tokens that are about as likely. A fourth node is 0's second child or 1's first. 0's second child is worth more than
# 1's first if 0's first child is the less likely of the two. So with a budget of four nodes and one row of noise for
# both, 1 keeps its child exactly when that child is the likelier of the two.
MIRROR = tables(
    target=[[0.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0], [0.05, 0.9, 0.05, 0.0]],
    draft=[[0.0, 0.0, 0.48, 0.52], [0.52, 0.0, 0.48, 0.0], [0.48, 0.0, 0.0, 0.52], [0.55, 0.27, 0.18, 0.0]],
    start=3,
)
THREE = tables(
    target=[[0.2, 0.3, 0.5], [0.45, 0.1, 0.45], [0.1, 0.8, 0.1]],
    draft=[[0.3, 0.3, 0.4], [0.52, 0.0, 0.48], [0.55, 0.27, 0.18]],
    start=2,
)

# Budgets that force each policy to choose between nodes, so that it leaves trees in every way.
TIGHT = {
    "autoregressive": {},
    "dynatree": {"base_depth": 1, "max_depth": 2, "max_nodes": 4, "tau_high": 0.6, "tau_low": 0.3},
    "dyspec": {"max_nodes": 4, "max_depth": 2, "breadth": 4},
    "dyspec-threshold": {"threshold": 0.266, "max_nodes": 4, "max_depth": 2, "breadth": 4},
    "fixed": {"depth": 2, "breadth": 2, "tau": 0.1, "max_nodes": 4},
    "linear": {"depth": 2},
    "sequoia": {"max_nodes": 4, "max_depth": 2},
    "specinfer": {"widths": [2, 2], "max_nodes": 4},
}
# The draft has the target's tokens 3, 2 and 0, in this order, and reads its own fourth token in place of token 1.
OTHER = replace(
    tables(
        target=[[0.1, 0.3, 0.2, 0.4], [0.5, 0.1, 0.3, 0.1], [0.2, 0.1, 0.1, 0.6], [0.3, 0.3, 0.3, 0.1]],
        draft=[[0.1, 0.3, 0.2, 0.4], [0.5, 0.1, 0.2, 0.2], [0.3, 0.3, 0.1, 0.3], [0.1, 0.4, 0.3, 0.2]],
        start=3,
    ),
    translation=Letters.translation("abcd", "dcaz"),
)
# The likeliest tokens of both models are forbidden after 3 and after 0, and one token is forced after 2.
MASKED = replace(
    tables(
        target=[[0.5, 0.1, 0.2, 0.2], [0.2, 0.1, 0.4, 0.3], [0.3, 0.3, 0.3, 0.1], [0.2, 0.3, 0.1, 0.4]],
        draft=[[0.4, 0.2, 0.1, 0.3], [0.1, 0.3, 0.3, 0.3], [0.1, 0.4, 0.4, 0.1], [0.3, 0.2, 0.1, 0.4]],
        start=3,
    ),
    allowed=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 0]], dtype=torch.bool),
)
# The same with the translation of `OTHER`, for a draft with other tokens.
MASKED_OTHER = replace(OTHER, allowed=MASKED.allowed)


class Counts:
    """Number of occurrences of each token after each pair: `[before last, last, next]`."""

    def __init__(self, vocabulary):
        self._vocabulary = vocabulary
        self._triples = Counter()

    def add(self, chain):
        self._triples.update(zip(chain, chain[1:], chain[2:], strict=False))

    @property
    def of(self):
        counts = torch.zeros(self._vocabulary, self._vocabulary, self._vocabulary, dtype=torch.double)
        for triple, count in self._triples.items():
            counts[triple] = count
        return counts


def assert_the_targets(counts, target):
    """Check that the frequencies of pairs and triples of tokens are those of the target's table."""
    probabilities = target.double().softmax(-1)
    assert p_value(counts.of.sum(0), probabilities) > LEAST_P, "pairs"
    assert p_value(counts.of.flatten(0, 1), probabilities.repeat(len(target), 1)) > LEAST_P, "triples"


def test_the_chi_square_sees_a_small_bias():
    probabilities = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
    generator = torch.Generator().manual_seed(0)

    def draws(distributions):
        tokens = torch.multinomial(distributions, 2_500, replacement=True, generator=generator)
        return torch.stack([torch.bincount(row, minlength=8) for row in tokens]).double()

    assert p_value(draws(probabilities), probabilities) > LEAST_P
    bent = probabilities.clone()
    bent[:, :4] *= 1.15
    assert p_value(draws(bent / bent.sum(-1, keepdim=True)), probabilities) < LEAST_P


# The drafter, the policies and the verifier


class Chain:
    """The sessions of both sides for one sequence of rounds."""

    def __init__(self, sampling, pair, length, name, settings):
        kv = KVRange(0, 100)
        request = SessionRequest((pair.start,), length + 1, frozenset(), Decoding(sampling), grammar=pair.grammar)
        self.verifying = VerifySession(kv, request, [pair.start])
        self.policy = create_policy(name, settings)
        self.drafting = DraftSession(
            kv,
            [pair.start],
            sampling,
            pair.vocabulary,
            drawing=self.policy.drawing,
            translated=pair.translation and TranslatedContext(pair.translation, [pair.start]),
            grammar=pair.grammar,
        )


def drawn(pair, name, settings, *, draws, length=3, scheme=Scheme.RESIDUAL, seed=0):
    """Return the counts of at least `draws` tokens, in chains of a given length, and the number of accepted nodes."""
    draft = EngineDraftModel(Table(pair.draft), translation=pair.translation)
    drafter, verifier = Drafter(draft, 32, translation=pair.translation), Verifier(Table(pair.target), 32)
    counts, accepted = Counts(pair.vocabulary), 0
    for start in range(seed, seed + -(-draws // length), BATCH):
        samplings = [Sampling(temperature=1.0, seed=start + number, scheme=scheme) for number in range(BATCH)]
        batch = [Chain(sampling, pair, length, name, settings) for sampling in samplings]
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
        for chain in batch:
            counts.add(chain.verifying.committed)
    return counts, accepted


def test_every_policy_that_draws_is_here():
    assert tuple(sorted(TIGHT)) == residual_policies()


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        *(pytest.param(name, MIRROR, id=f"{name}-mirror") for name in TIGHT),
        *(
            pytest.param(
                name,
                THREE,
                id=f"{name}-three",
                marks=() if name in ("dynatree", "dyspec-threshold") else pytest.mark.long,
            )
            for name in TIGHT
        ),
    ],
)
def test_trees_of_draws_leave_the_targets_distribution(name, pair):
    counts, accepted = drawn(pair, name, TIGHT[name], draws=2000)
    assert_the_targets(counts, pair.target)
    assert accepted > 500 or name == "autoregressive", "nothing is shown where nothing is accepted"


@pytest.mark.parametrize("name", ["dyspec", pytest.param("sequoia", marks=pytest.mark.long)])
def test_draws_of_another_tokenizer_leave_it_too(name):
    counts, accepted = drawn(OTHER, name, TIGHT[name], draws=2000, length=6)
    assert_the_targets(counts, OTHER.target)
    assert accepted > 500


@pytest.mark.parametrize("pair", [MASKED, MASKED_OTHER], ids=["same tokens", "other tokens"])
@pytest.mark.parametrize(
    ("name", "draws"),
    [("dyspec", 2000), ("specinfer", 2000), *(pytest.param(name, 10_000, marks=pytest.mark.long) for name in TIGHT)],
)
def test_draws_under_a_grammar_follow_the_masked_distribution(name, draws, pair):
    counts, accepted = drawn(pair, name, TIGHT[name], draws=draws, length=20)
    assert_the_targets(counts, pair.target.masked_fill(~pair.allowed, -math.inf))
    assert accepted > 0.2 * draws or name == "autoregressive", "nothing is shown where nothing is accepted"


@pytest.mark.parametrize(("name", "prune"), [("dynatree", "remove"), ("fixed", "expand")])
def test_trees_below_one_draw_leave_it_too(name, prune):
    settings = TIGHT[name] | {"root": "single", "prune": prune, "tau": 0.5, "max_nodes": 5}
    counts, accepted = drawn(MIRROR, name, settings, draws=2000, length=6)
    assert_the_targets(counts, MIRROR.target)
    assert accepted > 500


@pytest.mark.long
def test_random_tables_and_tight_budgets_leave_it():
    """Tables of 3 to 8 tokens with mostly rare tokens meet policies with limits from their smallest values on."""
    choose = random.Random(0)
    for case in range(24):
        vocabulary = choose.randint(3, 8)
        generator = torch.Generator().manual_seed(case)
        target, noise = (2.5 * torch.randn(vocabulary, vocabulary, generator=generator) for _ in range(2))
        pair = Tables(target, target + choose.choice([0.0, 0.3, 1.0]) * noise, start=0)
        name = choose.choice([name for name in TIGHT if name != "autoregressive"])
        counts, _ = drawn(pair, name, _tight(choose, name), draws=3000, length=choose.choice([3, 4, 8]), seed=case)
        assert_the_targets(counts, pair.target)


def _tight(choose, name):
    """Return settings of a policy from the smallest on, and of its draws."""
    nodes, depth = choose.randint(2, 7), choose.randint(2, 4)
    settings = {
        "dynatree": {"base_depth": 1, "max_depth": depth, "max_nodes": nodes, "tau": choose.choice([0.0, 0.2])},
        "dyspec": {"max_nodes": nodes, "max_depth": depth, "breadth": choose.randint(1, 8)},
        "dyspec-threshold": {"threshold": choose.uniform(0.01, 0.4), "max_nodes": nodes, "max_depth": depth},
        "fixed": {
            "depth": depth,
            "breadth": choose.randint(1, 3),
            "tau": choose.choice([0.0, 0.2]),
            "max_nodes": nodes,
        },
        "linear": {"depth": depth},
        "sequoia": {"max_nodes": nodes, "max_depth": depth},
        "specinfer": {"widths": [choose.randint(1, 3) for _ in range(depth)], "max_nodes": nodes},
    }[name]
    if name in ("dynatree", "fixed"):
        settings |= {"root": choose.choice(["single", "committed"]), "prune": choose.choice(["expand", "remove"])}
    if name in ("dynatree", "dyspec", "dyspec-threshold", "fixed"):
        settings |= {"calibrated": choose.randint(0, 1)}
    if name == "specinfer":
        settings |= {"replacement": choose.randint(0, 1)}
    if choose.random() < 0.5:
        settings |= {"draft_temperature": choose.choice([0.6, 1.7]), "candidates": choose.choice([2, 32])}
    return settings


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_room_of_a_session_decides_nothing(temperature):
    """The number of nodes that are read depends on the draws, so a tree must not depend on the room for them."""
    more_than_room = 0
    for case in range(60):
        generator, nodes = torch.Generator().manual_seed(case), 2 + case % 20
        drafter_of = partial(Drafter, EngineDraftModel(Table(6.0 * torch.randn(32, 32, generator=generator))))
        trees = []
        for room in (nodes, 1000):
            sampling = Sampling(temperature=temperature, seed=case, scheme=Scheme.RESIDUAL)
            session = DraftSession(KVRange(0, 0), [0], sampling, 32)
            policy = create_policy("dyspec", {"max_nodes": nodes})
            trees.append(drafter_of(room).grow(session, policy, 16, room).tree)
        assert trees[0] == trees[1]
        more_than_room += session.num_used > 2 * nodes
    assert more_than_room > 5


@pytest.mark.parametrize("name", ["linear", "dyspec"])
def test_shared_noise_draws_from_it_too(name):
    counts, accepted = drawn(MIRROR, name, TIGHT[name], draws=1500, scheme=Scheme.GUMBEL)
    assert_the_targets(counts, MIRROR.target)
    assert accepted > 500


# All policies, schemes and cases

MOST, FEWER = 20_000, 5_000  # draws; most where one node's draws decide over another's
LENGTH = 25
VOCABULARY = 8  # the services probe a model with token ids up to 7


def padded(table):
    """Return the table with further tokens that never occur."""
    wide = torch.full((VOCABULARY, VOCABULARY), math.log(NEVER))
    wide[: len(table), : len(table)] = table
    return wide


def save_table(folder, table):
    """Save a model whose logits are those of a table, since nothing is added to the embedding of the last token."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_pretrained(save_random_model(folder, "gpt_neox", seed=1, **shape))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers.0" in name and "layernorm" not in name:
                weight.zero_()
        embedding = model.gpt_neox.embed_in.weight
        hidden = model.gpt_neox.final_layer_norm(embedding).double()  # [last token, 32], of full rank
        model.get_output_embeddings().weight.copy_((torch.linalg.pinv(hidden) @ table.double()).T)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    target, draft = padded(MIRROR.target), padded(MIRROR.draft)
    with torch.inference_mode():
        loaded = AutoModelForCausalLM.from_pretrained(save_table(folder / "target", target))
        torch.testing.assert_close(loaded(torch.arange(VOCABULARY)[None]).logits[0], target, atol=1e-3, rtol=1e-4)
    with (
        running_services(folder, folder / "target", save_table(folder / "draft", draft)) as services,
        Client(services.draft_address) as client,
    ):
        yield client


@pytest.mark.long
@pytest.mark.timeout(1200)  # 20,000 rounds at worst, through both services, take minutes on a slow machine
@pytest.mark.parametrize(
    ("scheme", "name", "draws"),
    [
        *(("residual", name, MOST if name in ("dyspec", "dyspec-threshold") else FEWER) for name in TIGHT),
        ("gumbel", "dyspec", FEWER),
    ],
)
def test_completions_follow_the_targets_distribution(client, scheme, name, draws):
    counts, accepted = Counts(MIRROR.vocabulary), 0
    for start in range(0, draws // LENGTH, BATCH):
        first = client.generate(
            [MIRROR.start],
            max_new_tokens=LENGTH,
            temperature=1.0,
            seed=start,
            scheme=scheme,
            n=BATCH,
            policy=name,
            policy_settings=TIGHT[name],
            ignore_eos=True,
        )
        for completion in (first, *first.alternatives):
            counts.add([MIRROR.start, *completion.token_ids])
            accepted += completion.stats.draft_n_accepted
    assert_the_targets(counts, MIRROR.target)
    assert accepted > 0.2 * draws or name == "autoregressive", "nothing is shown where nothing is accepted"
