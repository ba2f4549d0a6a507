"""The probe: trees of two sessions in one forward pass, compared with the model's own attention over each branch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.forward.attention import NAME
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.recurrent.memory import KEPT
from dynatree.engine.support.families import record_kv_shape
from dynatree.engine.support.small_model import CONTEXT_LENGTH, SPAN, small_model

# Number of prompt tokens of each session; the last one is the tree's root. A loaded model is probed with few rows, so
# that any engine needs only one forward pass. A small model is probed with more tokens than any span of its config.
FEW = (4, 12)
FEW_RECURRENT = (KEPT + 8, 64 + 12)  # beyond what is kept after the states, and beyond a chunk
MANY = (100, 8 * SPAN)  # the second tree's root ends a chunk
BRANCHES = ((4, 6), (5, 7))  # below each root: two branches of two tokens
_BRANCH = len(BRANCHES[0])
# Allowed difference relative to the largest logit, in units of the dtype's epsilon. Correct models differ by 1 to 43 in
# float32 and by 1 to 6 in 16 bits (small models with random weights, and SmolLM2-135M-Instruct). Incorrect ones differ
# by 100 or more in bfloat16.
ALLOWED = {torch.float32: 200.0, torch.bfloat16: 16.0, torch.float16: 16.0}
# Quantised layers round their rows to 8 bits, so that a difference in a last bit may change a number by one in 127. In
# root mean squares, logits then differ by 4 to 8 % of their spread (SmolLM2-135M-Instruct in 4 and 8 bits). They differ
# by 18 % if one node does not see its parent, by 26 % if positions are off by one, and by 48 % if siblings are seen.
ALLOWED_QUANTIZED = 0.15
# A deep small model may amplify rounding by this factor (Gemma 3n: 3.6), if transformers' attentions differ as much.
AMPLIFIED = 4.0
# A small model's outputs must agree for one of these seeds, because near-ties of a router may round to other experts.
SEEDS = (0, 1, 2)

_SERVED: dict[Any, tuple[str, ...]] = {}  # features by the arguments of `check_computation` that passed in this process

Prefixes = Sequence[Sequence[int]]
Plain = Callable[[PreTrainedModel, Prefixes, str], list[Tensor]]


class Probed(Protocol):
    """Computes the forward passes of a model over a KV cache: an `Engine`, or a small model's `SmallEngine`."""

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        ...

    @property
    def kv_cache(self) -> KVCache:
        """The KV cache, on which no session is open."""
        ...

    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """See `Engine.forward`."""
        ...


def check_outputs(probed: Probed, context_length: int, plain: Plain | None = None) -> None:
    """Compare the trees of sessions in shared forward passes with the model's own attention over each branch.

    It detects features that bypass the attention function: recurrent state without an adapter, convolutions over
    neighbouring tokens, positions that do not come from `position_ids`, and kernels that compute a different model.

    Args:
        probed: Engine without open sessions.
        context_length: Length of the longest served sequence, in tokens.
        plain: Replacement for `plain_logits` if several processes compute it; None means `plain_logits`.

    Raises:
        StartupError: The two differ by more than rounding.
    """
    plain = plain or plain_logits
    lengths = FEW if probed.kv_cache.shape.recurrent is None else FEW_RECURRENT
    prefixes = _prefixes(lengths, context_length, probed)
    theirs = plain(probed.model, prefixes, "eager")
    error, allowed = _error(probed, prefixes, theirs)
    if not error <= allowed:  # a router's near-ties may round to other experts, even between transformers' attentions
        allowed += 2.0 * max(_rounding(probed, prefixes, theirs, plain), _sensitivity(probed, prefixes, theirs, plain))
    _check(probed.model, error, allowed)


def check_computation(
    config: PretrainedConfig, context_length: int, probed: Callable[[PreTrainedModel, KVShape, int], Probed]
) -> tuple[str, ...]:
    """Refuse a configuration if a small float32 model of it cannot be served exactly.

    The small model is probed after more tokens than any of its windows, chunks or numbers of selected keys. So the
    family is checked before the weights are loaded, regardless of their dtype.

    Args:
        config: Configuration of the model.
        context_length: Length of the longest served sequence, in tokens.
        probed: Makes the engine of a small model from the model, its KV shape, and its context length in tokens.

    Returns:
        `KVShape.features` of the model.

    Raises:
        StartupError: The small model cannot be served exactly, or no small model can be made.
    """
    values = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    key = (repr(values), context_length, probed)
    if key in _SERVED:
        return _SERVED[key]
    served = min(context_length, CONTEXT_LENGTH)
    for seed in SEEDS:
        try:
            model = small_model(config, context_length, seed)
        except ValueError as failure:
            raise StartupError(str(failure)) from failure
        shape = _recorded(config, model, context_length)
        small = probed(model, shape, served)
        prefixes = _prefixes(MANY, served, small)
        theirs = plain_logits(model, prefixes, "eager")
        error, allowed = _error(small, prefixes, theirs)
        if not error <= allowed:  # a deep model may amplify rounding, also between transformers' attentions
            allowed = min(allowed + 2.0 * _rounding(small, prefixes, theirs, plain_logits), AMPLIFIED * allowed)
        if error <= allowed:
            break
    _check(model, error, allowed)
    _SERVED[key] = shape.features
    return shape.features


def _recorded(config: PretrainedConfig, small: PreTrainedModel, context_length: int) -> KVShape:
    """Record the KV shape of a small model; a refusal names the numbers of the real configuration."""
    try:
        return record_kv_shape(small, context_length)
    except StartupError:
        record_kv_shape(small_model(config, 0, SEEDS[0]), context_length)  # a context of 0 shortens no span
        raise


def plain_logits(model: PreTrainedModel, prefixes: Prefixes, implementation: str) -> list[Tensor]:
    """Compute the logits of each session's prefix with each branch, as plain sequences with the model's own attention.

    Args:
        model: Model that was loaded to call the registered attention function.
        prefixes: Prefix of each session.
        implementation: Attention implementation, by its name in transformers.

    Returns:
        For each session, float32 `[branches, prefix and branch, vocabulary]`.
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
            f"{model.config.model_type} gives different logits under tree attention "
            f"(difference {error:.2g}; rounding explains at most {allowed:.2g})"
        )


def _error(probed: Probed, prefixes: Prefixes, theirs: Sequence[Tensor]) -> tuple[float, float]:
    """Return the largest difference from the model's own logits, and the difference that rounding explains.

    For a model with quantised layers, both are root mean squares.
    """
    if any(isinstance(module, QuantizedLinear) for module in probed.model.modules()):
        return _squared(_tree_logits(probed, prefixes), theirs)
    largest = max(each[each.isfinite()].abs().max().item() for each in theirs)
    dtype = probed.model.dtype
    return _difference(_tree_logits(probed, prefixes), theirs), ALLOWED[dtype] * torch.finfo(dtype).eps * largest


def _squared(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, float]:
    """Return the root mean square of the difference, and the allowed share of that of the logits' spread."""
    both = zip(ours, theirs, strict=True)
    pairs = [(our, their) for our, their in both if torch.equal(our.isfinite(), their.isfinite())]
    if len(pairs) < len(theirs):
        return float("inf"), 0.0
    difference = torch.cat([(our - their)[their.isfinite()] for our, their in pairs])
    spread = torch.cat([their[their.isfinite()] for _, their in pairs]).std().item()
    return difference.square().mean().sqrt().item(), ALLOWED_QUANTIZED * spread


def _prefixes(lengths: Sequence[int], context_length: int, probed: Probed) -> Prefixes:
    """Choose the prefixes of as many sessions as the KV cache has room for, each within the context."""
    chooser = random.Random(0)
    vocab_size = min(probed.model.config.get_text_config().vocab_size, 1000)
    slots = probed.kv_cache.size
    prefixes: list[list[int]] = []
    for length in lengths:
        length = max(min(length, context_length - _BRANCH), 1)
        slots -= length + _BRANCH * len(BRANCHES)
        if slots >= 0 or not prefixes:
            prefixes.append([chooser.randrange(vocab_size) for _ in range(length)])
    return prefixes


def _tree_logits(probed: Probed, prefixes: Prefixes) -> list[Tensor]:
    """Compute the logits of `plain_logits` by one forward pass over all prefixes and one over all trees."""
    (a, b), (c, d) = BRANCHES
    # the root, then level by level; a token sees the root, the tokens above it and itself
    mask = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool
    )
    ranges = []
    try:
        for prefix in prefixes:
            kv = probed.kv_cache.reserve(len(prefix) + sum(map(len, BRANCHES)))
            assert kv is not None, "there is room for these prefixes"
            ranges.append(kv)
        before = _prefix_logits(probed, ranges, prefixes)
        trees = []
        for kv, prefix in zip(ranges, prefixes, strict=True):
            root = len(prefix) - 1
            positions = [root, root + 1, root + 1, root + 2, root + 2]
            trees.append(Segment(kv, root, [prefix[root], a, c, b, d], positions, mask=mask))
        behind = probed.forward(trees)
    finally:
        for kv in ranges:
            probed.kv_cache.release(kv)
    return [
        torch.stack([torch.cat([*prefix_rows, tree[rows]]).float() for rows in ([0, 1, 3], [0, 2, 4])])
        for prefix_rows, tree in zip(before, behind, strict=True)
    ]


def _prefix_logits(probed: Probed, ranges: Sequence[KVRange], prefixes: Prefixes) -> list[list[Tensor]]:
    """Compute the logits of all prefixes up to the trees' roots, by one forward pass.

    With recurrent layers, the first prefix takes two, so that the states of both sessions are folded elsewhere.
    """
    logits: list[list[Tensor]] = [[] for _ in prefixes]
    recurs = probed.kv_cache.shape.recurrent is not None
    cuts = [[0, (len(each) - 1) // (2 if recurs and not session else 1)] for session, each in enumerate(prefixes)]
    for _ in range(1 + recurs):
        spans = [(session, start, stop) for session, (start, stop) in enumerate(cuts) if start < stop]
        pieces = [
            Segment(ranges[session], start, prefixes[session][start:stop], range(start, stop))
            for session, start, stop in spans
        ]
        for (session, _, _), rows in zip(spans, probed.forward(pieces) if pieces else (), strict=True):
            logits[session].append(rows)
        cuts = [[stop, len(each) - 1] for (_, stop), each in zip(cuts, prefixes, strict=True)]
    return logits


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference of the sessions' logits; infinite if only one side is finite somewhere."""
    largest = 0.0
    for our, their in zip(ours, theirs, strict=True):
        finite = their.isfinite()
        if not torch.equal(our[~finite], their[~finite]):  # a masked token (-inf) must be masked on both sides
            return float("inf")
        largest = max(largest, (our[finite] - their[finite]).abs().nan_to_num(nan=float("inf")).max().item())
    return largest


def _sensitivity(probed: Probed, prefixes: Prefixes, theirs: Sequence[Tensor], plain: Plain) -> float:
    """Return the largest difference that a last bit of the embeddings makes; 0 if several processes compute."""
    if plain is not plain_logits:
        return 0.0
    largest = 0.0
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)

        def nudged(_module: Any, _arguments: Any, output: Tensor, generator: torch.Generator = generator) -> Tensor:
            signs = torch.randint(-1, 2, output.shape, generator=generator).to(output.device)
            return output * (1.0 + signs * torch.finfo(output.dtype).eps).to(output.dtype)

        embeddings: Any = probed.model.get_input_embeddings()
        hook = embeddings.register_forward_hook(nudged)
        try:
            largest = max(largest, _difference(plain(probed.model, prefixes, "eager"), theirs))
        finally:
            hook.remove()
    return largest


def _rounding(probed: Probed, prefixes: Prefixes, theirs: Sequence[Tensor], plain: Plain) -> float:
    """Return the difference between two of transformers' attentions; 0 if only one computes the model."""
    if "capped scores" in probed.kv_cache.shape.features:  # which "sdpa" leaves out
        return 0.0
    try:
        return _difference(plain(probed.model, prefixes, "sdpa"), theirs)
    except (ValueError, ImportError):  # the family has no such attention
        return 0.0
