"""A small model of a configuration, with random weights: the same computation as the real model, at little cost."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.model.tokenizer import first_line

VOCAB_SIZE = 512
CONTEXT_LENGTH = 512
# Reduced size of each window, chunk, block, or number of selected keys or experts that is shorter than the context.
SPAN = 16
MOST_EXPERTS = 16
MOST_PARAMETERS = 3 * 2**27  # 1.5 GiB in float32
_SPANS = re.compile(
    r"^(?!.*(dim|heads|experts|layers?)).*(window|chunk|top_?k|local|block|span|stride|sparse|original_max|floor_scale)"
)
_WIDTHS = re.compile(r"intermediate|inner|ffn|lora_rank")
_EXPERTS = re.compile(r"experts(_per_tok(en)?)?$")  # of a layer, and of a row


def small_model(config: PretrainedConfig, context_length: int, seed: int) -> PreTrainedModel:
    """Make a narrow float32 model on the CPU with the layers of `config`, and with spans reduced to `SPAN`.

    Layers keep their number and kinds (but see `_narrow_alone`), and heads keep their size.

    Args:
        config: Configuration of the real model.
        context_length: Length of the longest served sequence, in tokens.
        seed: Seed of the weights.

    Raises:
        ValueError: No small model could be made.
    """
    failure: Exception = ValueError("it has too many parameters")
    for change in (_narrow, _narrowest, _narrow_alone, _cut, _keep):
        small = copy.deepcopy(config)
        text = small.get_text_config()
        try:
            _shorten(vars(text), text, context_length)
            change(text)
            model = skeleton(small, torch.float32)
            if sum(parameter.numel() for parameter in model.parameters()) <= MOST_PARAMETERS:
                return _with_weights(model, seed)
        except Exception as error:  # configurations and models raise various types here
            failure = error
    raise ValueError(f"no small model could be made of its configuration: {first_line(failure)}")


def spans(config: PretrainedConfig) -> list[int]:
    """Return the numbers in a configuration that look like windows, chunks, blocks, or numbers of selected keys."""
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
    """Reduce to `SPAN` each span that is longer than `SPAN` and shorter than the context."""

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
    """Reduce the heads and the matching width, then the sizes of `_cut`."""
    heads, width = text.num_attention_heads, text.hidden_size
    given = vars(text)  # if layers differ, the configuration may refuse to read an attribute directly
    kv_name = next((name for name in ("num_key_value_heads", "num_kv_heads") if given.get(name)), "")
    kv_heads = given.get(kv_name) or heads
    few_kv = min(kv_heads, 2)
    few = few_kv * min(heads // kv_heads, 2)
    size = given.get("head_dim") or width // heads
    others = {text.attribute_map.get(name, name) for name in ("max_position_embeddings", "vocab_size")}
    for name, value in list(given.items()):
        if value == width and type(value) is int and "head" not in name and name not in others:
            _set(text, name, few * size)
    text.num_attention_heads = few
    if kv_name:
        _set(text, kv_name, few_kv)
    _narrow_recurrent(text)
    _cut(text)


def _narrow_recurrent(text: Any) -> None:
    """Reduce the heads of recurrent layers, whose size stays, to match a width that has been reduced."""
    given = vars(text)
    keys, values = (given.get(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if keys and values:
        text.linear_num_key_heads = min(keys, 2)
        text.linear_num_value_heads = text.linear_num_key_heads * min(values // keys, 2)
    if given.get("linear_num_heads"):  # Kimi Linear
        text.linear_num_heads = min(text.linear_num_heads, 2)
    size = given.get("mamba_d_head")
    if isinstance(size, int):  # Mamba-2 in hybrids: heads fill the inner width
        if given.get("mamba_d_ssm"):
            text.mamba_n_heads = min(text.mamba_n_heads, 2 * text.mamba_n_groups)
            text.mamba_d_ssm = text.mamba_n_heads * size
        else:
            text.mamba_n_heads = text.mamba_expand * text.hidden_size // size


def _narrow_alone(text: Any) -> None:
    """Reduce the layers of Mamba and Mamba-2, the heads and the width of Mamba-2, and the sizes of `_cut`.

    Their layers are all alike, so few stand for all: 64 random ones amplify rounding without bound.

    Raises:
        AttributeError: It is another family.
    """
    width = text.expand * text.hidden_size
    text.num_hidden_layers = min(text.num_hidden_layers, 8)
    if width == getattr(text, "num_heads", 0) * getattr(text, "head_dim", 0):
        text.num_heads = text.n_groups
        text.hidden_size = text.num_heads * text.head_dim // text.expand
    _cut(text)


def _narrowest(text: Any) -> None:
    """Reduce the experts and feed-forward layers of `_narrow` further, for models of many layers."""
    _narrow(text)
    for name, value in list(vars(text).items()):
        if _WIDTHS.search(name) and type(value) is int:
            _set(text, name, min(value, 64))


def _cut(text: Any) -> None:
    """Reduce the experts, the feed-forward layers, the vocabulary and the positions."""
    vocab = text.vocab_size
    for name, value in list(vars(text).items()):
        if name.endswith("_token_id"):
            ids = [min(each, VOCAB_SIZE - 1) for each in (value if isinstance(value, list) else [value]) if each]
            _set(text, name, value if not ids else ids if isinstance(value, list) else ids[0])
        elif _WIDTHS.search(name) and isinstance(value, list):  # one of each layer
            _set(text, name, [min(each, 128) for each in value])
        elif type(value) is not int:
            continue
        elif value == vocab or name.startswith("vocab_size"):  # Gemma 3n has a second, smaller vocabulary
            _set(text, name, VOCAB_SIZE)
        elif _WIDTHS.search(name):
            _set(text, name, min(value, 128))
        elif _EXPERTS.search(name) and value > MOST_EXPERTS:
            _set(text, name, MOST_EXPERTS)
        elif value == getattr(text, "max_position_embeddings", 0) and value > CONTEXT_LENGTH:
            _set(text, name, CONTEXT_LENGTH)


def _keep(text: Any) -> None:
    """Leave the configuration unchanged."""


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _with_weights(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Give the model random weights, large enough that attention is uneven and every part affects the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        weights = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            weights *= parameter.shape[-1] ** -0.5
        else:
            weights = weights * 0.1 + (1.0 if last == "weight" and not _adds_one(model.get_submodule(owner)) else 0.0)
        if last == "D":  # what passes by a state, without which the first tokens' norms amplify rounding
            weights += 1.0
        if last == "A_log":  # slow decays, so that a state still counts when its tokens are many
            weights -= 4.0
        model.get_submodule(owner).register_parameter(last, nn.Parameter(weights, requires_grad=False))
    for module in model.modules():
        _soften(module)
        _damp(module, model.config.get_text_config().num_hidden_layers)
    model.tie_weights()
    return model


def _adds_one(norm: nn.Module) -> bool:
    """Whether a norm multiplies by one plus its weight, as Gemma's do."""
    size = len(norm.weight)  # type: ignore[arg-type]
    norm.weight = nn.Parameter(torch.zeros(size), requires_grad=False)
    try:
        return bool(norm(torch.ones(1, size)).any())
    except Exception:  # no norm, or one of more inputs
        return False


def _soften(attention: nn.Module) -> None:
    """Give queries and keys that are normed and not scaled the products of scaled ones, as training does (Gemma 4)."""
    if getattr(attention, "scaling", None) == 1.0:
        for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm")):
            weight = getattr(norm, "weight", None)
            if isinstance(weight, nn.Parameter):
                weight.mul_(len(weight) ** -0.25)


def _damp(mixer: nn.Module, layers: int) -> None:
    """Divide a recurrent mixer's output by the root of the number of layers, as the initialisation of deep models does.

    Otherwise 32 random layers amplify the rounding of the first one by a factor of 1,000 (Mamba-2).
    """
    if any(isinstance(child, nn.Conv1d) for child in mixer.children()):
        for name in ("out_proj", "o_proj"):
            weight = getattr(getattr(mixer, name, None), "weight", None)
            if isinstance(weight, nn.Parameter):
                weight.mul_(layers**-0.5)
