"""Sampling is lossless: over 20,000 draws of a toy model the committed tokens follow the target's own softmax.

The real drafter and verifier, on two random models of 50 tokens that agree only in part. Residual sampling is counted
over the first two tokens that rounds commit, so that what a rejection leaves for the next position is tested as well;
with shared noise every position is drawn alike (`test_sampled_equality.py` holds all of them to plain decoding).
"""

import pytest
import torch
from model_zoo import save_random_model
from transformers import AutoModelForCausalLM

from dynatree.common.engine import ModelSettings, load_engine
from dynatree.common.sampling import Sampling, Scheme, warped
from dynatree.draft.drafter import Drafter, DraftSession
from dynatree.draft.policies import create_policy
from dynatree.verify.session import Session, SessionRequest
from dynatree.verify.verifier import Verifier

VOCABULARY = 50
DRAWS = 20_000
BATCH = 50  # of which the target verifies the trees together
LEAST_P = 1e-4  # the seeds are fixed, so a test that passes once passes always
PROMPT = (3, 14, 15, 9, 26, 5)
TEMPERATURE = 0.8
SINGLE = ("linear", {"depth": 1})
BRANCHING = ("dyspec", {"max_nodes": 5, "breadth": 3, "max_depth": 2})


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1}
    target = save_random_model(folder / "target", "gpt_neox", seed=1, **shape)
    draft = save_random_model(folder / "draft", "gpt_neox", seed=1, **shape)
    model = AutoModelForCausalLM.from_pretrained(draft)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.04 * torch.randn_like(parameter)
    model.save_pretrained(draft)
    return (
        load_engine(ModelSettings(str(target), sessions=BATCH, speculative_slots=32)),
        load_engine(ModelSettings(str(draft), sessions=BATCH, speculative_slots=64)),
    )


@pytest.fixture(scope="module")
def toy(pair):
    return Toy(*pair)


def exact(target):
    """The target's distributions of the token after the prompt, and of the one after that given the first."""
    prompts = torch.tensor([[*PROMPT, first] for first in range(VOCABULARY)])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(target.model.name_or_path)(prompts).logits
    sampling = Sampling(temperature=TEMPERATURE)
    first = warped(logits[:1, -2], sampling)[0].double().softmax(-1)
    return first, warped(logits[:, -1], sampling).double().softmax(-1)


class Toy:
    """Draws from the pair, each with a seed of its own; the prompts are read once, and their rows serve every draw."""

    def __init__(self, target, draft):
        self._verifier = Verifier(target, 32)
        self._drafter = Drafter(draft, 32, VOCABULARY)
        self._rows = [self._read() for _ in range(BATCH)]

    def _read(self):
        verifying = self._verifier.open(SessionRequest(PROMPT, 100, frozenset(), Sampling()))[0]
        drafting = self._drafter.open(PROMPT, Sampling())
        self._drafter.read(drafting, create_policy(*SINGLE))
        return verifying.row, drafting.row

    def first(self, count, samplings, policy):
        """The first tokens that rounds commit after the prompt, for each of a batch; how many nodes were accepted."""
        draws = [Draw(*rows, sampling, policy) for rows, sampling in zip(self._rows, samplings, strict=True)]
        accepted = 0
        while growing := [draw for draw in draws if len(draw.tokens) < count]:
            trees = [self._drafter.grow(draw.drafting, draw.policy, 8, 32).tree for draw in growing]
            pairs = [(draw.verifying, tree) for draw, tree in zip(growing, trees, strict=True)]
            for draw, verdict in zip(growing, self._verifier.verify(pairs)[0], strict=True):
                self._drafter.commit(draw.drafting, verdict.token_ids)
                draw.tokens += verdict.token_ids
                accepted += len(verdict.accepted)
        return [draw.tokens[:count] for draw in draws], accepted


class Draw:
    def __init__(self, row, draft_row, sampling, policy):
        read = len(PROMPT) - 1
        self.verifying = Session(row, SessionRequest(PROMPT, 100, frozenset(), sampling), list(PROMPT))
        self.drafting = DraftSession(draft_row, list(PROMPT), sampling, rows=read, used=read)
        self.policy = create_policy(*policy)
        self.tokens = []


@pytest.mark.timeout(600)  # against a hang: on two slow cores, among other tests, the draws take minutes
@pytest.mark.parametrize("scheme", [Scheme.GUMBEL, Scheme.RESIDUAL], ids=lambda scheme: scheme.name.lower())
@pytest.mark.parametrize("policy", [SINGLE, BRANCHING], ids=["single", "branching"])
def test_committed_tokens_follow_the_targets_softmax(pair, toy, scheme, policy):
    first, following = exact(pair[0])
    places = 2 if scheme is Scheme.RESIDUAL else 1
    counts = torch.zeros(places, VOCABULARY, dtype=torch.double)
    accepted = 0
    for start in range(0, DRAWS, BATCH):
        samplings = [Sampling(temperature=TEMPERATURE, seed=start + n, scheme=scheme) for n in range(BATCH)]
        draws, paths = toy.first(places, samplings, policy)
        accepted += paths
        for tokens in draws:
            for place, token in enumerate(tokens):
                counts[place, token] += 1
    assert accepted > 0.2 * DRAWS, "nothing is shown where nothing is accepted"
    for count, expected in zip(counts, (first, first @ following), strict=False):
        assert p_value(count, expected) > LEAST_P


def p_value(counts, probabilities):
    """Pearson's chi-square, with cells of fewer than five expected counts put together."""
    expected = probabilities / probabilities.sum() * counts.sum()
    small = expected < 5
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    return torch.special.gammaincc((keep.sum() - 1) / 2, statistic / 2).item()


def test_the_chi_square_sees_a_small_bias():
    probabilities = torch.linspace(1, 3, VOCABULARY, dtype=torch.double).softmax(0)
    generator = torch.Generator().manual_seed(0)

    def draws(distribution):
        return torch.bincount(
            torch.multinomial(distribution, DRAWS, replacement=True, generator=generator), minlength=VOCABULARY
        ).double()

    assert p_value(draws(probabilities), probabilities) > LEAST_P
    bent = probabilities.clone()
    bent[:25] *= 1.15
    assert p_value(draws(bent / bent.sum()), probabilities) < LEAST_P
