"""Tests the kernel of a mixture's experts against transformers' experts, and for equal bits of a row in any company."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.native_experts import NativeExperts, is_fused, matrix, weights_in
from dynatree.engine.cpu.native_linear import NativeLinear
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.forward.segment import Segment
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
    folder = save_random_model(tmp_path / "model", architecture, seed=1, sliding_window=None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = load_engine(ModelSettings(str(folder), weights=weights, sessions=1))
    assert sum(isinstance(each, NativeExperts) for each in engine.model.modules()) == 3
    plan = skeleton(model.config, torch.float32)
    if weights == "int8":
        held = sum(each.weight.nbytes for each in engine.model.modules() if isinstance(each, QuantizedLinear))
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
