"""Tests that a model's program computes what transformers' modules compute, with equal bits in any company."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig

from dynatree.engine.cpu import native
from dynatree.engine.cpu.native_program import program_of
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.cpu.packing import pack
from dynatree.engine.forward.eager import EagerRunner
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.kv.locality import GLOBAL, Locality
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import ARCHITECTURES, MIXTURES, VOCAB_SIZE, save_random_model

pytestmark = [compiled, pytest.mark.usefixtures("without_amx")]
FAMILIES = tuple(each for each in (*ARCHITECTURES, *MIXTURES) if each != "gpt2")
TOKENS = torch.randint(2, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(0)).tolist()


def load(folder, dtype="float32"):
    engine = load_engine(ModelSettings(str(folder), dtype=dtype, sessions=1))
    assert isinstance(engine.runner, NativeRunner)
    return engine


@torch.inference_mode()
def logits_of_transformers(folder):
    return AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([TOKENS])).logits[0]


@pytest.fixture(scope="module")
def logits_of_families():
    """The logits of transformers for each family, which all builds are compared with."""
    return {}


def check_logits(folder, tolerance=1e-4, expected=None):
    """Check a prompt in two pieces against transformers' own attention and modules."""
    expected = logits_of_transformers(folder) if expected is None else expected
    engine = load(folder)
    kv = KVRange(0, 150)
    got = [
        *engine.forward([Segment(kv, 0, TOKENS[:60], range(60), keep=[3, 59])]),
        *engine.forward([Segment(kv, 60, TOKENS[60:], range(60, 90))]),
    ]
    assert (torch.cat(got) - expected[[3, 59, *range(60, 90)]]).abs().max() < tolerance


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, tmp_path, logits_of_families):
    folder = save_random_model(tmp_path / "model", family, seed=2)
    if family not in logits_of_families:
        logits_of_families[family] = logits_of_transformers(folder)
    check_logits(folder, expected=logits_of_families[family])


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "relu"])
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_every_activation(family, activation, tmp_path):
    check_logits(save_random_model(tmp_path / "model", family, seed=2, hidden_act=activation))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_neox", {"attention_bias": False}),
        ("gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 22, "num_key_value_heads": 4}),
        ("llama", {"tie_word_embeddings": True, "intermediate_size": 130}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
        ("qwen3", {"attention_bias": True, "head_dim": 22, "num_key_value_heads": 4}),
        ("gemma", {"hidden_size": 70, "tie_word_embeddings": True}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True, "no_rope_layers": [0, 0, 0]}),
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [1], "num_experts": 100}),
        ("olmoe", {"norm_topk_prob": True, "num_experts_per_tok": 8}),
        ("qwen2_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "qkv_bias": False}),
        ("mixtral", {"num_local_experts": 40, "num_experts_per_tok": 16}),
    ],
)
def test_variants_of_a_family(family, changes, tmp_path):
    check_logits(save_random_model(tmp_path / "model", family, seed=4, **changes))


def test_mistral_is_written_as_llama_is(tmp_path):
    folder = save_random_model(tmp_path / "model", "llama", seed=4)
    values = LlamaConfig.from_pretrained(folder).to_dict()
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = MistralConfig(**{k: v for k, v in values.items() if k not in ("model_type", "architectures")})
    config.sliding_window = None
    other = AutoModelForCausalLM.from_config(config)
    other.load_state_dict(model.state_dict())
    other.save_pretrained(folder)
    check_logits(folder)


def model_with_windows(family, dtype="float32", **changes):
    """Return a random model in which some layers see 16 tokens; its norms' weights are random, too."""
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=160,
        sliding_window=16,
        initializer_range=0.06,
        pad_token_id=0,
        **changes,
    )
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 or name.endswith("_bias"):
            weight.normal_(mean=0.0 if "gemma" in family else 1.0, std=0.3)
    return model


GPT_OSS = {"head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 1.5}


def runner_with_windows(model):
    """Return a runner of the model's program, whose KV cache has the configuration's windows."""
    pack(model, True, ())
    program, kinds = program_of(model), getattr(model.config, "layer_types", ["sliding_attention"] * 3)
    window = {"sliding_attention": Locality(window=16), "full_attention": GLOBAL}
    shape = KVShape(3, program.shape.kv_heads, program.shape.dim, tuple(window[kind] for kind in kinds))
    return NativeRunner(program, KVCache(shape, 200, model.dtype, torch.device("cpu")))


KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LATER_GEMMAS = [
    ("gemma2", KINDS | {"head_dim": 24, "query_pre_attn_scalar": 40, "final_logit_softcapping": 2.0}),
    ("gemma2", KINDS | {"head_dim": 22, "attn_logit_softcapping": 0.5, "final_logit_softcapping": None}),
    ("gemma3_text", KINDS | {"head_dim": 24, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 0.1}),
    ("gemma3_text", KINDS | {"head_dim": 22, "final_logit_softcapping": 2.0, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"final_logit_softcapping": 0.1, "hidden_activation": "relu"}),  # keys that the family ignores
        ("phi3", {}),
        ("qwen2", KINDS | {"use_sliding_window": True}),
        ("gpt_oss", KINDS | GPT_OSS),
        *LATER_GEMMAS,
    ],
)
def test_windows_and_caps_are_those_of_transformers(family, changes):
    model = model_with_windows(family, **changes)
    expected = model(torch.tensor([TOKENS])).logits[0]
    runner, kv = runner_with_windows(model), KVRange(11, 100)
    got = [
        runner.run([Segment(kv, start, TOKENS[start:stop], range(start, stop))]) for start, stop in ((0, 60), (60, 90))
    ]
    assert (torch.cat([*got[0], *got[1]]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("family", "changes"), [*LATER_GEMMAS[::2], ("gpt_oss", KINDS | GPT_OSS)])
def test_windows_and_caps_give_equal_bits(family, changes, dtype, on_each_build):
    """A prompt has the same bits in any pieces, and in all builds without pairs."""
    runner = runner_with_windows(model_with_windows(family, dtype, **changes))

    def read(cuts):
        pieces = zip((0, *cuts), (*cuts, 90), strict=True)
        return torch.cat([runner.run([Segment(KVRange(3, 99), a, TOKENS[a:b], range(a, b))])[0] for a, b in pieces])

    def whole():
        logits = read(())
        assert torch.equal(read((7, 20, 21, 85)), logits)
        return logits

    found = on_each_build(whole)
    plain = [logits for name, logits in found.items() if dtype != "bfloat16" or "bf16" not in name]
    assert all(torch.equal(each, plain[0]) for each in plain)


@pytest.mark.parametrize("changes", [{"use_bidirectional_attention": True}, {"hidden_activation": "tanh"}])
def test_a_later_gemma_without_a_program(changes):
    model = model_with_windows("gemma3_text", **KINDS, **changes)
    pack(model, True, ())
    assert program_of(model) is None


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_act": "tanh"}),
        ("phi3", {"intermediate_size": 130}),
        ("qwen3_moe", {"hidden_act": "gelu"}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 96}),
        ("olmoe", {"clip_qkv": 1.0}),
    ],
)
def test_what_has_no_program_goes_through_transformers_modules(family, changes, tmp_path):
    folder = save_random_model(tmp_path / "model", family, seed=4, **changes)
    engine = load_engine(ModelSettings(str(folder), sessions=1))
    assert isinstance(engine.runner, EagerRunner)


def in_company():
    """Each family with each dtype and build; `make test` runs all pairs of two of the three."""
    for place, family in enumerate(("gpt_neox", "llama", "qwen3", "gemma", "phi3", "smollm3", *MIXTURES)):
        for number, dtype in enumerate(("float32", "bfloat16", "float16")):
            for build, name in enumerate(("kernels_avx2.so", "kernels_avx512.so", "kernels_avx512_bf16.so")):
                marks = pytest.mark.long if (place + number + build) % 3 else ()
                yield pytest.param(name, family, dtype, marks=marks)


@pytest.mark.parametrize(("build", "family", "dtype"), [*in_company()], indirect=["build"])
def test_a_token_has_the_same_bits_in_any_company(build, family, dtype, tmp_path):
    engine = load(save_random_model(tmp_path / "model", family, seed=2), dtype)
    one, other = engine.kv_cache.reserve(100), engine.kv_cache.reserve(100)

    def prompt(kv, cuts):
        pieces = zip((0, *cuts), (*cuts, 60), strict=True)
        return torch.cat([engine.forward([Segment(kv, a, TOKENS[a:b], range(a, b))])[0] for a, b in pieces if b > a])

    whole = prompt(one, ())
    assert torch.equal(prompt(other, range(1, 60)), whole)
    assert torch.equal(prompt(other, (7, 20, 21)), whole)
    mask = torch.eye(30, dtype=torch.bool)
    children = [Segment(one, 60, TOKENS[60:], [60] * 30, mask)]
    beside = [Segment(other, 60, TOKENS[:5], range(60, 65)), *children]
    (alone,) = engine.forward(children)
    assert torch.equal(engine.forward(beside)[1], alone)
    for index in (0, 13, 29):
        assert torch.equal(engine.forward([Segment(one, 60, [TOKENS[60 + index]], [60])])[0][0], alone[index])


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this CPU has no AVX-512")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_neox", {"hidden_act": "gelu"}),
        ("gpt_neox", {"hidden_size": 70, "num_attention_heads": 1, "hidden_act": "gelu_new"}),
        ("llama", {"hidden_size": 92, "head_dim": 22, "num_key_value_heads": 4, "intermediate_size": 130}),
        ("qwen2", {"hidden_size": 36, "num_attention_heads": 3, "hidden_act": "relu"}),
        ("qwen3", {"head_dim": 22}),
        ("gemma", {"hidden_size": 70}),
        ("qwen2_moe", {"hidden_size": 192, "num_experts": 21}),
    ],
)
def test_builds_without_pairs_give_equal_bits(family, changes, dtype, tmp_path, monkeypatch):
    """AVX2's vectors are half as wide, yet replicas on both kinds of CPU give the same tokens."""
    engine = load(save_random_model(tmp_path / "model", family, seed=7, **changes), dtype)
    mask = torch.eye(30, dtype=torch.bool)
    outputs = []
    for build in ("kernels_avx2.so", "kernels_avx512.so"):
        monkeypatch.setattr(native, "builds", lambda build=build: [build])
        native.kernels.cache_clear()
        prompt = engine.forward([Segment(KVRange(0, 150), 0, TOKENS[:60], range(60))])
        tree = engine.forward([Segment(KVRange(0, 150), 60, TOKENS[60:], [60] * 30, mask)])
        outputs.append(torch.cat([*prompt, *tree]))
    native.kernels.cache_clear()
    assert torch.equal(*outputs)


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="this CPU has no pairs of bfloat16")
def test_targets_of_equal_bits_have_one_fingerprint(tmp_path, monkeypatch):
    """Compared are three builds, torch's kernels, and a family whose small operations are torch's."""
    paths = {name: save_random_model(tmp_path / name, name, seed=1) for name in ("llama", "gpt2")}

    def told(build, family, dtype):
        monkeypatch.setattr(native, "builds", lambda: [build])
        native.kernels.cache_clear()
        return load_engine(ModelSettings(str(paths[family]), dtype=dtype, sessions=1)).info

    avx2, avx512, pairs, none = (f"kernels_{name}.so" for name in ("avx2", "avx512", "avx512_bf16", "none"))
    plain = told(avx2, "llama", "float32")
    assert plain.numerics == "x86 kernels"
    assert plain.same_tokens(told(avx512, "llama", "float32"))
    assert plain.same_tokens(told(pairs, "llama", "float32"))
    assert not plain.same_tokens(told(none, "llama", "float32"))
    half = told(avx2, "llama", "bfloat16")
    assert half.same_tokens(told(avx512, "llama", "bfloat16"))
    other = told(pairs, "llama", "bfloat16")
    assert not half.same_tokens(other)
    assert other.numerics == "x86 kernels with bfloat16 pairs"
    mixed = told(avx512, "gpt2", "float32")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not mixed.same_tokens(told(avx512, "gpt2", "float32"))
    assert plain.same_tokens(told(avx512, "llama", "float32"))
    native.kernels.cache_clear()


def test_positions_beyond_those_seen_so_far(tmp_path):
    folder = save_random_model(tmp_path / "model", "llama", seed=4, max_position_embeddings=2000)
    engine = load(folder)
    (got,) = engine.forward([Segment(KVRange(0, 3), 0, TOKENS[:3], [5, 1200, 1700])])
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder)
        expected = model(torch.tensor([TOKENS[:3]]), position_ids=torch.tensor([[5, 1200, 1700]])).logits[0]
    assert (got - expected).abs().max() < 1e-4


def test_logits_outlive_the_next_forward(tmp_path):
    engine = load(save_random_model(tmp_path / "model", "llama", seed=4))
    (first,) = engine.forward([Segment(KVRange(0, 9), 0, TOKENS[:3], range(3))])
    copy = first.clone()
    engine.forward([Segment(KVRange(0, 9), 3, TOKENS[3:9], range(3, 9))])
    assert torch.equal(first, copy)


def test_more_logits_than_tokens(tmp_path):
    engine = load(save_random_model(tmp_path / "model", "llama", seed=4), "float16")
    (logits,) = engine.forward([Segment(KVRange(0, 9), 0, TOKENS[:2], range(2), keep=[1] * 500)])
    assert torch.equal(logits, logits[:1].expand(500, -1))
