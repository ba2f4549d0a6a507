"""Loads the draft model again while the service runs, and replaces it unless the new one is worse."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from dynatree.common.errors import ServiceError, StartupError
from dynatree.draft.completion.generation import Backend
from dynatree.draft.drafting import Drafting
from dynatree.draft.growth.draft_source import DraftSource
from dynatree.draft.reload.drafts_in_use import DraftsInUse
from dynatree.draft.reload.replay import RecentTexts, right_guesses, slots_of
from dynatree.engine.model_thread import ModelThread
from dynatree.serving.admission import Admission

log = logging.getLogger(__name__)

# Loads the draft model on a thread, with this number of KV slots.
LoadAgain = Callable[[ModelThread, int], Awaitable[Drafting]]


class Reloader:
    """Loads the draft model again on request; `run` is the task that does it.

    Requests that have arrived before keep the old model, and later ones get the new one, so no completion waits or
    fails. The next reload begins when the old model is no longer used: at most two are in memory. The new KV cache has
    as many slots as the old one, because the admission of requests counts on them. The new model may have another
    tokenizer than the old one, since each is matched with the target's.

    Args:
        drafts: The draft model in use.
        load: Loads the model; None if there is no checkpoint to load.
        build: Builds a backend.
        recent: Recent completions, on which old and new model are compared.
        admission: The admission of requests.
        count: Called with the outcome of each reload, "taken" or "refused".
    """

    def __init__(
        self,
        drafts: DraftsInUse,
        load: LoadAgain | None,
        build: Callable[[DraftSource, ModelThread], Backend],
        recent: RecentTexts,
        admission: Admission,
        count: Callable[[str], None],
    ) -> None:
        self._drafts = drafts
        self._load = load
        self._build = build
        self._recent = recent
        self._admission = admission
        self._count = count
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Ask for a reload; several requests during a reload are one."""
        self._asked.set()

    async def run(self) -> None:
        """Reload whenever asked, until the task is cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._reload()
            gc.collect()  # models have reference cycles, and a second one must not stay in memory

    async def _reload(self) -> None:
        old = self._drafts.current
        # Loading on another thread lets the old model go on, but two threads must not capture and use one GPU.
        # transformers changes torch's default dtype while it builds a model; only the old one's proposals may differ.
        thread = ModelThread("draft-model") if old.source.info.device == "cpu" else old.thread
        try:
            new = await self._loaded(old, thread)
            new.replicas.rebuild_with(new.source.build_target)
            unused = self._drafts.replace(new)
            log.info("SIGHUP: new requests get the draft %s", str(new.source))  # a kept record holds no model
            self._count("taken")
            await unused
        except asyncio.CancelledError:
            thread.shutdown(wait=False)  # a service that stops does not wait for a model that loads
            raise
        except Exception as error:
            expected = isinstance(error, (StartupError, ServiceError))
            log.error("SIGHUP: the draft stays %s: %s", old.source, error, exc_info=None if expected else error)
            self._count("refused")
        finally:
            for ended in {old.thread, thread} - {self._drafts.current.thread}:
                ended.shutdown()

    async def _loaded(self, old: Backend, thread: ModelThread) -> Backend:
        """Load the new model, measure it, and compare it with the old one.

        Raises:
            StartupError: There is none, it cannot be served, or it guesses fewer tokens than the old model.
            ServiceError: The service is too busy to compare the two.
        """
        if self._load is None:
            raise StartupError("it has no checkpoint of its own that could be loaded again")
        drafting = await self._load(thread, int(old.source.slots))
        source = replace(await drafting.source(old.replicas), tokenizer=old.source.tokenizer)
        if texts := self._recent.copy():
            async with self._admission.queued("", slots_of(old.source)) as turn:
                await turn.come()
                before = await right_guesses(old.source, old.thread, texts)
            after = await right_guesses(source, thread, texts)
            tokens = sum(each.guessed for each in texts)
            log.info("of %d recent tokens, the draft guesses %d, and the new one %d", tokens, before, after)
            if after < before:
                raise StartupError(f"of {tokens} recent tokens, it guesses {before}, and the new one only {after}")
        return self._build(source, thread)
