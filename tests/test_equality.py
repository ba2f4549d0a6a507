"""Greedy output through both services equals transformers' own `generate()`, token for token, in float32."""

import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from model_zoo import ARCHITECTURES, CONTEXT, save_random_model
from services import running_services
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynatree.client import Client
from dynatree.common import embedded

CHAIN = ("linear", {"depth": 6})
BUSH = ("fixed", {"depth": 4, "breadth": 4, "tau": 0})
ADAPTIVE = ("dynatree", {"tau": 0, "rho_stop": 1e-9, "rho_deep": 1e-6})
PLAIN = ("autoregressive", {})
POLICIES = (CHAIN, BUSH, ADAPTIVE, PLAIN)

# (prompt tokens, new tokens): from a single token to the last position of the context
LENGTHS = [
    (1, 1),
    (1, 40),
    (2, 17),
    (7, 33),
    (31, 64),
    (64, 30),
    (100, 60),
    (150, 10),
    (CONTEXT - 1, 1),
    (1, CONTEXT - 1),
]


TOKENIZER = AutoTokenizer.from_pretrained(embedded.target_path())


def encode(text):
    return TOKENIZER(text)["input_ids"]


@dataclass(eq=False)
class Pair:
    client: Client
    reference: object

    def expected(self, prompt, count, **options):
        return self._generated(tuple(prompt), count, tuple(options.items()))

    @cache  # noqa: B019 - several policies are held against one reference; a pair lives as long as its module
    def _generated(self, prompt, count, options):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self.reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=0,
                **dict(options),
            )
        return output[0, len(prompt) :].tolist()

    def completion(self, prompt, count, policy, **options):
        name, settings = policy
        return self.client.generate(prompt, max_new_tokens=count, policy=name, policy_settings=settings, **options)


def open_pair(folder, target, draft, **options):
    with running_services(folder, target, draft, **options) as services, Client(services.draft_address) as client:
        yield Pair(client, AutoModelForCausalLM.from_pretrained(target, dtype=options.get("dtype", "auto")).eval())


@pytest.fixture(scope="module", params=ARCHITECTURES)
def hostile(request, tmp_path_factory):
    """A draft with other random weights: next to nothing is accepted."""
    folder = tmp_path_factory.mktemp("s")
    target = save_random_model(folder / "target", request.param, seed=1)
    yield from open_pair(folder, target, save_random_model(folder / "draft", request.param, seed=2))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def perfect(request, tmp_path_factory):
    """The draft is the target."""
    folder = tmp_path_factory.mktemp("s")
    target = save_random_model(folder / "target", request.param, seed=3)
    yield from open_pair(folder, target, target)


@pytest.fixture(scope="module")
def embedded_pair(tmp_path_factory):
    yield from open_pair(tmp_path_factory.mktemp("s"), embedded.target_path(), embedded.draft_path(), dtype="float32")


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy[0])
def test_a_hostile_draft_changes_no_token(hostile, policy):
    generator = random.Random(policy[0])
    drafted = accepted = 0
    for prompt_tokens, count in LENGTHS:
        prompt = generator.choices(range(2, 2048), k=prompt_tokens)
        completion = hostile.completion(prompt, count, policy)
        assert list(completion.token_ids) == hostile.expected(prompt, count)
        drafted += completion.stats.draft_n
        accepted += completion.stats.draft_n_accepted
    assert accepted <= 0.05 * drafted
    assert (drafted == 0) == (policy is PLAIN)


@pytest.mark.parametrize("policy", [CHAIN, BUSH], ids=lambda policy: policy[0])
def test_the_target_as_draft_is_accepted_to_the_last_node(perfect, policy):
    generator = random.Random(policy[0])
    for prompt_tokens, count in LENGTHS:
        prompt = generator.choices(range(2, 2048), k=prompt_tokens)
        completion = perfect.completion(prompt, count, policy, ignore_eos=True)
        assert list(completion.token_ids) == perfect.expected(prompt, count, eos_token_id=None)
        stats = completion.stats
        # every round commits its tree's whole depth and one more, up to the end of the completion
        depth = policy[1]["depth"]
        assert stats.rounds == -(-(count - 1) // (depth + 1))
        assert all(share == 1.0 for share in stats.acceptance_by_depth)


TEXTS = [
    "It was a dark and stormy night, and the captain",
    "“I do not know,” said Elizabeth,",
    "Call me",
    "The natural selection of the",
    "a",
    "CHAPTER I\n\nIt was",
    "He looked at the door, and then at the window, and then at the",
    "\n\n",
    "1234567890",
    "naïve café — “curly” quotes…",
]


@pytest.mark.parametrize("policy", [CHAIN, BUSH, ("dynatree", {}), PLAIN], ids=lambda policy: policy[0])
@pytest.mark.parametrize("count", [2, 9, 64])
def test_the_embedded_pair_in_float32(embedded_pair, policy, count):
    for text in TEXTS:
        completion = embedded_pair.completion(text, count, policy)
        assert completion.prompt_tokens == len(encode(text))
        assert list(completion.token_ids) == embedded_pair.expected(encode(text), count)


@pytest.mark.parametrize(("prompt_tokens", "count"), [(1990, 58), (2047, 1), (1500, 100)])
def test_the_embedded_pair_up_to_its_context(embedded_pair, prompt_tokens, count):
    prompt = (encode(" ".join(TEXTS)) * 40)[:prompt_tokens]
    for policy in (("dynatree", {}), CHAIN):
        completion = embedded_pair.completion(prompt, count, policy, ignore_eos=True)
        assert list(completion.token_ids) == embedded_pair.expected(prompt, count, eos_token_id=None)
        assert completion.finish_reason == "length"


def test_bfloat16_divergences_are_near_ties(tmp_path, record_property):
    """In bfloat16 a forward over n rows and over one row may round differently; count it, and print the margins."""
    margins = []
    tokens = 0
    for pair in open_pair(tmp_path, embedded.target_path(), embedded.draft_path(), dtype="bfloat16"):
        for text in TEXTS:
            prompt = encode(text)
            for policy in (CHAIN, ("dynatree", {}), PLAIN):
                ours = list(pair.completion(prompt, 64, policy).token_ids)
                theirs = pair.expected(prompt, 64)
                tokens += len(theirs)
                if ours != theirs:
                    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
                    with torch.inference_mode():
                        logits = pair.reference(torch.tensor([prompt + theirs[:at]])).logits[0, -1].float()
                    margins.append((logits[theirs[at]] - logits[ours[at]]).abs().item() / logits.abs().max().item())
    record_property(
        "figure", f"bfloat16, embedded pair: {len(margins)} divergences in {tokens} tokens; relative margins {margins}"
    )
    # two roundings apart, relative to the largest logit: bfloat16 has 8 bits
    assert all(margin <= 2 * 2.0**-8 for margin in margins)
