"""Tests of models with recurrent layers through both services, held to `generate()` in float32."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.functional import silu, softplus
from transformers import AutoModelForCausalLM

from dynatree.client import Client
from dynatree.draft.policies import policy_names
from dynatree.engine.adapters.registry import RECURRENT
from dynatree.engine.adapters.rounded import rounded
from dynatree.engine.forward.recurrent_batch import RecurrentBatch
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.engine.loading import load_engine
from dynatree.engine.sampling.gumbel import gumbel
from dynatree.engine.settings import ModelSettings
from tests.campaigns.recurrent_matrix import FEW, SETTINGS, compare, generated, saved_pair
from tests.support.door import saved
from tests.support.families import VOCAB_SIZE, tiny_config, tiny_model
from tests.support.processes import wait_until
from tests.support.services import running_services

STANDS_FOR_ALL = "qwen3_5_text"  # convolutions, the gated delta rule, and attention
PLAIN = "autoregressive"
TREES = [policy for policy in policy_names() if policy not in (PLAIN, "ngram")]
BUSH = {"policy": "fixed", "policy_settings": SETTINGS["fixed"], "ignore_eos": True}


def families(*short):
    return [
        pytest.param(family, marks=() if family in (short or (STANDS_FOR_ALL, "lfm2")) else pytest.mark.long)
        for family in sorted(RECURRENT)
    ]


@pytest.mark.parametrize("family", families())
def test_every_policy_gives_the_tokens_of_generate(tmp_path, family):
    policies = policy_names() if family == STANDS_FOR_ALL else ("fixed", "linear", "throughput", PLAIN)
    result = compare(family, tmp_path, policies, prompts=4, new=30)
    assert not result["wrong"]
    assert result["distinct"] > 20
    assert all(result["accepted"][policy] > 0 for policy in policies if policy in TREES)


@pytest.fixture(scope="module", name="pair")
def pair_fixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    target, draft = saved_pair(STANDS_FOR_ALL, folder)
    plain = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    with running_services(folder, target, draft, dtype="float32", sessions=8) as services:
        yield services, plain


def prompt_of(seed, length):
    return random.Random(seed).choices(list(FEW), k=length)


@torch.inference_mode()
def assert_plain(plain, prompt, token_ids, *, logit_bias, temperature=0.0, seed=0):
    """Check by one forward pass that every token is the one that plain decoding chooses behind those before it."""
    scores = plain(torch.tensor([[*prompt, *token_ids[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :].clone()
    for token, bias in logit_bias.items():
        scores[:, token] += bias
    if temperature:
        places = range(len(prompt), len(prompt) + len(token_ids))
        scores = scores / temperature + torch.stack([gumbel(seed, place, VOCAB_SIZE) for place in places])
    assert list(token_ids) == scores.argmax(-1).tolist()


def test_eight_sessions_share_passes_and_each_has_its_own_tokens(pair):
    services, plain = pair
    prompts = [prompt_of(seed, 3 + 21 * seed) for seed in range(8)]
    options = [{"logit_bias": FEW} | ({"temperature": 0.8, "seed": seed} if seed % 2 else {}) for seed in range(8)]
    with Client(services.draft_address, principal="eight") as client, ThreadPoolExecutor(8) as threads:
        completions = list(
            threads.map(lambda n: client.generate(prompts[n], max_new_tokens=50, **BUSH, **options[n]), range(8))
        )
    for prompt, option, completion in zip(prompts, options, completions, strict=True):
        assert len(completion.token_ids) == 50
        assert_plain(plain, prompt, completion.token_ids, **option)
    assert max(each.stats.sessions_per_pass for each in completions) > 1.0
    assert sum(each.stats.draft_n_accepted for each in completions) > 100


@pytest.mark.parametrize("length", [20, 64, 100, 140])
def test_a_conversation_goes_on_from_what_its_answer_left(pair, length):
    """A state holds all tokens before it, so a prefix is reused from where a state was kept, and never beyond."""
    services, plain = pair
    prompt = prompt_of(length, length)
    with Client(services.draft_address, principal=f"conversation {length}") as client:

        def reused(prompt, count):
            completion = client.generate(prompt, max_new_tokens=count, logit_bias=FEW, **BUSH)
            assert len(completion.token_ids) == count
            assert_plain(plain, prompt, completion.token_ids, logit_bias=FEW)
            wait_until(lambda: services.sessions == 0)  # what the answer left is in the cache
            return completion.token_ids, completion.stats.cached_tokens

        answer, cached = reused(prompt, 40)
        assert cached == 0
        assert reused([*prompt, *answer, 100, 103], 20)[1] >= length + 38, "the next turn"
        assert reused(prompt, 10)[1] == length - 1, "the same prompt"
        assert reused([*prompt[: length // 2], 5, 6, 7], 10)[1] in (0, length // 2)
        again = reused([*prompt, *answer[:3], 9], 10)[1]
        assert length - 1 <= again <= length + 3, "an answer that was cut and goes on otherwise"


def test_sessions_that_are_cancelled_leave_nothing_behind(tmp_path):
    target, draft = saved_pair("lfm2", tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    with (
        running_services(tmp_path, target, draft, dtype="float32", sessions=4, prefix_cache=False) as services,
        Client(services.draft_address) as client,
    ):
        for seed in range(12):
            stream = client.stream(prompt_of(seed, 100), max_new_tokens=100, logit_bias=FEW, **BUSH)
            for _ in range(seed % 4):
                next(stream)
            stream.close()
        wait_until(lambda: services.idle)
        prompt = prompt_of(99, 70)
        completion = client.generate(prompt, max_new_tokens=30, logit_bias=FEW, **BUSH)
        assert completion.token_ids == generated(plain, prompt, 30, logit_bias=FEW)


@torch.inference_mode()
def logits_of_path(engine, tokens, prompt, chooser):
    """The logits of `tokens` after `prompt` of them; with a chooser, in one pass as a path of a tree."""
    kv = engine.kv_cache.reserve(256)
    engine.forward([Segment(kv, 0, tokens[:prompt], range(prompt), keep=[])])
    places = range(prompt, len(tokens))
    if chooser is None:
        rows = [engine.forward([Segment(kv, place, [tokens[place]], [place])])[0] for place in places]
        engine.kv_cache.release(kv)
        return torch.cat(rows)
    ids, parents, positions, path = [], [], [], []
    for place in places:
        parent = path[-1] if path else -1
        for _ in range(chooser.randrange(3) if path else 0):  # siblings
            ids.append(chooser.randrange(2, VOCAB_SIZE))
            parents.append(parent)
            positions.append(place)
        path.append(len(ids))
        ids.append(tokens[place])
        parents.append(parent)
        positions.append(place)
    tree = Segment(kv, prompt, ids, positions, mask=ancestor_mask([parent - 1 for parent in parents[1:]]))
    other = engine.kv_cache.reserve(64)
    beside = Segment(other, 0, tokens[:30], range(30), keep=[])
    rows = engine.forward([beside, tree] if chooser.random() < 0.5 else [tree, beside])
    scans = {name: state.dtype for (_, name), (state, _) in kv.memory.layers.items() if name != "a convolution"}
    assert set(scans.values()) <= {torch.float64}
    for each in (kv, other):
        engine.kv_cache.release(each)
    return next(each for each in rows if len(each))[path]


@pytest.mark.parametrize("family", families(STANDS_FOR_ALL, "mamba"))
@torch.inference_mode()
def test_sessions_that_go_on_from_one_cached_state_have_nothing_else_in_common(tmp_path, family):
    """One session was given the other's state if both lay as many tokens behind the one that they began with."""
    engine = load_engine(ModelSettings(str(saved_pair(family, tmp_path)[0]), dtype="float32", sessions=3))
    cached = engine.kv_cache.reserve(100)
    tokens = random.Random(0).choices(range(2, VOCAB_SIZE), k=100)
    for start, stop in ((0, 70), (70, 100)):
        engine.forward([Segment(cached, start, tokens[start:stop], range(start, stop), keep=[])])
    after = cached.memory.position

    def pieces(*sizes):
        """The logits of pieces side by side, each from some of the cached tokens on."""
        segments = []
        for begin, size in sizes:
            kv = engine.kv_cache.reserve(begin + size + 1)
            engine.kv_cache.copy(cached, kv, begin)
            own = random.Random(begin).choices(range(2, VOCAB_SIZE), k=size)
            segments.append(Segment(kv, begin, own, range(begin, begin + size)))
        logits = engine.forward(segments)
        begun = [Segment(each.kv, each.stop, [5], [each.stop]) for each in segments]
        logits = [torch.cat(each) for each in zip(logits, engine.forward(begun), strict=True)]
        for each in segments:
            engine.kv_cache.release(each.kv)
        return logits

    for begin, later in itertools.product((after + 2, after + 32, after + 70), (after + 65, 99)):
        # the first session's last 64 tokens, which its state leaves out, begin where the second one goes on
        first, second = (begin, 64 + later - begin), (later, 1)
        for ours, alone in zip(pieces(first, second), [*pieces(first), *pieces(second)], strict=True):
            torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="kernels for x86 only")
@pytest.mark.parametrize("family", families())
def test_a_tree_in_16_bits_has_the_bits_of_plain_decoding(tmp_path, family):
    """With states in float32, all rows of a large model differed, though tiny ones rarely show it."""
    engine = load_engine(ModelSettings(str(saved_pair(family, tmp_path)[0]), dtype="bfloat16", sessions=2))
    for seed, prompt in enumerate((1, 40, 70, 130)):
        tokens = random.Random(seed).choices(range(2, VOCAB_SIZE), k=prompt + 30)
        plain = logits_of_path(engine, tokens, prompt, None)
        assert torch.equal(logits_of_path(engine, tokens, prompt, random.Random(seed)), plain)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="kernels for x86 only")
@pytest.mark.parametrize("family", [STANDS_FOR_ALL, pytest.param("lfm2", marks=pytest.mark.long)])
def test_a_tree_on_weights_of_8_bits_has_the_bits_of_plain_decoding(tmp_path, family):
    engine = load_engine(
        ModelSettings(str(saved_pair(family, tmp_path)[0]), dtype="bfloat16", weights="int8", sessions=2)
    )
    tokens = random.Random(0).choices(range(2, VOCAB_SIZE), k=100)
    plain = logits_of_path(engine, tokens, 70, None)
    assert torch.equal(logits_of_path(engine, tokens, 70, random.Random(0)), plain)


@pytest.mark.long
def test_every_policy_on_weights_of_8_bits_gives_the_tokens_of_plain_decoding(tmp_path):
    result = compare(STANDS_FOR_ALL, tmp_path, policy_names(), prompts=4, new=30, int8=True)
    assert not result["wrong"]
    assert result["distinct"] > 20


def few_heads(family, heads):
    """Changes of a tiny configuration, to few heads of sizes that fill vectors as real ones do."""
    delta = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_value_heads": heads}
    mamba2 = {"mamba_n_heads": heads, "mamba_d_head": 128 // heads, "mamba_d_state": 64}
    return {
        "bamba": mamba2,
        "falcon_h1": mamba2 | {"mamba_n_groups": 1},
        "granitemoehybrid": mamba2,
        "kimi_linear": {"linear_num_heads": heads, "linear_head_dim": 64},
        "mamba2": {"num_heads": heads, "head_dim": 128 // heads, "state_size": 64, "n_groups": 1},
        "olmo_hybrid": delta | {"linear_num_key_heads": heads},
        **dict.fromkeys(
            ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), delta | {"linear_num_key_heads": 1, "head_dim": 64}
        ),
    }.get(family, {})


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="kernels for x86 only")
@pytest.mark.parametrize("heads", [1, pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("family", families())
@torch.inference_mode()
def test_gates_and_logits_have_the_same_bits_in_passes_of_any_number_of_rows(tmp_path, monkeypatch, family, heads):
    """With few heads, the number of rows decides which of torch's loops computes a gate."""
    engine = load_engine(
        ModelSettings(
            str(saved(tiny_model(tiny_config(family, **few_heads(family, heads)), 0), tmp_path)),
            dtype="bfloat16",
            sessions=1,
        )
    )
    read = []
    scan = RecurrentBatch.scan

    def listening(self, layer, each, tokens):
        read.extend(tokens)
        return scan(self, layer, each, tokens)

    monkeypatch.setattr(RecurrentBatch, "scan", listening)
    kv = engine.kv_cache.reserve(128)
    tokens = random.Random(0).choices(range(2, VOCAB_SIZE), k=80)
    engine.forward([Segment(kv, 0, tokens[:40], range(40), keep=[])])
    memory, most = kv.memory, len(tokens) - 40

    def everything(start, rows):
        """What the scans of a pass read, and its logits."""
        read.clear()
        mask = ancestor_mask(range(-1, rows - 2)) if rows > 1 else None
        (logits,) = engine.forward(
            [Segment(kv, start, tokens[start : start + rows], range(start, start + rows), mask=mask)]
        )
        return [*read, logits]

    single = [everything(40 + row, 1) for row in range(most)]
    plain = [torch.cat(each) for each in zip(*single, strict=True)]
    for rows in range(2, most + 1):
        kv.memory = memory
        for ours, theirs in zip(everything(40, rows), plain, strict=True):
            assert torch.equal(ours, theirs[:rows]), f"{rows} rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [torch.sigmoid, silu, softplus, torch.exp, torch.log])
def test_elementwise_functions_in_16_bits_have_the_same_bits_alone(function, dtype):
    """All others in the modules of recurrent layers are in 16 bits, or of as many channels as fill vectors."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)  # a multiple of every vector
    alone = torch.cat([function(each) for each in every.split(7)])
    assert torch.equal(function(every).nan_to_num(nan=1.5), alone.nan_to_num(nan=1.5))


def test_float32_gates_have_the_same_bits_alone():
    gates = torch.randn(64 * 200, generator=torch.Generator().manual_seed(0)) * 4
    for function in (torch.sigmoid, silu, softplus):
        alone = torch.cat([rounded(function, each) for each in gates.split(3)])
        assert torch.equal(rounded(function, gates), alone)
