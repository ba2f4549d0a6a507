"""Runs `dynatree distill`: loads the models and the texts, trains, and reports the outcome."""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.distill.distillation import Distillation
from dynatree.distill.folder import Folder
from dynatree.distill.labels import Labeller
from dynatree.distill.outcome import outcome
from dynatree.distill.student import check_head, cut, default_layers, dense, from_config, kept_layers
from dynatree.distill.texts import LENGTH, Texts, chat_frame, read_texts
from dynatree.distill.training import Training, faster_dtype
from dynatree.engine.examined import WITHOUT_ATTENTION, display_name, examined, examined_config, unloadable
from dynatree.engine.model.composite import KEY_MAPPING, without_report
from dynatree.engine.model.tokenizer import fingerprint, load_tokenizer
from dynatree.engine.quantized.dequantized import dequantized_model
from dynatree.engine.quantized.loading import method_of
from dynatree.engine.settings import ModelSettings
from dynatree.engine.support.families import recurs


def run(options: argparse.Namespace) -> int:
    """See `arguments.run`."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = str(embedded.target_path()) if options.target_model == embedded.NAME else options.target_model
    tokenizer: Any = load_tokenizer(model)
    texts = read_texts(options.texts, tokenizer)
    _train(options, model, texts, tokenizer)
    for line in outcome(model, str(options.out), texts.held_back):
        print(line, flush=True)
    return 0


def load_target(model: str) -> PreTrainedModel:
    """Load the target on the CPU; quantised weights are dequantised.

    Raises:
        StartupError: The model cannot be served, or has weights that only other packages can read.
    """
    settings = ModelSettings(model, device="cpu")
    found = examined(settings)
    if found.context_length < LENGTH:
        raise StartupError(f"model {found.name} has a context of {found.context_length} tokens, expected {LENGTH}")
    method = method_of(found.config)
    try:
        target = dequantized_model(settings, "float32", torch.device("cpu"))
        if target is None and method:
            raise ValueError(f"its {method} weights cannot be dequantised here")
        loader: Any = AutoModelForCausalLM
        with without_report():
            loaded: PreTrainedModel = target or loader.from_pretrained(
                model, config=found.config, key_mapping=KEY_MAPPING, use_safetensors=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise unloadable(model, display_name(model), error) from error
    return loaded


def _train(options: argparse.Namespace, model: str, texts: Texts, tokenizer: Any) -> None:
    """Train the draft of `--out`; the target is freed in the end."""
    dtype = faster_dtype()
    target = load_target(model)
    saved = target.dtype
    config = target.config.get_text_config()
    shape: Sequence[int] | str
    if options.draft_config:
        student = from_config(options.draft_config, target, options.seed)
        shape = hashlib.sha256(options.draft_config.read_bytes()).hexdigest()
    elif recurs(config):
        layers = options.layers or default_layers(config.num_hidden_layers)
        context_length = getattr(config, "max_position_embeddings", None) or WITHOUT_ATTENTION
        student, shape = dense(target, layers, context_length, options.seed), f"{layers} layers that attend"
        print(f"the draft begins with {shape} and random weights, because the target's layers recur", flush=True)
    else:
        shape = kept_layers(config.num_hidden_layers, options.layers)
        student = cut(target, shape)
    examined_config(ModelSettings(str(options.out), device="cpu", chooses_tokens=False), "to train", student.config)
    for each in (student, target):
        check_head(each)
    rows = target.get_output_embeddings().weight[:64]  # type: ignore[no-untyped-call]
    dependencies = {
        "target": hashlib.sha256(rows.detach().float().numpy().tobytes()).hexdigest(),
        "tokenizer": fingerprint(tokenizer),
        "draft": shape,
        "texts": texts.sha256,
        "answers": options.answers,
        "seed": options.seed,
    }
    folder = Folder(options.out)
    with torch.inference_mode():  # in which dequantised weights were made
        target.to(dtype)  # type: ignore[arg-type]
    labeller = Labeller(target, texts, chat_frame(tokenizer), options.seed)
    folder.begin(dependencies, options.resume)
    training = Training(student, 60 * options.minutes, options.seed, folder.labels, dtype)
    if folder.state.exists():
        training.load(folder.state)
    trained = sum(each.numel() for each in student.parameters() if each.requires_grad)
    print(
        f"{len(texts.training)} tokens of text, {len(texts.held_back)} held back; {trained / 1e6:.1f} M trained "
        f"parameters of {student.num_parameters() / 1e6:.1f} M, in {str(dtype).removeprefix('torch.')}",
        flush=True,
    )
    Distillation(folder, training, labeller, tokenizer, saved, options.answers).run()
