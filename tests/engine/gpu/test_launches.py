"""Counts the launches of rounds and of drafts' levels, which benchmarks/gpu/README.md states, on Pythia's shapes.

Meta tensors have no numbers, so nothing is computed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from dynatree.engine.forward.attention import NAME
from dynatree.engine.gpu.fused_forward import FusedForward
from dynatree.engine.gpu.levels import LEVELS, RowLevelRunner
from dynatree.engine.gpu.row_runner import RowForward
from dynatree.engine.gpu.rows import RowSizes
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from tests.support.launches import Launches


def launches(function: Any) -> int:
    with Launches() as mode:
        function()
    count: int = mode.count
    return count


def on_meta(hidden: int, layers: int, heads: int) -> tuple[FusedForward, KVCache]:
    meta = torch.device("meta")
    config = GPTNeoXConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden
    )
    with meta:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.bfloat16)
    return FusedForward(model), KVCache(
        KVShape(layers, heads, hidden // heads), 3000, torch.bfloat16, meta, read_beyond=1
    )


@torch.no_grad()  # in inference mode, casts count as views
def test_a_targets_round_is_one_of_two_graphs() -> None:
    forward, kv_cache = on_meta(2560, 32, 32)
    rows = RowForward(forward, kv_cache, RowSizes(64, 16, 16), 2304, None, decides=True)
    assert launches(rows.run) == 32 * 9 + 5
    assert launches(rows._decided) == 32 * 9 + 10


@pytest.mark.long
@torch.no_grad()
def test_a_draft_has_a_graph_for_each_depth_alone_and_together() -> None:
    forward, kv_cache = on_meta(512, 6, 8)
    calls = RowLevelRunner(forward, kv_cache, 16, 16, 2304, None)._calls
    assert [call.sizes.levels for call in calls] == [*LEVELS, *LEVELS]
    counts = [launches(call._all_levels) for call in calls]
    assert counts == [78 + 76 * levels for levels in (*LEVELS, *LEVELS)]
