"""Tests the kernel of a mixture's experts against transformers' experts, and for equal bits of a row in any company."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.native_experts import NativeExperts, is_fused, matrix, native_experts, weights_in
from dynatree.engine.cpu.native_linear import PANEL, NativeLinear
from dynatree.engine.cpu.native_program import program_of
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.cpu.packing import pack
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.loading import load_engine
from dynatree.engine.model.size import step_bytes_of
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.quantized.layers import bytes_of, check_groups, quantize
from dynatree.engine.settings import ModelSettings
from dynatree.engine.weights.quantized_weight import rounded
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import MIXTURES, save_random_model

pytestmark = compiled
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ERRORS = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}  # relative to the largest number
EXPERTS, CHOSEN, HIDDEN = 12, 3, 192


def random_experts(dtype):
    """Experts of transformers with random weights."""
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=128, num_experts=EXPERTS)
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config).to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for weights in experts.parameters():
        weights.copy_(torch.randn(weights.shape, generator=generator) * weights.shape[-1] ** -0.5)
    return experts


def native(experts):
    return NativeExperts(*(NativeLinear(matrix(each), None) for each in weights_in(experts)), experts=EXPERTS)


def random_rows(count, dtype):
    generator = torch.Generator().manual_seed(count)
    chosen = torch.rand(count, EXPERTS, generator=generator).topk(CHOSEN).indices
    weights = torch.rand(count, CHOSEN, generator=generator).to(dtype)
    return torch.randn(count, HIDDEN, generator=generator).to(dtype), chosen, weights


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_computes_transformers_experts(dtype):
    experts = random_experts(dtype)
    exact, ours = random_experts(dtype).double(), native(experts)
    for count in (0, 1, 2, 7, 40, 300):
        rows, chosen, weights = random_rows(count, dtype)
        output, wanted = ours(rows, chosen, weights), exact(rows.double(), chosen, weights.double())
        assert (output.dtype, output.shape) == (dtype, rows.shape)
        assert not count or (output - wanted).abs().max() <= ERRORS[dtype] * wanted.abs().max(), count


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_computes_the_experts_of_gpt_oss(dtype):
    """Their limit is within the values' spread."""
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=128, num_local_experts=EXPERTS, swiglu_limit=0.7, swiglu_alpha=1.3
    )
    config._experts_implementation = "eager"
    experts, generator = GptOssExperts(config).requires_grad_(False), torch.Generator().manual_seed(0)
    for weights in experts.parameters():
        weights.copy_(torch.randn(weights.shape, generator=generator) * HIDDEN**-0.5)
    ours = native_experts(experts.to(dtype))
    exact = experts.double()
    for count in (1, 2, 40):
        rows, chosen, weights = random_rows(count, dtype)
        output, wanted = ours(rows, chosen, weights), exact(rows.double(), chosen, weights.double())
        assert (output - wanted).abs().max() <= ERRORS[dtype] * wanted.abs().max(), count


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype, bits):
    experts = native(random_experts(dtype))
    if bits < 16:
        matrices = (rounded(matrix(each), bits, 32) for each in weights_in(random_experts(dtype)))
        experts = NativeExperts(*(QuantizedLinear(each, None, dtype) for each in matrices), experts=EXPERTS)
    given = random_rows(60, dtype)
    alone = torch.cat([experts(*(each[row : row + 1] for each in given)) for row in range(60)])
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    for each in (order, order[:2], order[:9], order[9:], order[:1].expand(50)):
        assert torch.equal(experts(*(part[each] for part in given)), alone[each])


def test_an_expert_that_is_not_there_is_refused():
    experts = native(random_experts(torch.float32))
    rows, chosen, weights = random_rows(2, torch.float32)
    for other in (-1, EXPERTS):
        chosen[1, 0] = other
        with pytest.raises(IndexError, match="an expert is not in"):
            experts(rows, chosen, weights)


def test_experts_of_other_forms_stay_as_they_are():
    experts = random_experts(torch.float32)
    assert is_fused(experts)
    experts.has_bias = True
    assert not is_fused(experts)
    model = torch.nn.ModuleList([experts])
    with pytest.raises(
        StartupError, match="the experts of its layers have a form that is not rounded; leave the option out"
    ):
        check_groups(model, 8)


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_is_served_by_the_kernel(tmp_path, architecture, weights):
    folder = save_random_model(tmp_path / "model", architecture, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = load_engine(ModelSettings(str(folder), weights=weights, sessions=1))
    assert isinstance(engine.runner, NativeRunner)
    assert sum(isinstance(each, NativeExperts) for each in engine.model.modules()) == 3
    plan = skeleton(model.config, torch.float32)
    if weights == "int8":
        layers = [each for each in engine.model.modules() if isinstance(each, QuantizedLinear)]
        held = sum(each.weight.nbytes * each.out_features // (len(each.weight) * PANEL) for each in layers)
        held += sum(each.out_features * each.bias.itemsize for each in layers if each.bias is not None)
        rest = sum(each.nbytes for each in engine.model.parameters())
        assert bytes_of(plan, 8, plan.get_output_embeddings()) == held + rest
        quantize(model, 8, torch.float32, native=False)
    else:
        idle = 1 - model.config.num_experts_per_tok / model.model.layers[0].mlp.experts.num_experts
        experts = sum(each.nbytes for layer in model.model.layers for each in weights_in(layer.mlp.experts))
        every = sum(each.nbytes for each in model.parameters()) - model.model.embed_tokens.weight.nbytes
        assert engine.info.step_bytes == step_bytes_of(engine.model) == every - int(experts * idle)
    tokens = list(range(40))
    kv = engine.kv_cache.reserve(40)
    with torch.inference_mode():
        (ours,) = engine.forward([Segment(kv, 0, tokens, range(40))])
        theirs = model(torch.tensor([tokens])).logits[0]
    allowed = 1e-5 if weights == "auto" else 0.1
    assert (ours - theirs).square().mean().sqrt() < allowed * theirs.std()


@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_rounded_mixture_has_the_same_bits_in_any_company_and_build(
    tmp_path, architecture, dtype, weights, on_each_build
):
    folder = save_random_model(tmp_path / "model", architecture, seed=3)
    engine = load_engine(ModelSettings(str(folder), dtype=dtype, weights=weights, sessions=1))
    assert isinstance(engine.runner, NativeRunner)
    kv, tokens = engine.kv_cache.reserve(40), [*range(40)]

    def read(cuts):
        pieces = zip((0, *cuts), (*cuts, 40), strict=True)
        return torch.cat([engine.forward([Segment(kv, a, tokens[a:b], range(a, b))])[0] for a, b in pieces])

    def whole():
        logits = read(())
        assert torch.equal(read((1, 3, 20)), logits)
        return logits

    found = on_each_build(whole)
    same = [logits for name, logits in found.items() if dtype != "bfloat16" or "bf16" not in name]
    assert all(torch.equal(each, same[0]) for each in same)  # the router multiplies in the activations' dtype


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(("experts", "chosen"), [(4, 2), (8, 8), (60, 4), (128, 8), (100, 17), (5, 3)])
def test_a_program_chooses_as_torch_does_between_equal_logits(tmp_path, experts, chosen):
    """Each expert's router is one of few rows, so that many experts have equal logits."""
    changes = {"num_experts": experts, "num_experts_per_tok": chosen, "num_hidden_layers": 1}
    folder = save_random_model(tmp_path / "model", "qwen3_moe", seed=3, **changes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    router = model.model.layers[0].mlp.gate
    generator = torch.Generator().manual_seed(0)
    # small integers times a power of two: sums of a few of them are exact
    kinds = torch.zeros(3, router.hidden_dim)
    kinds[range(3), range(3)] = 1.0
    with torch.inference_mode():
        router.weight.copy_(kinds[torch.randint(3, (experts,), generator=generator)])
        tokens = torch.randint(2000, (1, 100), generator=generator)
        expected = model(tokens).logits[0]
        pack(model, native=True)
        program = program_of(model)
        cache = KVCache(KVShape(1, program.shape.kv_heads, program.shape.dim), 100, model.dtype, torch.device("cpu"))
        (logits,) = NativeRunner(program, cache).run([Segment(KVRange(0, 100), 0, tokens[0].tolist(), range(100))])
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("experts", "chosen"), [(40, 18), (64, 1), (128, 2)])
def test_choices_that_torch_makes_by_other_steps_have_no_program(experts, chosen):
    config = Qwen3MoeConfig(
        vocab_size=9,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=64,
        num_experts=experts,
        num_experts_per_tok=chosen,
    )
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    pack(model, native=True)
    assert program_of(model) is None
