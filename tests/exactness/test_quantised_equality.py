"""Quantised targets through both services: trees, neighbours and seeds change no token of plain decoding.

Plain decoding by the same kernels is the reference. Every policy meets half of the models, and every model half of the
policies: a tree's shape does not depend on the weights' format. How far quantised logits are from those of the same
weights in float32 is bounded in `tests/engine/quantized`.
"""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from dynatree import embedded
from dynatree.client import Client
from dynatree.draft.serve_draft import _CopyDrafting
from dynatree.draft.settings import DefaultPolicy, DraftLimits, DraftSettings, VerifyServices
from dynatree.draft.target.replicas import Replicas
from dynatree.engine.model_thread import ModelThread
from dynatree.engine.settings import ModelSettings
from dynatree.serving.channel import PLAIN, Connector
from dynatree.serving.operation import OperationSettings
from dynatree.serving.security import LOCAL
from tests.exactness.test_equality import encode
from tests.support.gguf_files import save_gguf
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.packed_checkpoints import save_packed
from tests.support.processes import wait_until
from tests.support.services import running_services

pytestmark = [compiled, pytest.mark.early]
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
SOME, OTHERS = POLICIES[::2], POLICIES[1::2]
TEXT = "Once upon a time there was a small tree that wanted to see the sea and asked the wind for help. "
SAMPLINGS = ({}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 6})


def prompts():
    tokens, chooser = encode(4 * TEXT), random.Random(0)
    return [tokens[chooser.randrange(40) :][: chooser.choice((1, 7, 31, 60))] for _ in range(4)]


def check(client: Client, policies) -> None:
    """Compare every policy with plain decoding, one request alone and eight beside each other."""
    asked = [
        {"prompt": prompt, "max_new_tokens": 24, **SAMPLINGS[place % len(SAMPLINGS)]}
        for place, prompt in enumerate(2 * prompts())
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
        ("llama", "int8", "bfloat16", POLICIES[:2]),
        ("gpt_neox", "int4", "float32", POLICIES[2:4]),
        pytest.param("gpt_neox", "int8", "bfloat16", SOME, marks=pytest.mark.long),
        pytest.param("llama", "int4", "bfloat16", OTHERS, marks=pytest.mark.long),
        pytest.param("qwen2", "int4", "float16", SOME, marks=pytest.mark.long),
        pytest.param("gpt2", "int8", "float32", OTHERS, marks=pytest.mark.long),
        pytest.param("qwen3", "int4", "bfloat16", POLICIES[:2], marks=pytest.mark.long),
        pytest.param("gemma", "int8", "float32", POLICIES[2:4], marks=pytest.mark.long),
        pytest.param("phi3", "int4", "float16", POLICIES[4:6], marks=pytest.mark.long),
        pytest.param("smollm3", "int8", "bfloat16", POLICIES[6:8], marks=pytest.mark.long),
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
        ("llama", ("Q4_K", "Q6_K", "Q8_0"), True, POLICIES[:2]),
        pytest.param("llama", ("Q4_K", "Q4_K", "Q6_K"), False, SOME, marks=pytest.mark.long),
        pytest.param("llama", ("Q4_0", "Q4_1", "F16"), False, OTHERS, marks=pytest.mark.long),
        pytest.param("llama", ("Q5_0", "Q5_1", "Q5_K"), True, SOME, marks=pytest.mark.long),
        pytest.param("llama", ("Q8_0",), False, OTHERS, marks=pytest.mark.long),
        pytest.param("qwen3", ("Q4_K", "Q4_K", "Q6_K"), False, POLICIES[:2], marks=pytest.mark.long),
        pytest.param("gemma", ("Q4_K", "Q4_K", "Q6_K"), True, POLICIES[2:4], marks=pytest.mark.long),
        pytest.param("phi3", ("Q4_K", "Q4_K", "Q6_K"), False, POLICIES[4:6], marks=pytest.mark.long),
        pytest.param("smollm3", ("Q4_K", "Q4_K", "Q6_K"), True, POLICIES[6:8], marks=pytest.mark.long),
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


@pytest.mark.long
@pytest.mark.parametrize(("method", "bits"), [("awq", 4), pytest.param("packed", 8, marks=pytest.mark.long)])
def test_a_packed_checkpoint(tmp_path, method, bits):
    target, draft = save_packed(tmp_path, method, bits)
    with (
        running_services(tmp_path, target, draft, dtype="bfloat16", sessions=8) as services,
        Client(services.draft_address) as client,
    ):
        kind = "awq" if method == "awq" else "compressed-tensors"
        assert services.target.info.numerics.startswith(f"{kind} of {bits} bits weights")
        check(client, POLICIES if method == "packed" else POLICIES[:3])


@pytest.mark.long
@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize("resident", [None, 1])
@pytest.mark.parametrize("trained", [False, True])
def test_the_targets_own_copy_in_4_bits_drafts(tmp_path, trained, resident):
    """In memory, and behind a target whose layers are read from the disk: the same tokens, and most drafts right.

    Drafts are counted if the target is trained: a random model's likeliest tokens are so close that any rounding
    changes two in five.
    """
    target = embedded.target_path() if trained else save_random_model(tmp_path / "target", "llama", seed=1)
    options = {"draft_weights": "int4", "resident_layers": resident}
    with (
        running_services(tmp_path, target, target, dtype="bfloat16", sessions=8, **options) as services,
        Client(services.draft_address) as client,
    ):
        info = client.model_info()
        assert (info.draft.numerics.split(",")[0], info.target.numerics) == (
            "int4 and int8 weights",
            services.target.info.numerics,
        )
        assert "weights" not in info.target.numerics
        assert (info.target.streamed_bytes > 0) == (resident is not None)
        check(client, POLICIES[:2])
        chain = {"policy": "linear", "policy_settings": {"depth": 4}}
        stats = [client.generate(each, max_new_tokens=40, **chain).stats for each in prompts()]
        least = 0.7 if trained else 0.1
        assert sum(each.draft_n_accepted for each in stats) > least * sum(each.draft_n for each in stats)


@pytest.mark.usefixtures("without_amx")
def test_the_copy_of_a_trained_target_guesses_nearly_every_token(tmp_path):
    """It loads once the target serves, and its measured cost is what the policies reckon with."""
    target = embedded.target_path()
    settings = ModelSettings(str(target), weights="int8", chooses_tokens=False, sessions=4)

    async def drafting(verify_address):
        """Return the source of candidates, and the target before and after the copy was loaded."""
        services = VerifyServices(verify_address, PLAIN, 10.0, None)
        operation = OperationSettings("", LOCAL)
        whole = DraftSettings(settings, services, DefaultPolicy("throughput", {}), DraftLimits(), operation, copy=True)
        thread = ModelThread("draft-model")
        begun = await _CopyDrafting.begin(whole, thread)
        replicas = Replicas(verify_address, Connector(PLAIN), begun.target)
        try:
            await replicas.start(10.0)
            before = replicas.target
            source = await begun.source(replicas)
            replicas.rebuild_with(source.build_target)
            return source, before, replicas.target
        finally:
            await replicas.close()
            thread.shutdown()

    with (
        running_services(tmp_path, target, target, sessions=8, draft_weights="int8") as services,
        Client(services.draft_address) as client,
    ):
        drafted, accepted = 0, 0
        for prompt, sampling in zip(prompts(), SAMPLINGS, strict=False):
            asked = {"prompt": prompt, "max_new_tokens": 40, **sampling}
            plain = client.generate(**asked, policy="autoregressive")
            chain = client.generate(**asked, policy="linear", policy_settings={"depth": 4})
            assert client.generate(**asked).token_ids == chain.token_ids == plain.token_ids
            drafted, accepted = drafted + chain.stats.draft_n, accepted + chain.stats.draft_n_accepted
        assert accepted > 0.9 * drafted > 0
        source, before, after = asyncio.run(drafting(services.verify_address))
        assert (before.info.name, source.info.name) == ("embedded-target", "embedded-target")
        assert source.info.numerics.startswith("int8 weights")
        # not the longest of all: on a busy machine, fewer rows may have taken longer, which the cost model disbelieves
        most_rows = max(source.info.forward_costs, key=lambda each: each.rows)
        assert after.costs.draft_forward_seconds == most_rows.seconds != before.costs.draft_forward_seconds


def _closed(services, completion):
    """Return the completion once its session has left its tokens in the prefix cache."""
    wait_until(lambda: services.sessions == 0)
    return completion


def test_a_cached_prefix_changes_no_token(tmp_path):
    target = save_gguf(tmp_path / "target.gguf", ("Q4_K", "Q6_K"), seed=1)
    prompt = (encode(4 * TEXT) * 2)[:60]
    with running_services(tmp_path, target, target) as services, Client(services.draft_address) as client:
        first, again = (_closed(services, client.generate(prompt, max_new_tokens=30)) for _ in range(2))
        longer = client.generate([*prompt, *first.token_ids[:20]], max_new_tokens=10)
        assert (first.stats.cached_tokens, again.stats.cached_tokens) == (0, len(prompt) - 1)
        assert longer.stats.cached_tokens > len(prompt), "committed tokens are cached, since their bits are a prompt's"
        assert again.token_ids == first.token_ids
        assert longer.token_ids == first.token_ids[20:]
