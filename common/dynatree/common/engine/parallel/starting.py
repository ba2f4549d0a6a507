"""How the ranks of a model start, and how the first of them leads."""

from __future__ import annotations

import atexit
import logging
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from dynatree.common.engine.engine import Engine
from dynatree.common.engine.explained import explained
from dynatree.common.engine.model_settings import ModelSettings
from dynatree.common.engine.parallel.parallel_engine import ParallelRunner, Plain
from dynatree.common.engine.parallel.ranks import Followers, Ranks, check_plan, end_process, end_standstill
from dynatree.common.engine.probe import Prefixes, check_outputs, plain_logits
from dynatree.common.errors import StartupError
from dynatree.common.model_files import check_path
from dynatree.common.tokenizer import first_line

log = logging.getLogger(__name__)


def started_ranks(settings: ModelSettings, name: str) -> Ranks:
    """All processes of a model that is cut over several devices; this one is the first.

    Raises:
        StartupError: It cannot be cut so.
    """
    size = settings.tensor_parallel
    check_path(settings.model)
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=False).get_text_config()
    except Exception as error:
        raise StartupError(f"model {name!r} could not be loaded: {first_line(error)}") from error
    heads = config.num_attention_heads
    plan = getattr(config, "base_model_tp_plan", None)
    with explained(name, config):
        check_plan(config.model_type, plan, heads, getattr(config, "num_key_value_heads", None) or heads, size)
    devices = torch.cuda.device_count() if settings.device in ("auto", "cuda") and torch.cuda.is_available() else None
    if devices is not None and devices < size:
        raise StartupError(f"--tensor-parallel is {size}, and this machine has {devices} GPUs")
    threads = settings.threads or max(torch.get_num_threads() // size, 1)
    torch.set_num_threads(threads)
    where = "GPUs" if devices is not None else f"processes of {threads} threads"
    log.info("%s: every layer is cut over %d %s", name, size, where)
    followers = Followers(size, replace(settings, threads=threads), end_process)
    atexit.register(followers.end)
    ranks = Ranks(0, size, followers.store)
    ranks.watch(partial(end_standstill, followers))
    return ranks


def leading(engine: Engine, ranks: Ranks) -> Engine:
    """The engine of rank 0, on which all ranks compute, once its outputs are compared.

    Raises:
        StartupError: They are not the model's.
    """

    def plain(model: PreTrainedModel, prefixes: Prefixes, implementation: str) -> list[Tensor]:
        with ranks.in_step():
            ranks.say(Plain(prefixes, implementation))
            return plain_logits(model, prefixes, implementation)

    engine = replace(engine, runner=ParallelRunner(engine.runner, ranks))
    check_outputs(engine, engine.info.context_length, plain)
    return engine
