"""`dynatree draft` with a draft model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

from dynatree.common.model_info import ModelInfo
from dynatree.draft import draft_server
from dynatree.draft.growth.draft_model import EngineDraftModel
from dynatree.draft.growth.draft_source import DraftSource
from dynatree.draft.settings import DraftSettings
from dynatree.draft.target.replicas import Replicas
from dynatree.draft.target.target import Target
from dynatree.engine.engine import Engine
from dynatree.engine.kv.prefix_cache import PrefixCache
from dynatree.engine.loading import load_engine, with_forward_costs
from dynatree.engine.model_thread import ModelThread
from dynatree.engine.shared_cores import HalfTheThreads, SharedCores
from dynatree.engine.timing import choose_threads
from dynatree.serving.service_process import run_service

MEASURED_ROWS = 6  # typical number of rows in a level of a tree


def run(settings: DraftSettings) -> int:
    """Serve until a signal, and return the exit status."""
    return run_service(serve(settings))


async def serve(settings: DraftSettings) -> None:
    """Load the draft model, find the verify services, then serve until a signal.

    Raises:
        StartupError: As `draft_server.serve`.
    """
    await draft_server.serve(settings, partial(_CopyDrafting.begin if settings.copy else _ModelDrafting.load, settings))


@dataclass(frozen=True)
class _ModelDrafting:
    """Drafting with a loaded model; implements `Drafting`."""

    engine: Engine
    thread: ModelThread
    settings: DraftSettings
    chooses_threads: bool

    @classmethod
    async def load(cls, settings: DraftSettings, thread: ModelThread) -> Self:
        """Load the model on its thread.

        Raises:
            StartupError: The model cannot be used.
        """
        assert settings.model is not None, "without a model, `serve_ngrams` serves"
        return cls(await thread.run(load_engine, settings.model), thread, settings, settings.model.threads is None)

    def target(self, info: ModelInfo) -> Target:
        """See `Drafting.target`."""
        return targets_for(self.engine, self.settings.verify.ahead)(info)

    async def source(self, replicas: Replicas) -> DraftSource:
        """Measure the model after the verify service, since on one machine they would slow each other down."""
        if self.chooses_threads:
            await self.thread.run(choose_threads, self.engine)
        engine = await self.thread.run(with_forward_costs, self.engine, MEASURED_ROWS)
        replicas.rebuild_with(targets_for(engine, self.settings.verify.ahead))
        return source_of(engine, self.thread, prefix_cache=self.settings.limits.prefix_cache)


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


def targets_for(engine: Engine, ahead: bool | None) -> Callable[[ModelInfo], Target]:
    """Return the function that builds a `Target` for this draft model; `ahead` as in `Target.of`."""
    known_ids = max(engine.tokenizer.get_vocab().values()) + 1
    return lambda info: Target.of(info, engine.info, known_ids, ahead)


def source_of(engine: Engine, thread: ModelThread, *, prefix_cache: bool) -> DraftSource:
    """Make a source of candidates of a draft model that was loaded on this thread."""
    model = EngineDraftModel(engine, PrefixCache(engine.kv_cache, enabled=prefix_cache))
    cores = SharedCores(HalfTheThreads(thread))
    return DraftSource(model, engine.info, engine.tokenizer, engine.kv_cache.size, cores.shared)
