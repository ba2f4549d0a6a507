"""Tests that seeded samples through both services equal plain decoding and transformers' logits processors."""

import random
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dynatree.client import Client
from dynatree.draft.policies import policy_names, residual_policies
from dynatree.engine.sampling.gumbel import gumbel
from tests.support.model_zoo import VOCAB_SIZE, save_noisy_copy, save_random_model
from tests.support.services import running_services
from tests.support.steady_times import steady_times

pytestmark = pytest.mark.early

PLAIN = "autoregressive"
CASES = 26  # for each of the four pairs
CASES_OF_MAKE_TEST = 6  # for the first pair, one of each extra
TOKENS = 12
# in so short a text only single tokens recur; small trees are faster and are accepted too
SMALL = {"max_nodes": 24}
SETTINGS = {"ngram": {"shortest": 1}, "throughput": {"shortest": 1}, "hybrid": {"shortest": 1, **SMALL}}
SETTINGS |= dict.fromkeys(("dyspec", "dyspec-threshold", "opt-tree", "sequoia"), SMALL)

# text of four tokens: lookups hit, and independent noise leaves the draft a fair chance
FEW = range(100, 104)
FEW_ONLY = {"logit_bias": {token: 12.0 + token % 2 for token in FEW}}
COUNTED = ("frequency_penalty", "presence_penalty")
EXTRAS = (
    {},
    {"top_k": 20},
    {"min_p": 0.2},
    FEW_ONLY,
    {"frequency_penalty": 1.5, "presence_penalty": -0.5, "repetition_penalty": 1.3, **FEW_ONLY},
    {"repetition_penalty": 1.3, "logit_bias": {7: 3.0, 2047: -1000.0}, "top_k": 50, "min_p": 0.02},
)
FEW_CASES = slice(3, 6)  # cases of the last three extras


def sampled_cases(name, count):
    """Prompts with the client's options: every extra with many temperatures, top_p values, lengths and seeds."""
    generator = random.Random(name)
    for index in range(count):
        extra = EXTRAS[index % len(EXTRAS)]
        vocabulary = FEW if FEW_ONLY.items() <= extra.items() else range(2, VOCAB_SIZE)
        prompt = generator.choices(vocabulary, k=generator.randint(1, 20))
        yield (
            prompt,
            {
                "temperature": generator.choice([0.2, 0.5, 0.8, 1.0, 1.5]),
                "top_p": generator.choice([None, 0.95, 0.8, 0.4]),
                "seed": generator.getrandbits(64),
                **extra,
            },
        )


@dataclass(eq=False)
class Pair:
    client: Client
    model: object  # the target, run by transformers alone
    close: bool
    cases: list

    def completion(self, prompt, policy, **options):
        options = {"max_new_tokens": TOKENS, "policy_settings": SETTINGS.get(policy), **options}
        return self.client.generate(prompt, policy=policy, **options)

    @cache  # noqa: B019 - several tests compare the same tokens; a pair lives as long as its module
    def greedy(self, prompt):
        return greedy(self.model, prompt)


@pytest.fixture(scope="module", autouse=True)
def _steady_times():
    with steady_times():
        yield


FIRST = pytest.param(("gpt_neox", CASES_OF_MAKE_TEST), id="gpt_neox, few cases")
OTHERS = [
    pytest.param((name, CASES), id=name, marks=pytest.mark.long) for name in ("llama", "gpt2", "gpt_neox, hostile")
]
# The first pair with all of its cases; a test that reads the first six at most would only repeat itself.
WHOLE = pytest.param(("gpt_neox", CASES), id="gpt_neox", marks=pytest.mark.long)
of_all_cases = pytest.mark.parametrize("pair", [FIRST, WHOLE, *OTHERS], indirect=True, scope="module")


@pytest.fixture(scope="module", params=[FIRST, *OTHERS])
def pair(request, tmp_path_factory):
    """A draft whose guesses are often right, or one with other random weights."""
    folder = tmp_path_factory.mktemp("s")
    name, cases = request.param
    architecture, *hostile = name.split(", ")
    target = save_random_model(folder / "target", architecture, seed=1, num_hidden_layers=2)
    if hostile:
        draft = save_random_model(folder / "draft", architecture, seed=2, num_hidden_layers=2)
    else:
        draft = save_noisy_copy(folder / "draft", target, seed=2, noise=0.2)
    with running_services(folder, target, draft) as services, Client(services.draft_address) as client:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        yield Pair(client, model, not hostile, list(sampled_cases(name, cases)))


@pytest.fixture(scope="module")
def plain(pair):
    """The tokens of plain decoding for each case."""
    return [pair.completion(prompt, PLAIN, **options).token_ids for prompt, options in pair.cases]


@pytest.mark.parametrize("policy", policy_names())
@of_all_cases
def test_every_policy_gives_the_tokens_of_plain_decoding(pair, plain, policy):
    drafted = accepted = 0
    for (prompt, options), expected in zip(pair.cases, plain, strict=True):
        completion = pair.completion(prompt, policy, **options)
        assert completion.token_ids == expected, (prompt, options)
        drafted += completion.stats.draft_n
        accepted += completion.stats.draft_n_accepted
    assert (drafted == 0) == (policy == PLAIN)
    assert (accepted > 0) == (policy != PLAIN)


@pytest.mark.parametrize("policy", policy_names())
def test_noise_of_the_drafts_own_changes_no_token(pair, plain, policy):
    accepted = 0
    for (prompt, options), expected in list(zip(pair.cases, plain, strict=True))[FEW_CASES]:
        completion = pair.completion(prompt, policy, scheme="independent", **options)
        assert completion.token_ids == expected, (prompt, options)
        accepted += completion.stats.draft_n_accepted
    assert (accepted > 0) == (policy != PLAIN)


@of_all_cases
def test_shared_noise_is_worth_a_good_deal(pair):
    """Where the models agree, shared noise lets the draft guess the sample; independent noise gives only chance."""
    shared, own = (
        sum(
            pair.completion(prompt, "linear", scheme=scheme, **options).stats.draft_n_accepted
            for prompt, options in pair.cases[:12]
            if "logit_bias" not in options
        )
        for scheme in ("gumbel", "independent")
    )
    assert shared > (2 if pair.close else 1) * own


@pytest.mark.parametrize("policy", residual_policies())
def test_residual_sampling_repeats_itself(pair, policy):
    accepted = 0
    for prompt, options in pair.cases[FEW_CASES]:
        first, again = (pair.completion(prompt, policy, scheme="residual", **options) for _ in range(2))
        assert first.token_ids == again.token_ids, (prompt, options)
        assert first.stats.draft_n == again.stats.draft_n
        accepted += first.stats.draft_n_accepted
    assert (accepted > 0) == (policy != PLAIN)
    other = options | {"seed": options["seed"] ^ 1}
    assert pair.completion(prompt, policy, scheme="residual", **other).token_ids != first.token_ids


class CountPenalties(LogitsProcessor):
    """OpenAI's frequency and presence penalties, which count the tokens after the prompt."""

    def __init__(self, prompt, frequency_penalty=0.0, presence_penalty=0.0):
        self.prompt_tokens, self.frequency, self.presence = len(prompt), frequency_penalty, presence_penalty

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.prompt_tokens :].tolist()).items():
            scores[0, token] -= self.frequency * count
            scores[0, token] -= self.presence
        return scores


def reference(model, prompt, *, temperature, seed, top_k=0, top_p=None, min_p=0.0, repetition_penalty=1.0, **others):
    """Sample with one forward pass over the sequence per token, transformers' processors, and the noise."""
    processors = LogitsProcessorList()
    if "logit_bias" in others:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in others["logit_bias"].items()}))
    processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    processors.append(CountPenalties(prompt, **{name: others[name] for name in COUNTED if name in others}))
    processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p:
        processors.append(TopPLogitsWarper(top_p))
    processors.append(MinPLogitsWarper(min_p))
    tokens = list(prompt)
    while len(tokens) < len(prompt) + TOKENS:
        with torch.inference_mode():
            scores = processors(torch.tensor([tokens]), model(torch.tensor([tokens])).logits[:, -1])
        tokens.append((scores[0] + gumbel(seed, len(tokens), VOCAB_SIZE)).argmax().item())
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("extra", [*EXTRAS, {"top_p": 0.4}], ids=lambda extra: "+".join(extra) or "temperature")
def test_plain_samples_are_those_of_transformers_processors_with_the_noise(pair, extra):
    without = dict(list(extra.items())[1:])
    effect = not extra
    for seed, temperature in enumerate((0.3, 0.7, 1.2)):
        prompt = random.Random(seed).choices(range(2, VOCAB_SIZE), k=9)
        options = {"temperature": temperature, "seed": seed}
        ours = pair.completion(prompt, PLAIN, ignore_eos=True, **options, **extra).token_ids
        assert ours == reference(pair.model, prompt, **options, **extra)
        effect |= ours != reference(pair.model, prompt, **options, **without)
    assert effect, "the first option changes nothing here, and is not tested"


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({"repetition_penalty": 1.3}, marks=pytest.mark.long),
        {"repetition_penalty": 0.8},
        pytest.param({"logit_bias": {7: 0.5, 9: 1.5, 2047: -1000.0}}, marks=pytest.mark.long),
        {"repetition_penalty": 2.0, "logit_bias": dict.fromkeys(FEW, 4.0)},
        pytest.param({"frequency_penalty": 0.7}, marks=pytest.mark.long),
        pytest.param({"presence_penalty": 2.0}, marks=pytest.mark.long),
        {"frequency_penalty": -0.3, "presence_penalty": 0.9, "repetition_penalty": 1.1},
    ],
    ids=["penalty", "reward", "bias", "both", "frequency", "presence", "all penalties"],
)
def test_greedy_with_penalties_and_bias_is_that_of_generate(pair, extra):
    accepted = {"linear": 0, "fixed": 0}
    effect = False
    for seed in range(3):
        prompt = tuple(random.Random(seed).choices(range(2, VOCAB_SIZE), k=1 + 6 * seed))
        expected = greedy(pair.model, prompt, **extra)
        effect |= expected != pair.greedy(prompt)
        for policy, settings in (("linear", {"depth": 6}), ("fixed", {"depth": 3, "breadth": 4, "tau": 0})):
            completion = pair.completion(prompt, policy, policy_settings=settings, max_new_tokens=30, **extra)
            assert completion.token_ids == expected
            accepted[policy] += completion.stats.draft_n_accepted
    assert effect, "the option changes nothing here, and is not tested"
    assert min(accepted.values()) > 0 or not pair.close


@pytest.mark.parametrize("policy", residual_policies())
def test_residual_sampling_counts_each_nodes_own_path(pair, policy):
    """The draws depend on the trees; at so low a temperature they are the argmax, so the tokens are greedy."""
    accepted = 0
    for extra in ({"frequency_penalty": 1.5, **FEW_ONLY}, {"presence_penalty": 0.8, **FEW_ONLY}):
        prompt = random.Random(policy).choices(FEW, k=7)
        options = {"temperature": 1e-6, "seed": 3, "scheme": "residual", "max_new_tokens": 30}
        completion = pair.completion(prompt, policy, **options, **extra)
        assert completion.token_ids == greedy(pair.model, prompt, **extra)
        accepted += completion.stats.draft_n_accepted
    assert (accepted > 0) == (policy != PLAIN)


def greedy(model, prompt, **options):
    """Return the new tokens of `generate()`."""
    counted = CountPenalties(prompt, **{name: options.pop(name) for name in COUNTED if name in options})
    if "logit_bias" in options:
        options["sequence_bias"] = {(token,): bias for token, bias in options.pop("logit_bias").items()}
    options |= {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0, "logits_processor": [counted]}
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("scheme", ["gumbel", "independent", "residual"])
def test_at_temperature_0_no_scheme_draws(pair, scheme):
    prompt, _ = pair.cases[0]
    expected = pair.greedy(tuple(prompt))[:TOKENS]
    for policy in policy_names():
        completion = pair.completion(prompt, policy, scheme=scheme, seed=3)
        assert completion.token_ids == expected
        assert completion.stats.seed == 0
