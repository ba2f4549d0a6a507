"""Runs `dynatree distill`: loads the models and the texts, trains, and reports the outcome."""

from __future__ import annotations

import argparse
import copy
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.distill.distillation import Distillation, minutes
from dynatree.distill.folder import Folder
from dynatree.distill.labels import HELD_BACK, Labeller
from dynatree.distill.outcome import outcome
from dynatree.distill.student import check_head, cut, default_layers, dense, from_config, kept_layers, random_model
from dynatree.distill.texts import LENGTH, Texts, chat_frame, read_texts
from dynatree.distill.training import Training
from dynatree.engine.cpu.native import is_native
from dynatree.engine.cpu.packing import can_pack
from dynatree.engine.examined import WITHOUT_ATTENTION, display_name, examined, examined_config, unloadable
from dynatree.engine.model.checkpoint import check_scales
from dynatree.engine.model.composite import KEY_MAPPING, without_report
from dynatree.engine.model.gguf_config import config_of
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
    config = examined_target(model)
    _check_draft(options, config)
    tokenizer: Any = load_tokenizer(model)
    kept = Folder(options.out).texts
    if options.resume and kept.exists():
        print(f"the texts are those that {options.out} keeps", flush=True)
        texts = Texts.load(kept)
    else:
        texts = read_texts(options.texts, tokenizer)
    end = begun + 60 * options.minutes
    prepared = _train(options, model, config, texts, tokenizer, begun, clock)
    trained = clock()
    for line in outcome(model, options.out, texts.held_back, end, clock):
        print(line, flush=True)
    times = (prepared - begun, trained - prepared, clock() - trained)
    print("loading {}, training {}, measuring {}".format(*map(minutes, times)), flush=True)
    return 0


def examined_target(model: str) -> PretrainedConfig:
    """Return the configuration of the target.

    Raises:
        StartupError: The model cannot be served, or has a short context.
    """
    longest: Any = None
    with suppress(Exception):  # `examined` says why it cannot be read
        longest = getattr(config_of(model).get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and longest < LENGTH:
        raise StartupError(f"model {display_name(model)} has a context of {longest} tokens, expected at least {LENGTH}")
    return examined(ModelSettings(model, device="cpu", max_context=LENGTH)).config


def load_target(model: str, config: PretrainedConfig) -> PreTrainedModel:
    """Load the target on the CPU; quantised weights are dequantised.

    Raises:
        StartupError: Its files cannot be read, lack a tensor, or have weights that only other packages can read.
    """
    name, method = display_name(model), method_of(config)
    try:
        target = dequantized_model(ModelSettings(model, device="cpu"), "float32", torch.device("cpu"))
        if target is not None:
            return target
        if method:
            raise ValueError(f"its {method} weights cannot be dequantised here")
        loader: Any = AutoModelForCausalLM
        loaded: PreTrainedModel
        with without_report():
            loaded, found = loader.from_pretrained(
                model,
                config=config,
                key_mapping=KEY_MAPPING,
                output_loading_info=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
        check_scales(name, found["unexpected_keys"])
        if found["missing_keys"]:  # transformers gave these tensors random numbers
            raise StartupError(f"model {name} cannot be served: its checkpoint lacks {min(found['missing_keys'])}")
    except StartupError:
        raise
    except Exception as error:  # as in `load_engine`
        raise unloadable(model, name, error) from error
    return loaded


def _check_draft(options: argparse.Namespace, config: PretrainedConfig) -> None:
    """Refuse options that make no draft, on models without weights.

    Raises:
        StartupError: No draft can be made of the target, or it could not be served.
    """
    with torch.device("meta"):
        student, _ = _student(options, random_model(copy.deepcopy(config)))
    settings = ModelSettings(str(options.out), device="cpu", max_context=LENGTH, chooses_tokens=False)
    context = examined_config(settings, "to train", student.config).context_length
    if context < LENGTH:
        raise StartupError(
            f"--draft-config {options.draft_config} has a context of {context} tokens, expected at least {LENGTH}"
        )


def _student(options: argparse.Namespace, target: PreTrainedModel) -> tuple[PreTrainedModel, Sequence[int] | str]:
    """Return the draft to train, and what it is made of.

    Raises:
        StartupError: It cannot be made.
    """
    config = target.config.get_text_config()
    if options.draft_config:
        student = from_config(options.draft_config, target, options.seed)
        return student, hashlib.sha256(options.draft_config.read_bytes()).hexdigest()
    if recurs(config):
        layers = options.layers or default_layers(config.num_hidden_layers)
        context_length = getattr(config, "max_position_embeddings", None) or WITHOUT_ATTENTION
        return dense(target, layers, context_length, options.seed), f"{layers} layers that attend"
    kept = kept_layers(config.num_hidden_layers, options.layers)
    try:
        return cut(target, kept), kept
    except Exception as error:  # transformers' types, and that of a model whose layers are not found
        raise StartupError(f"layers of {config.model_type} cannot be cut; expected --draft-config") from error


def _train(
    options: argparse.Namespace,
    model: str,
    config: PretrainedConfig,
    texts: Texts,
    tokenizer: Any,
    begun: float,
    clock: Callable[[], float],
) -> float:
    """Train the draft of `--out`, and return when that began; the target is freed in the end.

    Half of the command's minutes are for the training even if loading and measuring take the rest and longer.
    """
    dtype = torch.bfloat16 if can_pack(torch.bfloat16) else torch.float32
    before = clock()
    target = load_target(model, config)
    loaded = clock()
    loading = loaded - before
    saved = target.dtype
    if is_gguf(model) or method_of(config):  # dequantised weights are in float32
        saved = torch.bfloat16 if is_native(torch.device("cpu"), torch.bfloat16) else dtype
    student, shape = _student(options, target)
    if recurs(config) and not options.draft_config:
        print(f"the draft begins with {shape} and random weights, because the target's layers recur", flush=True)
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
    if not folder.texts.exists():
        folder.write(folder.texts, texts.save)
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
