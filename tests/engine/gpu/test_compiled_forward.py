"""Tests that torch.compile takes a forward pass over rows whole, which benchmarks/gpu compares with the fused one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dynatree.engine.forward.attention import NAME
from dynatree.engine.forward.flat_forward import FlatForward
from dynatree.engine.forward.segment import Segment
from dynatree.engine.gpu.row_runner import RowForward
from dynatree.engine.gpu.rows import RowSizes
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from tests.support.model_zoo import save_random_model


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
@torch.inference_mode()
def test_logits_keys_and_values_are_those_of_the_modules(tmp_path: Path, family: str) -> None:
    folder = save_random_model(tmp_path / "model", family, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME, dtype=torch.float32).eval()
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    shape = KVShape(config.num_hidden_layers, kv_heads, config.hidden_size // config.num_attention_heads)
    flat = FlatForward(model, shape)
    compiled = torch.compile(flat.__call__, dynamic=False, fullgraph=True, backend="aot_eager")
    found = []
    for forward in (flat, compiled):
        kv_cache = KVCache(shape, 300, torch.float32, torch.device("cpu"), read_beyond=1)
        kv = kv_cache.reserve(64)
        assert kv is not None
        rows = RowForward(forward, kv_cache, RowSizes(32, 16, 4), 160, None, decides=True)
        segments = [Segment(kv, 0, range(3, 23), range(20))]
        [pieces] = rows.sizes.cut(segments)
        rows.buffers.fill(segments, pieces)
        found.append((rows.run().clone(), kv_cache.slots(kv, 20).clone()))
    assert all(map(torch.equal, *found))
    assert found[0][1].any()
