"""Tests that greedy output through both services equals transformers' `generate()`, token for token, in float32."""

import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynatree import embedded
from dynatree.client import Client
from dynatree.draft.policies import DEFAULT_POLICY
from tests.support.kernel_builds import CAN_COMPILE
from tests.support.model_zoo import ARCHITECTURES, CONTEXT, save_random_model
from tests.support.processes import wait_until
from tests.support.services import Services, running_services

pytestmark = pytest.mark.early

needs_equal_bits = pytest.mark.skipif(
    not CAN_COMPILE or torch.cpu._is_amx_tile_supported(), reason="no kernels of our own for 16 bits here"
)
CHAIN = ("linear", {"depth": 6})
BUSH = ("fixed", {"depth": 3, "breadth": 3, "tau": 0})
LARGE_BUSH = ("fixed", {"depth": 4, "breadth": 4, "tau": 0})  # 256 nodes
ADAPTIVE = ("dynatree", {"tau": 0, "rho_stop": 1e-9, "rho_deep": 1e-6})
PLAIN = ("autoregressive", {})
DEFAULT = (DEFAULT_POLICY, {})
LISTENING = (DEFAULT, ("hybrid", {}), ("ngram", {}))  # these draft text that has proved right so far
POLICIES = (CHAIN, BUSH, ADAPTIVE, PLAIN, *LISTENING)
EMBEDDED_POLICIES = (CHAIN, BUSH, ("dynatree", {}), PLAIN, *LISTENING)
FAMILY = ARCHITECTURES[0]  # the family that stands for the others
SOME = ("llama", "gpt2")  # more of them


# (prompt tokens, new tokens), from a single token to the last position of the context
FEW = ((1, 1), (2, 17), (31, 20), (150, 10), (CONTEXT - 1, 1))
MORE = ((7, 33), (31, 64), (64, 30), (100, 60), (1, CONTEXT - 1))


def cases(fixture, policies, families=ARCHITECTURES):
    """Each family with each policy. `make test` runs few lengths: each policy with one family, `BUSH` with more."""
    listed = []
    for family in ARCHITECTURES:
        for policy in (*policies, LARGE_BUSH):
            for lengths in (FEW, MORE):
                stands_for_all = family == FAMILY or (policy is BUSH and family in families)
                is_short = policy is not LARGE_BUSH and lengths is FEW and stands_for_all
                marks = () if is_short or (family == FAMILY and policy is DEFAULT) else pytest.mark.long
                name = f"{family}-{policy[0]}{' of 256' * (policy is LARGE_BUSH)}-{'few' if lengths is FEW else 'more'}"
                listed.append(pytest.param(family, policy, lengths, id=name, marks=marks))
    return pytest.mark.parametrize((fixture, "policy", "lengths"), listed, indirect=[fixture], scope="module")


TOKENIZER = AutoTokenizer.from_pretrained(embedded.target_path())


def encode(text):
    return TOKENIZER(text)["input_ids"]


@dataclass(eq=False)
class Pair:
    client: Client
    services: Services
    reference: object

    @property
    def address(self):
        return self.services.draft_address

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

    def tokens(self, prompt, count, policy):
        name, settings = policy
        return self._completed(tuple(prompt), count, name, tuple(settings.items()))

    @cache  # noqa: B019 - several tests compare the same completions
    def _completed(self, prompt, count, name, settings):
        return list(self.completion(prompt, count, (name, dict(settings))).token_ids)

    def completion(self, prompt, count, policy, **options):
        name, settings = policy
        return self.client.generate(prompt, max_new_tokens=count, policy=name, policy_settings=settings, **options)


def open_pair(folder, target, draft, **options):
    with running_services(folder, target, draft, **options) as services, Client(services.draft_address) as client:
        reference = AutoModelForCausalLM.from_pretrained(target, dtype=options.get("dtype", "auto")).eval()
        yield Pair(client, services, reference)


@pytest.fixture(scope="module")
def hostile(request, tmp_path_factory):
    """A draft with other random weights, of which next to nothing is accepted."""
    folder = tmp_path_factory.mktemp("s")
    target = save_random_model(folder / "target", request.param, seed=1)
    yield from open_pair(folder, target, save_random_model(folder / "draft", request.param, seed=2))


@pytest.fixture(scope="module")
def perfect(request, tmp_path_factory):
    """The draft is the target."""
    folder = tmp_path_factory.mktemp("s")
    target = save_random_model(folder / "target", request.param, seed=3)
    yield from open_pair(folder, target, target)


@pytest.fixture(scope="module")
def embedded_pair(tmp_path_factory):
    yield from open_pair(tmp_path_factory.mktemp("s"), embedded.target_path(), embedded.draft_path(), dtype="float32")


@pytest.fixture(scope="module")
def pair_in_16_bits(tmp_path_factory):
    yield from open_pair(tmp_path_factory.mktemp("s"), embedded.target_path(), embedded.draft_path(), dtype="bfloat16")


def prompts(lengths):
    """The same prompts for every policy, so that all are compared with one reference."""
    for prompt_tokens, count in lengths:
        yield random.Random(prompt_tokens).choices(range(2, 2048), k=prompt_tokens), count


@cases("hostile", POLICIES)
def test_a_hostile_draft_changes_no_token(hostile, policy, lengths):
    drafted = accepted = 0
    for prompt, count in prompts(lengths):
        completion = hostile.completion(prompt, count, policy)
        assert list(completion.token_ids) == hostile.expected(prompt, count)
        drafted += completion.stats.draft_n
        accepted += completion.stats.draft_n_accepted
    if policy not in LISTENING:
        assert accepted <= 0.05 * drafted
        assert (drafted == 0) == (policy is PLAIN)


@cases("perfect", [CHAIN, BUSH, *LISTENING], SOME)
def test_the_target_as_draft_is_accepted_to_the_last_node(perfect, policy, lengths):
    for prompt, count in prompts(lengths):
        completion = perfect.completion(prompt, count, policy, ignore_eos=True)
        assert list(completion.token_ids) == perfect.expected(prompt, count, eos_token_id=None)
        if policy not in LISTENING:
            stats = completion.stats
            # every round commits the tree's whole depth and one more token, up to the end of the completion
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


MOST = 64


@pytest.mark.parametrize(
    "texts", [TEXTS[:2], pytest.param(TEXTS[2:], marks=pytest.mark.long)], ids=["few texts", "other texts"]
)
@pytest.mark.parametrize(
    "policy", [*EMBEDDED_POLICIES, pytest.param(LARGE_BUSH, marks=pytest.mark.long)], ids=lambda policy: policy[0]
)
@pytest.mark.parametrize("count", [2, 9, MOST])
def test_the_embedded_pair_in_float32(embedded_pair, policy, count, texts):
    for text in texts:
        completion = embedded_pair.completion(text, count, policy)
        assert completion.prompt_tokens == len(encode(text))
        assert list(completion.token_ids) == embedded_pair.expected(encode(text), MOST)[:count]


@pytest.mark.parametrize(
    ("prompt_tokens", "count"),
    [(1990, 58), pytest.param(2047, 1, marks=pytest.mark.long), pytest.param(1500, 100, marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "policy",
    [policy if policy in LISTENING else pytest.param(policy, marks=pytest.mark.long) for policy in EMBEDDED_POLICIES],
    ids=lambda policy: policy[0],
)
def test_the_embedded_pair_up_to_its_context(embedded_pair, prompt_tokens, count, policy):
    prompt = (encode(" ".join(TEXTS)) * 40)[:prompt_tokens]
    completion = embedded_pair.completion(prompt, count, policy, ignore_eos=True)
    assert list(completion.token_ids) == embedded_pair.expected(prompt, count, eos_token_id=None)
    assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("texts", "policies"),
    [(TEXTS[:1], (CHAIN, DEFAULT)), pytest.param(TEXTS, EMBEDDED_POLICIES, marks=pytest.mark.long)],
    ids=["one text", "every text"],
)
def test_bfloat16_divergences_are_near_ties(pair_in_16_bits, record_property, texts, policies):
    """In bfloat16, passes over n rows and over one row may round differently; count that, and print the margins."""
    margins = []
    tokens = 0
    for prompt in map(encode, texts):
        theirs = pair_in_16_bits.expected(prompt, MOST)
        for policy in policies:
            ours = pair_in_16_bits.tokens(prompt, MOST, policy)
            tokens += len(theirs)
            if ours != theirs:
                at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
                with torch.inference_mode():
                    logits = pair_in_16_bits.reference(torch.tensor([prompt + theirs[:at]])).logits[0, -1].float()
                margins.append((logits[theirs[at]] - logits[ours[at]]).abs().item() / logits.abs().max().item())
    record_property(
        "figure", f"bfloat16, embedded pair: {len(margins)} divergences in {tokens} tokens; relative margins {margins}"
    )
    # two roundings, relative to the largest logit: bfloat16 has 8 bits
    assert all(margin <= 2 * 2.0**-8 for margin in margins)


@needs_equal_bits
@pytest.mark.parametrize(
    ("texts", "policies"),
    [(TEXTS[:1], (BUSH, DEFAULT)), pytest.param(TEXTS, EMBEDDED_POLICIES, marks=pytest.mark.long)],
    ids=["one text", "every text"],
)
def test_in_bfloat16_every_tree_gives_plain_decodings_tokens(pair_in_16_bits, texts, policies):
    """With the project's kernels a token has the same bits in any forward pass, so near-ties are decided alike."""
    for prompt in map(encode, texts):
        plain = pair_in_16_bits.tokens(prompt, MOST, PLAIN)
        for policy in policies:
            assert pair_in_16_bits.tokens(prompt, MOST, policy) == plain


@needs_equal_bits
def test_in_bfloat16_a_conversation_goes_on_from_what_its_answer_left(pair_in_16_bits):
    """The slots that trees wrote equal those that a prefill would have written."""
    prompt = encode(TEXTS[0])
    address = pair_in_16_bits.address
    with Client(address, principal="one") as client, Client(address, principal="another") as other:
        answer = client.generate(prompt, max_new_tokens=40, policy="fixed").token_ids
        longer = [*prompt, *answer, *encode(" And then")]
        wait_until(lambda: pair_in_16_bits.services.sessions == 0)  # what the answer left is in the cache
        again = client.generate(longer, max_new_tokens=40)
        afresh = other.generate(longer, max_new_tokens=40)
    assert again.stats.cached_tokens > len(prompt) + 30
    assert afresh.stats.cached_tokens == 0
    assert again.token_ids == afresh.token_ids
