"""Which models can be served exactly: checks of the configuration, and a probe that compares outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from dynatree.common.engine.arena import KVShape
from dynatree.common.engine.attention import NAME
from dynatree.common.engine.engine import Engine
from dynatree.common.engine.flat_forward import FlatForward
from dynatree.common.engine.segment import Segment
from dynatree.common.errors import StartupError

# Kinds of rotary scaling whose frequencies follow the longest position so far: a speculative token would change them.
UNSTABLE_ROPE = frozenset({"dynamic", "longrope"})
# The probe: a prefix whose last token is the root, and below the root two branches of two tokens each.
PREFIX = (0, 1, 2, 3)
BRANCHES = ((4, 6), (5, 7))


def check_family(config: PretrainedConfig) -> None:
    """Refuse a family whose layers compute their attention themselves, so that no registered function reaches it.

    Asked only where loading or probing a model has failed: it explains the failure.

    Raises:
        StartupError: The family is one of these.
    """
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if family is not None and not getattr(family, "_supports_attention_backend", True):
        raise StartupError(f"{config.model_type} models do not go through transformers' attention interface")


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


class KVShapeRecorder:
    """Records the shape of each layer's keys in one forward; implements `Attending` by causal attention."""

    def __init__(self) -> None:
        self._shapes: dict[int, tuple[int, int]] = {}  # of each layer: kv_heads, head_dim

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Causal attention among the forward's own tokens; as `Attending.attend`."""
        self._shapes[layer] = (key.shape[0], key.shape[2])
        grouped = query.shape[0] != key.shape[0]
        return scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=grouped
        )[0].transpose(0, 1)

    def kv_shape(self) -> KVShape:
        """The one shape that all layers share.

        Raises:
            StartupError: No layer called the attention function, or layers differ.
        """
        if sorted(self._shapes) != list(range(len(self._shapes))) or len(set(self._shapes.values())) != 1:
            raise StartupError("its layers do not all attend in one shape through transformers' attention interface")
        kv_heads, head_dim = self._shapes[0]
        return KVShape(len(self._shapes), kv_heads, head_dim)


def record_kv_shape(model: PreTrainedModel) -> KVShape:
    """The shape of the keys and values that every layer stores, found by one forward over a few tokens.

    Raises:
        StartupError: The model cannot run on the registered attention function.
    """
    recorder = KVShapeRecorder()
    tokens = torch.tensor([PREFIX], device=model.device)
    FlatForward(model)(tokens, torch.arange(len(PREFIX), device=model.device)[None], recorder)
    return recorder.kv_shape()


def check_outputs(engine: Engine, plain: Callable[[PreTrainedModel], Tensor] | None = None) -> None:
    """Compare a branching tree in the arena with the model's own attention over each branch.

    It catches what the configuration does not show: recurrent state, convolutions over neighbours, positions that are
    not taken from `position_ids`, attention variants.

    Args:
        engine: On which no session is open.
        plain: `plain_logits`, where more than this process computes them.

    Raises:
        StartupError: The two differ by more than rounding.
    """
    ours, theirs = _tree_logits(engine), (plain or plain_logits)(engine.model)
    error = (ours - theirs).abs().max().item()
    allowed = 200 * torch.finfo(engine.model.dtype).eps * theirs.abs().max().clamp(min=1.0).item()
    if not error <= allowed:
        raise StartupError(
            f"{engine.model.config.model_type} gives other logits under tree attention than by itself "
            f"(difference {error:.2g}, at most {allowed:.2g} is rounding); it may keep recurrent state"
        )


def _tree_logits(engine: Engine) -> Tensor:
    """The logits of the root and of each branch's tokens, from one forward: float32 `[branch, 3, vocabulary]`."""
    root = len(PREFIX) - 1
    (a, b), (c, d) = BRANCHES
    # the root, then level by level; a token sees the root, the tokens above it and itself
    mask = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool
    )
    kv = engine.arena.reserve(root + 1 + sum(map(len, BRANCHES)))
    assert kv is not None, "probed before any session is open"
    try:
        engine.forward([Segment(kv, 0, PREFIX[:root], range(root), keep=[])])
        positions = [root, root + 1, root + 1, root + 2, root + 2]
        (logits,) = engine.forward([Segment(kv, root, [PREFIX[root], a, c, b, d], positions, mask=mask)])
    finally:
        engine.arena.release(kv)
    return torch.stack([logits[[0, 1, 3]], logits[[0, 2, 4]]]).float()


def plain_logits(model: PreTrainedModel) -> Tensor:
    """The logits of the probe's tokens from each branch by itself, by the model's own eager attention."""
    sequences = torch.tensor([[*PREFIX, *branch] for branch in BRANCHES], device=model.device)
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(sequences, use_cache=False).logits
    finally:
        model.set_attn_implementation(NAME)
    return logits[:, len(PREFIX) - 1 :].float()
