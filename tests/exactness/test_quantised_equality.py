"""Quantised targets through both services: trees, neighbours and seeds change no token of plain decoding.

Plain decoding by the same kernels is the reference. How far quantised logits are from those of the same weights in
float32 is bounded in `tests/engine/quantized`.
"""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from dynatree.client import Client
from tests.exactness.test_equality import encode
from tests.support.gguf_files import save_gguf
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

pytestmark = compiled
POLICIES = (
    "throughput",
    "dynatree",
    "dyspec",
    "fixed",
    "linear",
    "ngram",
    "hybrid",
    "opt-tree",
    "sequoia",
    "specinfer",
    "dyspec-threshold",
)
TEXT = "Once upon a time there was a small tree that wanted to see the sea and asked the wind for help. "
SAMPLINGS = ({}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 6})


def prompts():
    tokens, chooser = encode(4 * TEXT), random.Random(0)
    return [tokens[chooser.randrange(40) :][: chooser.choice((1, 7, 31, 60))] for _ in range(4)]


def check(client: Client, policies) -> None:
    """Compare every policy with plain decoding, one request alone and eight beside each other."""
    asked = [
        {"prompt": prompt, "max_new_tokens": 40, **sampling}
        for prompt, sampling in zip(prompts() * 3, SAMPLINGS * 4, strict=True)
    ]
    plain = [client.generate(**each, policy="autoregressive").token_ids for each in asked]
    assert len(set(map(tuple, plain))) > 1
    accepted = 0
    with ThreadPoolExecutor(8) as pool:
        for policy in policies:
            alone = [client.generate(**each, policy=policy) for each in asked[:3]]
            beside = list(pool.map(lambda each, policy=policy: client.generate(**each, policy=policy), asked))
            assert [each.token_ids for each in alone] == plain[:3], policy
            assert [each.token_ids for each in beside] == plain, policy
            drafted = [each.stats.draft_n for each in (*alone, *beside)]
            assert sum(drafted) > 0 or policy == "ngram", f"{policy} drew no tree, so nothing was verified"
            accepted += sum(each.stats.draft_n_accepted for each in (*alone, *beside))
    assert accepted > 0


@pytest.mark.parametrize(
    ("architecture", "weights", "dtype", "policies"),
    [
        ("llama", "int8", "bfloat16", POLICIES[:3]),
        ("gpt_neox", "int4", "float32", POLICIES[:3]),
        pytest.param("gpt_neox", "int8", "bfloat16", POLICIES, marks=pytest.mark.long),
        pytest.param("llama", "int4", "bfloat16", POLICIES, marks=pytest.mark.long),
        pytest.param("qwen2", "int4", "float16", POLICIES, marks=pytest.mark.long),
        pytest.param("gpt2", "int8", "float32", POLICIES, marks=pytest.mark.long),
        pytest.param("qwen3", "int4", "bfloat16", POLICIES[:3], marks=pytest.mark.long),
        pytest.param("gemma", "int8", "float32", POLICIES[:3], marks=pytest.mark.long),
        pytest.param("phi3", "int4", "float16", POLICIES[:3], marks=pytest.mark.long),
        pytest.param("smollm3", "int8", "bfloat16", POLICIES[:3], marks=pytest.mark.long),
    ],
)
def test_a_model_that_is_rounded_as_it_is_loaded(tmp_path, architecture, weights, dtype, policies):
    target = save_random_model(tmp_path / "target", architecture, seed=1)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=2)
    with (
        running_services(tmp_path, target, draft, weights=weights, dtype=dtype, sessions=8) as services,
        Client(services.draft_address) as client,
    ):
        assert weights in services.target.info.numerics
        check(client, policies)


@pytest.mark.parametrize(
    ("family", "kinds", "tied", "policies"),
    [
        ("llama", ("Q4_K", "Q6_K", "Q8_0"), True, POLICIES[:3]),
        pytest.param("llama", ("Q4_K", "Q4_K", "Q6_K"), False, POLICIES, marks=pytest.mark.long),
        pytest.param("llama", ("Q4_0", "Q4_1", "F16"), False, POLICIES, marks=pytest.mark.long),
        pytest.param("llama", ("Q5_0", "Q5_1", "Q5_K"), True, POLICIES, marks=pytest.mark.long),
        pytest.param("llama", ("Q8_0",), False, POLICIES, marks=pytest.mark.long),
        pytest.param("qwen3", ("Q4_K", "Q4_K", "Q6_K"), False, POLICIES[:3], marks=pytest.mark.long),
        pytest.param("gemma", ("Q4_K", "Q4_K", "Q6_K"), True, POLICIES[:3], marks=pytest.mark.long),
        pytest.param("phi3", ("Q4_K", "Q4_K", "Q6_K"), False, POLICIES[:3], marks=pytest.mark.long),
        pytest.param("smollm3", ("Q4_K", "Q4_K", "Q6_K"), True, POLICIES[:3], marks=pytest.mark.long),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_gguf_file(tmp_path, family, kinds, tied, policies):
    target = save_gguf(tmp_path / "target.gguf", kinds, seed=1, tied=tied, family=family)
    with (
        running_services(tmp_path, target, target, sessions=8) as services,
        Client(services.draft_address) as client,
    ):
        assert client.model_info().target.name == "target.gguf"
        check(client, policies)
