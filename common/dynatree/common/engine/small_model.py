"""A small model of a configuration, with random weights: the same computation as the real one, at little cost."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dynatree.common.engine.streaming.streamed_model import skeleton

VOCAB_SIZE = 512
CONTEXT_LENGTH = 512
# A window, chunk, block, or number of selected keys or experts that the real context outgrows is as small as this.
SPAN = 16
MOST_EXPERTS = 16
MOST_PARAMETERS = 2**28  # 1 GiB in float32
_SPANS = re.compile(
    r"^(?!.*(dim|heads|experts|layers?)).*(window|chunk|top_?k|local|block|span|stride|sparse|original_max)"
)
_WIDTHS = re.compile(r"intermediate|inner|ffn|lora_rank")
_EXPERTS = re.compile(r"experts$")
_TOWERS = re.compile(r"vision|visual|image|audio|speech|multi_modal")


def small_model(config: PretrainedConfig, context_length: int, seed: int) -> PreTrainedModel:
    """A float32 model on the CPU with the layers of `config`, but narrow, and with spans that a short context outgrows.

    Layers keep their number and kinds, heads their size. What reads images or sound has no weights.

    Args:
        config: Of the real model.
        context_length: Tokens of the longest sequence that is served.
        seed: Of the weights.

    Raises:
        ValueError: None could be made.
    """
    failure: Exception = ValueError("it has too many parameters")
    for change in (_narrow, _cut, _keep):
        small = copy.deepcopy(config)
        text = small.get_text_config()
        try:
            _shorten(vars(text), text, context_length)
            change(text)
            model = skeleton(small, torch.float32)
            if sum(parameter.numel() for _, parameter in _needed(model)) <= MOST_PARAMETERS:
                return _with_weights(model, seed)
        except Exception as error:  # configurations and models check themselves with types of their own
            failure = error
    raise ValueError(f"no small model could be made of its configuration: {failure}")


def spans(config: PretrainedConfig) -> list[int]:
    """The numbers in a configuration that look like windows, chunks, blocks, or numbers of selected keys."""
    found: list[int] = []

    def look(values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                look(value)
            elif _SPANS.search(str(name)):
                found.extend(each for each in (value if isinstance(value, list) else [value]) if type(each) is int)

    look(vars(config.get_text_config()))
    return found


def _shorten(values: dict[str, Any], holder: Any, context_length: int) -> None:
    """Make each span that is shorter than the context, and longer than `SPAN`, as small as that."""

    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(each) for each in value]
        return SPAN if type(value) is int and SPAN < value < context_length else value

    for name, value in list(values.items()):
        if isinstance(value, dict):
            _shorten(value, value, context_length)
        elif _SPANS.search(str(name)) and short(value) != value:
            _set(holder, name, short(value))


def _narrow(text: Any) -> None:
    """Few heads, and a width to match; few experts, small feed-forward layers, few tokens and positions."""
    heads, width = text.num_attention_heads, text.hidden_size
    given = vars(text)  # of a family whose layers differ, an attribute may be asked of a layer only
    kv_heads = given.get("num_key_value_heads") or heads
    few_kv = min(kv_heads, 2)
    few = few_kv * min(heads // kv_heads, 2)
    size = given.get("head_dim") or width // heads
    others = {text.attribute_map.get(name, name) for name in ("max_position_embeddings", "vocab_size")}
    for name, value in list(given.items()):
        if value == width and type(value) is int and "head" not in name and name not in others:
            _set(text, name, few * size)
    text.num_attention_heads = few
    if given.get("num_key_value_heads"):
        text.num_key_value_heads = few_kv
    _cut(text)


def _cut(text: Any) -> None:
    """Few experts, small feed-forward layers, few tokens and positions."""
    vocab = text.vocab_size
    for name, value in list(vars(text).items()):
        if name.endswith("_token_id"):
            ids = [min(each, VOCAB_SIZE - 1) for each in (value if isinstance(value, list) else [value]) if each]
            _set(text, name, value if not ids else ids if isinstance(value, list) else ids[0])
        elif type(value) is not int:
            continue
        elif value == vocab:
            _set(text, name, VOCAB_SIZE)
        elif _WIDTHS.search(name):
            _set(text, name, min(value, 128))
        elif _EXPERTS.search(name) and value > MOST_EXPERTS:
            _set(text, name, MOST_EXPERTS)
        elif value == text.max_position_embeddings and value > CONTEXT_LENGTH:
            _set(text, name, CONTEXT_LENGTH)


def _keep(text: Any) -> None:
    """As it is."""


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def towers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of a small model that read images or sound."""
    return [module for name, module in model.named_modules() if _TOWERS.search(name)]


def _needed(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a forward over text reads."""
    return ((name, each) for name, each in model.named_parameters() if not _TOWERS.search(name))


def _with_weights(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Random weights, wide enough that attention is uneven and every part shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        if _TOWERS.search(name):  # zeros that take no memory
            zeros = nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
            model.get_submodule(owner).register_parameter(last, zeros)
            continue
        weights = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            weights *= parameter.shape[-1] ** -0.5
        else:
            weights = weights * 0.1 + (1.0 if last == "weight" else 0.0)
        model.get_submodule(owner).register_parameter(last, nn.Parameter(weights, requires_grad=False))
    model.tie_weights()
    return model
