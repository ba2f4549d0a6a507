"""Tests forward passes with fused kernels, in Triton's interpreter, against transformers' modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dynatree.engine.forward.attention import NAME
from dynatree.engine.forward.flat_forward import FlatForward
from dynatree.engine.forward.scores import Scores
from dynatree.engine.gpu.fused_forward import FAMILIES, FusedForward, can_fuse
from tests.support.kernel_builds import needs_triton
from tests.support.model_zoo import save_random_model

needs_triton()

ROWS = 6
FAMILY_MODELS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "gpt_neox_sequential": {},
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "qwen2": {"layer_types": ["full_attention"] * 2},
}


class Causal:
    """Attention over the rows themselves; implements `Attending`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        group = query.shape[0] // key.shape[0]
        key, value = (each.repeat_interleave(group, 0) for each in (key, value))
        products = (query @ key.transpose(1, 2)).float() * (scores.scale or query.shape[-1] ** -0.5)
        unseen = torch.ones(products.shape[1:], dtype=torch.bool).triu(1)
        weights = products.masked_fill(unseen, -torch.inf).softmax(-1).to(value.dtype)
        return (weights @ value).transpose(0, 1)


@pytest.fixture(name="model", params=FAMILY_MODELS)
def model_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    name = request.param.removesuffix(" with biases")
    folder = save_random_model(tmp_path / "model", name, seed=3, num_hidden_layers=2, **FAMILY_MODELS[request.param])
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME, dtype=torch.float32).eval()


@torch.inference_mode()
def test_logits_are_those_of_the_modules(model: Any) -> None:
    for each in model.parameters():  # also of norms and biases
        each += 0.1 * torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel()))
    assert can_fuse(model)
    tokens = torch.tensor([[5, 9, 1000, 7, 7, 2]])
    positions = torch.tensor([[0, 1, 2, 60, 61, 159]])
    fused, plain = FusedForward(model), FlatForward(model, None)
    assert fused.vocab_size == plain.vocab_size == 2048
    expected = plain(tokens, positions, Causal())
    torch.testing.assert_close(fused(tokens, positions, Causal()), expected, rtol=1e-4, atol=1e-4)
    keep = torch.tensor([4, 1])
    torch.testing.assert_close(fused(tokens, positions, Causal(), keep), expected[keep], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_row_has_equal_bits_beside_any_others(model: Any) -> None:
    fused = FusedForward(model)
    tokens = torch.tensor([[5, 9, 1000, 7, 8, 2]])
    positions = torch.arange(ROWS)[None]

    class Itself(Causal):
        def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
            return (query + value.repeat_interleave(query.shape[0] // key.shape[0], 0)).transpose(0, 1)

    order = [3, 0, 5, 1, 4, 2]
    straight = fused(tokens, positions, Itself())
    assert torch.equal(fused(tokens[:, order], positions[:, order], Itself()), straight[order])


def test_other_families_and_parts_are_left_to_their_modules(model: Any) -> None:
    assert set(FAMILIES) >= {model.config.model_type}
    model.config.hidden_act = "quick_gelu"
    assert not can_fuse(model)
    model.config.hidden_act, model.config.model_type = "gelu", "gpt2"
    assert not can_fuse(model)
