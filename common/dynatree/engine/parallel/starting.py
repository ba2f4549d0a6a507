"""Starts the ranks of a model, and makes the engine of rank 0."""

from __future__ import annotations

import atexit
import logging
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.device import chosen_device
from dynatree.engine.engine import Engine
from dynatree.engine.forward.eager import EagerRunner
from dynatree.engine.model.composite import text_config_of
from dynatree.engine.model.files import check_path
from dynatree.engine.model.tokenizer import first_line
from dynatree.engine.parallel.parallel_engine import ParallelRunner, Plain
from dynatree.engine.parallel.ranks import Followers, Ranks, check_plan, end_process, end_standstill
from dynatree.engine.quantized.loading import unpacked_here
from dynatree.engine.settings import ModelSettings
from dynatree.engine.support.explained import explained, named
from dynatree.engine.support.probe import Prefixes, check_outputs, plain_logits

log = logging.getLogger(__name__)


def started_ranks(settings: ModelSettings, name: str) -> Ranks:
    """Start the ranks of a model that is split over several devices; this process is rank 0.

    Raises:
        StartupError: The model cannot be split over that number of devices.
    """
    size = settings.tensor_parallel
    check_path(settings.model)
    try:
        whole = AutoConfig.from_pretrained(settings.model, trust_remote_code=False)
    except Exception as error:
        raise StartupError(f"model {name!r} could not be loaded: {first_line(error)}") from error
    with named(name):
        config = text_config_of(whole)
    if unpacked_here(whole, chosen_device(settings.device)):
        raise StartupError(f"model {name} has quantised weights, which do not go together with --tensor-parallel")
    heads = getattr(config, "num_attention_heads", 0)  # models of recurrent layers alone have none, and no plan
    plan = getattr(config, "base_model_tp_plan", None)
    with explained(name, config):
        check_plan(config.model_type, plan, heads, getattr(config, "num_key_value_heads", None) or heads, size)
    if settings.device == "cpu" and torch.cuda.is_available():
        raise StartupError(
            "--tensor-parallel with --device cpu would use this machine's GPUs; expected CUDA_VISIBLE_DEVICES= in the "
            "environment"
        )
    devices = torch.cuda.device_count() if settings.device in ("auto", "cuda") and torch.cuda.is_available() else None
    if devices is not None and devices < size:
        raise StartupError(f"--tensor-parallel is {size}, but this machine has {devices} GPUs")
    threads = settings.threads or max(torch.get_num_threads() // size, 1)
    torch.set_num_threads(threads)
    where = "GPUs" if devices is not None else f"processes of {threads} threads"
    log.info("%s: every layer is split over %d %s", name, size, where)
    followers = Followers(size, replace(settings, threads=threads), end_process)
    atexit.register(followers.end)
    ranks = Ranks(0, size, followers.store)
    ranks.watch(partial(end_standstill, followers))
    return ranks


def leading(engine: Engine, ranks: Ranks) -> Engine:
    """Make the engine of rank 0, whose forward passes all ranks compute, and check its outputs.

    Raises:
        StartupError: The outputs differ from the model's.
    """

    def plain(model: PreTrainedModel, prefixes: Prefixes, implementation: str) -> list[Tensor]:
        with ranks.in_step():
            ranks.say(Plain(prefixes, implementation))
            return plain_logits(model, prefixes, implementation)

    assert isinstance(engine.runner, EagerRunner), "ranks run no program"
    engine = replace(engine, runner=ParallelRunner(engine.runner, ranks))
    check_outputs(engine, engine.info.context_length, plain)
    return engine
