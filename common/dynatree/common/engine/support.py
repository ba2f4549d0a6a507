"""Which models can be served exactly: what the configuration rules out, and a probe that compares real outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from dynatree.common.engine.attention import NAME, Recorder, Segment
from dynatree.common.engine.tree_mask import ancestor_mask
from dynatree.common.errors import StartupError
from dynatree.common.tree import TokenTree

if TYPE_CHECKING:
    from dynatree.common.engine.engine import Engine

# Their frequencies follow the longest position seen so far, so a speculative token would change committed ones.
UNSTABLE_ROPE = frozenset({"dynamic", "longrope"})
PROBE_TOKENS = 4


def check_config(config: PretrainedConfig, context_length: int) -> None:
    """Refuse what cannot be exact under tree attention, judged by the configuration alone.

    Raises:
        StartupError: An encoder-decoder, a sliding window shorter than the context, layers that are not full attention,
            or rotary frequencies that change with the sequence length.
    """
    if config.is_encoder_decoder:
        raise StartupError(f"{config.model_type} is an encoder-decoder; DynaTree serves decoder-only models")
    partial = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if partial:
        raise StartupError(f"{config.model_type} has {', '.join(partial)} layers; only full attention can be exact")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < context_length and getattr(config, "use_sliding_window", True):
        raise StartupError(f"{config.model_type} attends through a sliding window of {window} tokens")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in UNSTABLE_ROPE:
        raise StartupError(f"{config.model_type} uses {kind} rotary scaling, which depends on the sequence length")


def record_attention(model: PreTrainedModel) -> Recorder:
    """One forward of a few tokens through the registered attention function, noting what each layer stores.

    Raises:
        StartupError: The model cannot run on that function.
    """
    recorder = Recorder()
    tokens = torch.arange(PROBE_TOKENS, device=model.device)[None]
    placeholder = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
    model(
        input_ids=tokens,
        position_ids=tokens,
        attention_mask=placeholder,
        use_cache=False,
        dynatree_batch=recorder,
    )
    return recorder


def check_outputs(engine: Engine) -> None:
    """Compare a branching tree in the arena with the model's own attention over each branch.

    Catches whatever the configuration does not show: recurrent state, convolutions over neighbours, positions that are
    not taken from `position_ids`, attention variants.

    Raises:
        StartupError: The two differ by more than rounding.
    """
    prefix = list(range(PROBE_TOKENS))
    tree = TokenTree(token_ids=(4, 5, 6, 7), parents=(-1, -1, 0, 1))
    row = engine.arena.allocate()
    assert row is not None, "probed before any session is open"
    try:
        engine.forward([Segment(row, 0, prefix[:-1], range(PROBE_TOKENS - 1), keep=[])])
        root = PROBE_TOKENS - 1
        positions = [root, *(root + depth for depth in tree.depths)]
        tokens = [prefix[-1], *tree.token_ids]
        (ours,) = engine.forward([Segment(row, root, tokens, positions, mask=ancestor_mask(tree.parents))])
    finally:
        engine.arena.free(row)
    theirs = _reference(engine.model, [[*prefix, *(tree.token_ids[n] for n in tree.path(leaf))] for leaf in (2, 3)])
    ours = torch.stack([ours[[0, 1, 3]], ours[[0, 2, 4]]]).float()  # [branch, depth, vocabulary]
    error = (ours - theirs).abs().max().item()
    allowed = 200 * torch.finfo(engine.model.dtype).eps * theirs.abs().max().clamp(min=1.0).item()
    if not error <= allowed:
        raise StartupError(
            f"{engine.model.config.model_type} gives other logits under tree attention than by itself "
            f"(difference {error:.2g}, at most {allowed:.2g} is rounding); it may keep recurrent state"
        )


def _reference(model: PreTrainedModel, sequences: list[list[int]]) -> Tensor:
    """Each sequence's last logits under the model's own eager attention: float32 `[sequence, 3, vocabulary]`."""
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(torch.tensor(sequences, device=model.device), use_cache=False).logits
    finally:
        model.set_attn_implementation(NAME)
    return logits[:, PROBE_TOKENS - 1 :].float()
