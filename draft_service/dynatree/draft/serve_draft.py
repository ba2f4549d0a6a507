"""`dynatree draft` with a draft model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from dynatree.common.model_info import ModelInfo
from dynatree.draft import draft_server
from dynatree.draft.growth.draft_model import EngineDraftModel
from dynatree.draft.growth.draft_source import DraftSource
from dynatree.draft.reload.reloader import LoadAgain
from dynatree.draft.settings import DraftSettings
from dynatree.draft.target.replicas import Replicas
from dynatree.draft.target.target import Target
from dynatree.draft.target.target_tokenizer import target_tokenizer
from dynatree.draft.text.translation import Translation
from dynatree.engine.engine import Engine
from dynatree.engine.kv.prefix_cache import PrefixCache
from dynatree.engine.loading import load_engine, with_forward_costs
from dynatree.engine.model_thread import ModelThread, calls_left
from dynatree.engine.shared_cores import HalfTheThreads, SharedCores
from dynatree.engine.timing import choose_threads
from dynatree.serving.service_process import run_service

log = logging.getLogger(__name__)

MEASURED_ROWS = 6  # typical number of rows in a level of a tree


def run(settings: DraftSettings) -> int:
    """Serve until a signal, and return the exit status."""
    return run_service(serve(settings), calls_left)


async def serve(settings: DraftSettings) -> None:
    """Load the draft model, find the verify services, then serve until a signal.

    Raises:
        StartupError: As `draft_server.serve`.
    """
    if settings.copy:
        await draft_server.serve(settings, partial(_CopyDrafting.begin, settings))
        return
    await draft_server.serve(settings, partial(_ModelDrafting.load, settings), loading_again(settings))


def loading_again(settings: DraftSettings) -> LoadAgain:
    """Return the function that loads the draft model again; call this before the first load chooses its threads."""
    most_threads = torch.get_num_threads()

    async def load(thread: ModelThread, slots: int) -> _ModelDrafting:
        assert settings.model is not None, "without a model, `serve_ngrams` serves"
        if settings.model.threads is None:
            await thread.run(torch.set_num_threads, most_threads)  # a new thread has those that the old model chose
        return await _ModelDrafting.load(replace(settings, model=replace(settings.model, kv_tokens=slots)), thread)

    return load


@dataclass
class _ModelDrafting:
    """Drafting with a loaded model, for the tokenizer of the first target; implements `Drafting`."""

    engine: Engine
    thread: ModelThread
    settings: DraftSettings
    chooses_threads: bool
    described: ModelInfo | None = None  # the draft model, with the first target's tokenizer

    @classmethod
    async def load(cls, settings: DraftSettings, thread: ModelThread) -> Self:
        """Load the model on its thread.

        Raises:
            StartupError: The model cannot be used.
        """
        assert settings.model is not None, "without a model, `serve_ngrams` serves"
        return cls(await thread.run(load_engine, settings.model), thread, settings, settings.model.threads is None)

    def target(self, info: ModelInfo) -> Target:
        """Build a target that is replaced once the model is measured.

        Raises:
            FailedPreconditionError: The target's tokenizer is not the first target's.
        """
        self.described = self.described or replace(self.engine.info, tokenizer_fingerprint=info.tokenizer_fingerprint)
        return Target.of(info, self.described, info.vocab_size, ahead=False)

    async def source(self, replicas: Replicas) -> DraftSource:
        """Measure the model after the verify service, since on one machine they would slow each other down."""
        if self.chooses_threads:
            await self.thread.run(choose_threads, self.engine)
        engine = await self.thread.run(with_forward_costs, self.engine, MEASURED_ROWS)
        limits, ahead = self.settings.limits, self.settings.verify.ahead
        translation = await translation_for(engine, self.thread, replicas, self.settings.verify.timeout)
        return source_of(engine, self.thread, prefix_cache=limits.prefix_cache, ahead=ahead, translation=translation)


@dataclass(frozen=True)
class _CopyDrafting:
    """Drafting with the target's own copy, which loads once the target serves; implements `Drafting`."""

    thread: ModelThread
    settings: DraftSettings

    @classmethod
    async def begin(cls, settings: DraftSettings, thread: ModelThread) -> Self:
        """Load nothing yet."""
        return cls(thread, settings)

    def target(self, info: ModelInfo) -> Target:
        """Build a target that is replaced once the copy is loaded; until then, the target describes its copy too."""
        return Target.of(info, info, info.vocab_size, ahead=False)

    async def source(self, replicas: Replicas) -> DraftSource:
        """Load the copy and measure it.

        Raises:
            StartupError: The copy cannot be used.
        """
        return await (await _ModelDrafting.load(self.settings, self.thread)).source(replicas)


async def translation_for(
    engine: Engine, thread: ModelThread, replicas: Replicas, timeout: float
) -> Translation | None:
    """Match the tokens of the draft model with those of a ready target, unless they have the same tokenizer.

    Raises:
        StartupError: The target's tokenizer is not available, or cannot be matched.
    """
    target = replicas.target.info
    if target.tokenizer_fingerprint == engine.info.tokenizer_fingerprint:
        return None
    tokenizer = await target_tokenizer(replicas, thread, timeout)
    translation = await thread.run(Translation.of, tokenizer, engine.tokenizer, engine.info.vocab_size)
    level = logging.WARNING if translation.overlap.small else logging.INFO
    log.log(level, "%s and %s have different tokenizers: %s", engine.info.name, target.name, translation.overlap)
    return translation


def _targets_for(engine: Engine, ahead: bool | None, translation: Translation | None) -> Callable[[ModelInfo], Target]:
    """Return the function that builds a `Target` for this draft model; `ahead` as in `Target.of`."""
    if translation is None:
        known_ids, info = max(engine.tokenizer.get_vocab().values()) + 1, engine.info
    else:
        known_ids = len(translation.draft_ids)
        info = replace(engine.info, vocab_size=known_ids, tokenizer_fingerprint=translation.fingerprint)
    return lambda target: Target.of(target, info, known_ids, ahead)


def source_of(
    engine: Engine,
    thread: ModelThread,
    *,
    prefix_cache: bool,
    ahead: bool | None,
    translation: Translation | None = None,
) -> DraftSource:
    """Make a source of candidates of a draft model that was loaded on this thread; `ahead` as in `Target.of`."""
    model = EngineDraftModel(engine, PrefixCache(engine.kv_cache, enabled=prefix_cache), translation)
    info, tokenizer = engine.info, engine.tokenizer
    if translation is not None:  # its trees consist of the target's tokens
        info, tokenizer = replace(info, tokenizer_fingerprint=translation.fingerprint), translation.target
    return DraftSource(
        model,
        info,
        tokenizer,
        _targets_for(engine, ahead, translation),
        engine.kv_cache.size,
        SharedCores(HalfTheThreads(thread)).shared,
        translation=translation,
        guesses=model.guesses,
    )
