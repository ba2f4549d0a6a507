"""The probe: trees of two sessions in one forward pass, compared with the model's own attention over each branch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from dynatree.common.engine.arena import KVArena, KVShape
from dynatree.common.engine.attention import NAME
from dynatree.common.engine.segment import Segment
from dynatree.common.engine.small_model import CONTEXT_LENGTH, small_model
from dynatree.common.engine.support import record_kv_shape
from dynatree.common.errors import StartupError

# Tokens before each session's tree, whose root is the last one. A loaded model is probed by few rows, which are one
# forward pass however many it takes; a small model by more than any span of its configuration.
FEW = (4, 12)
MANY = (100, 130)
BRANCHES = ((4, 6), (5, 7))  # below each root: two branches of two tokens
_BRANCH = len(BRANCHES[0])
# Of the largest logit, in units of the dtype's rounding. Right models differ by 1 to 43 in float32 and by 1 to 6 in 16
# bits: small ones with random weights, and SmolLM2-135M-Instruct. Wrong ones differ by 100 and more in bfloat16.
ALLOWED = {torch.float32: 200.0, torch.bfloat16: 16.0, torch.float16: 16.0}
# In one of these a small model's outputs must agree: near-ties of a router may round to other experts.
SEEDS = (0, 1, 2)

_SERVED: set[Any] = set()  # configurations that were checked in this process, as `check_computation` was called

Prefixes = Sequence[Sequence[int]]
Plain = Callable[[PreTrainedModel, Prefixes, str], list[Tensor]]


class Probed(Protocol):
    """What computes forward passes of a model over an arena: an `Engine`, or a small model's."""

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        ...

    @property
    def arena(self) -> KVArena:
        """On which no session is open."""
        ...

    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """As `Engine.forward`."""
        ...


def check_outputs(probed: Probed, context_length: int, plain: Plain | None = None) -> None:
    """Compare branching trees of sessions that share their passes with the model's own attention over each branch.

    It catches what a model does not ask of its attention function: recurrent state, convolutions over neighbours,
    positions that are not taken from `position_ids`, kernels that compute another model.

    Args:
        probed: On whose arena no session is open.
        context_length: Tokens of the longest sequence that is served.
        plain: `plain_logits`, where more than this process computes them.

    Raises:
        StartupError: The two differ by more than rounding.
    """
    plain = plain or plain_logits
    prefixes = _prefixes(FEW, context_length, probed)
    theirs = plain(probed.model, prefixes, "eager")
    error, allowed = _error(probed, prefixes, theirs)
    if not error <= allowed:  # near-ties of a router may round to other experts, in transformers' attentions too
        allowed += 2.0 * _rounding(probed.model, prefixes, theirs, plain)
    _check(probed.model, error, allowed)


def check_computation(
    config: PretrainedConfig, context_length: int, probed: Callable[[PreTrainedModel, KVShape, int], Probed]
) -> None:
    """Refuse a configuration of which a small float32 model cannot be served exactly.

    The small model is probed behind more tokens than any window, chunk or number of selected keys that it has. So a
    family is known before its weights are loaded, whatever their dtype.

    Args:
        config: Of the model.
        context_length: Tokens of the longest sequence that is served.
        probed: Makes what computes a small model's forward passes, of its KV shape, over sequences of so many tokens.

    Raises:
        StartupError: It cannot, or no small model can be made.
    """
    key = (config.to_json_string(use_diff=False), context_length, probed)
    if key in _SERVED:
        return
    served = min(context_length, CONTEXT_LENGTH)
    for seed in SEEDS:
        try:
            model = small_model(config, context_length, seed)
        except ValueError as failure:
            raise StartupError(str(failure)) from failure
        small = probed(model, _recorded(config, model, context_length), served)
        prefixes = _prefixes(MANY, served, small)
        error, allowed = _error(small, prefixes, plain_logits(model, prefixes, "eager"))
        if error <= allowed:
            break
    _check(model, error, allowed)
    _SERVED.add(key)


def _recorded(config: PretrainedConfig, small: PreTrainedModel, context_length: int) -> KVShape:
    """The KV shape of a small model; a refusal has the numbers of the real configuration."""
    try:
        return record_kv_shape(small, context_length)
    except StartupError:
        record_kv_shape(small_model(config, 0, SEEDS[0]), context_length)  # no span is shorter than no context
        raise


def plain_logits(model: PreTrainedModel, prefixes: Prefixes, implementation: str) -> list[Tensor]:
    """Of each session the logits of its prefix and tree, from each branch by itself, by the model's own attention.

    Args:
        model: Loaded to call the registered attention function.
        prefixes: Of each session.
        implementation: Of attention, by its name in transformers.

    Returns:
        Of each session, float32 `[branches, prefix and branch, vocabulary]`.
    """
    model.set_attn_implementation(implementation)
    try:
        logits = [
            model(
                torch.tensor([[*prefix, *branch] for branch in BRANCHES], device=model.device), use_cache=False
            ).logits
            for prefix in prefixes
        ]
    finally:
        model.set_attn_implementation(NAME)
    return [each.float() for each in logits]


def _check(model: PreTrainedModel, error: float, allowed: float) -> None:
    if not error <= allowed:
        raise StartupError(
            f"{model.config.model_type} gives other logits under tree attention than by itself "
            f"(difference {error:.2g}, at most {allowed:.2g} is rounding)"
        )


def _error(probed: Probed, prefixes: Prefixes, theirs: Sequence[Tensor]) -> tuple[float, float]:
    """The largest difference from the model's own logits, and what its dtype's rounding explains."""
    largest = max(each[each.isfinite()].abs().max().item() for each in theirs)
    dtype = probed.model.dtype
    return _difference(_tree_logits(probed, prefixes), theirs), ALLOWED[dtype] * torch.finfo(dtype).eps * largest


def _prefixes(lengths: Sequence[int], context_length: int, probed: Probed) -> Prefixes:
    """Tokens of the sessions that are probed: of as many as the arena has room for, each within the context."""
    chooser = random.Random(0)
    vocab_size = min(probed.model.config.get_text_config().vocab_size, 1000)
    slots = probed.arena.size
    prefixes: list[list[int]] = []
    for length in lengths:
        length = max(min(length, context_length - _BRANCH), 1)
        slots -= length + _BRANCH * len(BRANCHES)
        if slots >= 0 or not prefixes:
            prefixes.append([chooser.randrange(vocab_size) for _ in range(length)])
    return prefixes


def _tree_logits(probed: Probed, prefixes: Prefixes) -> list[Tensor]:
    """The same logits as `plain_logits`, from one pass over all prefixes and one over all trees."""
    (a, b), (c, d) = BRANCHES
    # the root, then level by level; a token sees the root, the tokens above it and itself
    mask = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool
    )
    ranges = []
    try:
        for prefix in prefixes:
            kv = probed.arena.reserve(len(prefix) + sum(map(len, BRANCHES)))
            assert kv is not None, "there is room for these prefixes"
            ranges.append(kv)
        before, trees = [], []
        for kv, prefix in zip(ranges, prefixes, strict=True):
            root = len(prefix) - 1
            before.append(Segment(kv, 0, prefix[:root], range(root)))
            positions = [root, root + 1, root + 1, root + 2, root + 2]
            trees.append(Segment(kv, root, [prefix[root], a, c, b, d], positions, mask=mask))
        filled = [each for each in before if each.token_ids]
        kept = iter(probed.forward(filled) if filled else ())
        behind = probed.forward(trees)
    finally:
        for kv in ranges:
            probed.arena.release(kv)
    logits = []
    for segment, tree in zip(before, behind, strict=True):
        prefix_rows = [next(kept)] if segment.token_ids else []
        logits.append(torch.stack([torch.cat([*prefix_rows, tree[rows]]).float() for rows in ([0, 1, 3], [0, 2, 4])]))
    return logits


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest between two sessions' logits; infinite where one side alone has a number."""
    largest = 0.0
    for our, their in zip(ours, theirs, strict=True):
        finite = their.isfinite()
        if not torch.equal(our[~finite], their[~finite]):  # a token that is masked by -inf is that on both sides
            return float("inf")
        largest = max(largest, (our[finite] - their[finite]).abs().nan_to_num(nan=float("inf")).max().item())
    return largest


def _rounding(model: PreTrainedModel, prefixes: Prefixes, theirs: Sequence[Tensor], plain: Plain) -> float:
    """What two attentions of transformers' own differ by; 0 where the family has one."""
    try:
        return _difference(plain(model, prefixes, "sdpa"), theirs)
    except (ValueError, ImportError):  # the family has no such attention
        return 0.0
