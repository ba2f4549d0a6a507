"""Makes the model to train: a cut of the target's layers, or random layers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.model.composite import text_config_of
from dynatree.engine.model.tokenizer import first_line
from dynatree.engine.offload.offloaded_model import layers_of
from dynatree.engine.support.explained import named
from dynatree.engine.support.families import check_config


def default_layers(total: int) -> int:
    """Return the number of layers of a draft for a target with `total` layers."""
    return max(2, -(-total // 8))


def kept_layers(total: int, count: int | None) -> list[int]:
    """Return the numbers of `count` evenly spaced layers of `total`, the first and the last among them.

    Raises:
        StartupError: There are not more layers than that.
    """
    count = count or default_layers(total)
    if count >= total:
        raise StartupError(f"--layers is {count}, but the target has {total} layers; expected fewer")
    return [round(number * (total - 1) / max(count - 1, 1)) for number in range(count)]


def cut(target: PreTrainedModel, kept: list[int]) -> PreTrainedModel:
    """Return a copy of the target with some of its layers only, in float32."""
    prefix, layers = layers_of(target)
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):  # such as layer_types
        if isinstance(value, list) and len(value) == len(layers):
            setattr(text, name, [value[layer] for layer in kept])
    text.num_hidden_layers = len(kept)
    student = random_model(config)
    names = {f"{prefix}.{layer}.": f"{prefix}.{place}." for place, layer in enumerate(kept)}
    state = {}
    for name, weight in target.state_dict().items():
        before = next((each for each in names if name.startswith(each)), None)
        if before is not None:
            state[names[before] + name.removeprefix(before)] = weight
        elif not name.startswith(f"{prefix}."):
            state[name] = weight
    student.load_state_dict(state)
    freeze_vocabulary(student)
    return student


def dense(target: PreTrainedModel, layers: int, context_length: int, seed: int) -> PreTrainedModel:
    """Return a Llama of the target's width and vocabulary with random layers, for a target whose layers recur."""
    width = target.config.get_text_config().hidden_size
    embeddings, output = vocabulary_of(target)
    config = LlamaConfig(
        vocab_size=embeddings.num_embeddings,
        hidden_size=width,
        intermediate_size=64 * -(-width // 24),  # 8 / 3 of the width (Touvron et al. 2023, LLaMA, section 2.2)
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        head_dim=64,
        max_position_embeddings=context_length,
        tie_word_embeddings=embeddings.weight is output.weight,
    )
    return _random(config, target, seed)


def from_config(file: Path, target: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Return a model of a configuration with random layers; it takes the target's embeddings if they fit.

    Raises:
        StartupError: The file is no configuration, or its vocabulary is not the target's.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        config: PretrainedConfig = AutoConfig.for_model(**values)
    except OSError as error:
        raise StartupError(f"--draft-config {file} cannot be read: {error.strerror}") from None
    except Exception as error:  # transformers and its packages raise types of their own
        raise StartupError(f"--draft-config {file} is no configuration of a model: {first_line(error)}") from None
    with named(file.name):
        config = text_config_of(config)
        check_config(config)
    theirs = target.config.get_text_config().vocab_size
    if config.vocab_size != theirs:
        raise StartupError(
            f"--draft-config {file} has a vocabulary of {config.vocab_size} tokens, so it cannot use the target's "
            f"tokenizer; expected {theirs}"
        )
    try:
        return _random(config, target, seed)
    except Exception as error:
        raise StartupError(f"--draft-config {file} makes no model: {first_line(error)}") from None


def _random(config: PretrainedConfig, target: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Return a model with random layers; it takes the target's embeddings if they fit."""
    torch.manual_seed(seed)
    student = random_model(config)
    for ours, wanted in zip(vocabulary_of(student), vocabulary_of(target), strict=True):
        own, theirs = ours.state_dict(), wanted.state_dict()
        if {name: each.shape for name, each in own.items()} != {name: each.shape for name, each in theirs.items()}:
            return student
        ours.load_state_dict(theirs)
    freeze_vocabulary(student)
    return student


def freeze_vocabulary(student: PreTrainedModel) -> None:
    """Exclude the embeddings and the output layer, the largest part of a draft, from training."""
    for layer in vocabulary_of(student):
        layer.requires_grad_(False)


def vocabulary_of(model: PreTrainedModel) -> tuple[Any, Any]:
    """Return the embeddings and the output layer of a model."""
    return model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of a configuration with random weights, in float32."""
    vars(config).pop("quantization_config", None)  # of a checkpoint's files
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)  # type: ignore[no-untyped-call]
    eager: PreTrainedModel = model.eval()  # no dropout, also in training
    return eager


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Refuse a model whose logits are not the plain product of hidden states and output layer.

    Raises:
        StartupError: The logits are scaled or capped, so training would have to compute all of them.
    """
    tokens: Any = torch.arange(8)[None]
    body: Any = model.base_model
    head = vocabulary_of(model)[1]
    expected = model(input_ids=tokens, use_cache=False).logits.float()
    hidden = body(input_ids=tokens, use_cache=False).last_hidden_state
    got = head(hidden.to(head.weight.dtype)).float()
    if not torch.allclose(expected, got, rtol=1e-2, atol=1e-2):
        raise StartupError(f"{model.config.model_type} models scale or cap their logits, which distill does not train")
