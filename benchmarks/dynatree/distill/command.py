"""Runs `dynatree distill`: loads the models and the texts, trains, and reports the outcome."""

from __future__ import annotations

import argparse
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.distill.distillation import Distillation, minutes
from dynatree.distill.folder import Folder
from dynatree.distill.labels import HELD_BACK, Labeller
from dynatree.distill.outcome import outcome
from dynatree.distill.student import check_head, cut, default_layers, dense, from_config, kept_layers
from dynatree.distill.texts import LENGTH, Texts, chat_frame, read_texts
from dynatree.distill.training import Training
from dynatree.engine.cpu.native import is_native
from dynatree.engine.cpu.packing import can_pack
from dynatree.engine.examined import WITHOUT_ATTENTION, display_name, examined, examined_config, unloadable
from dynatree.engine.model.composite import KEY_MAPPING, without_report
from dynatree.engine.model.tokenizer import fingerprint, load_tokenizer
from dynatree.engine.quantized.dequantized import dequantized_model
from dynatree.engine.quantized.loading import method_of
from dynatree.engine.settings import ModelSettings, is_gguf
from dynatree.engine.support.families import recurs

HELD_BACK_SHARE = 0.05  # of the time, in which the target labels held-back text; a first piece may take longer
MEASURING = 0.1  # share of the time in which the outcome is measured; the loading of both models comes before it


def run(options: argparse.Namespace, begun: float, clock: Callable[[], float] = time.monotonic) -> int:
    """See `arguments.run`; the command began at `begun` of the clock, in seconds."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = str(embedded.target_path()) if options.target_model == embedded.NAME else options.target_model
    tokenizer: Any = load_tokenizer(model)
    texts = read_texts(options.texts, tokenizer)
    end = begun + 60 * options.minutes
    prepared = _train(options, model, texts, tokenizer, begun, clock)
    trained = clock()
    for line in outcome(model, options.out, texts.held_back, end, clock):
        print(line, flush=True)
    times = (prepared - begun, trained - prepared, clock() - trained)
    print("loading {}, training {}, measuring {}".format(*map(minutes, times)), flush=True)
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


def _train(
    options: argparse.Namespace, model: str, texts: Texts, tokenizer: Any, begun: float, clock: Callable[[], float]
) -> float:
    """Train the draft of `--out`, and return when that began; the target is freed in the end.

    Half of the command's minutes are for the training even if loading and measuring take the rest and longer.
    """
    dtype = torch.bfloat16 if can_pack(torch.bfloat16) else torch.float32
    before = clock()
    target = load_target(model)
    loaded = clock()
    loading = loaded - before
    saved = target.dtype
    if is_gguf(model) or method_of(target.config):  # dequantised weights are in float32
        saved = torch.bfloat16 if is_native(torch.device("cpu"), torch.bfloat16) else dtype
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
    total = 60 * options.minutes
    print(f"loaded in {minutes(loaded - begun)}; the target now labels text that is held back", flush=True)
    held_back = {
        kind: labeller.held_back(answers=answers, goes_on=lambda: clock() - loaded < HELD_BACK_SHARE * total)
        for kind, answers in (("text", False), ("answers", True))
        if options.answers or not answers
    }
    if fewest := [kind for kind, labels in held_back.items() if len(labels.tokens) < HELD_BACK]:
        print(f"fewer than {HELD_BACK} sequences of held-back {' and '.join(fewest)} were labelled in time", flush=True)
    prepared = clock()
    seconds = max(total * (1 - MEASURING) - (prepared - begun) - 2 * loading, total / 2)
    training = Training(student, seconds, options.seed, folder.labels, dtype, clock)
    if folder.state.exists():
        training.load(folder.state)
    trained = sum(each.numel() for each in student.parameters() if each.requires_grad)
    print(
        f"{len(texts.training)} tokens of text, {len(texts.held_back)} held back; {trained / 1e6:.1f} M trained "
        f"parameters of {student.num_parameters() / 1e6:.1f} M, in {str(dtype).removeprefix('torch.')}",
        flush=True,
    )
    Distillation(folder, training, labeller, held_back, tokenizer, saved, options.answers).run()
    return prepared
