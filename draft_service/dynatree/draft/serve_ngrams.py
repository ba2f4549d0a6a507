"""`dynatree draft` without a draft model: candidates are n-grams of each session; this module needs no torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NoReturn

from dynatree.common.model_info import NO_MODEL, ModelInfo
from dynatree.common.version import version
from dynatree.draft.draft_server import serve
from dynatree.draft.growth.draft_source import DraftSource
from dynatree.draft.growth.drafter import Expansion
from dynatree.draft.settings import DraftSettings
from dynatree.draft.target.replicas import Replicas
from dynatree.draft.target.target import Target
from dynatree.draft.target.target_tokenizer import target_tokenizer
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.model_thread import ModelThread
from dynatree.serving.service_process import run_service


def run(settings: DraftSettings) -> int:
    """Serve until a signal, and return the exit status."""

    async def begin(thread: ModelThread) -> NGramDrafting:
        return NGramDrafting(thread, settings.verify.timeout)

    return run_service(serve(settings, begin))


class NGramDrafting:
    """Drafting without a model, for the tokenizer of the first target; implements `Drafting`.

    Args:
        thread: Thread that loads the tokenizer.
        timeout: Seconds within which a verify service must send it.
    """

    def __init__(self, thread: ModelThread, timeout: float) -> None:
        self._thread = thread
        self._timeout = timeout
        self._info: ModelInfo | None = None

    def target(self, info: ModelInfo) -> Target:
        """See `Drafting.target`."""
        self._info = self._info or _no_model(info)
        return Target.of(info, self._info, info.vocab_size, ahead=False)

    async def source(self, replicas: Replicas) -> DraftSource:
        """Load the tokenizer that a verify service sends.

        Raises:
            StartupError: No service sends it, or it differs from the target's once it is loaded here.
        """
        tokenizer = await target_tokenizer(replicas, self._thread, self._timeout)
        assert self._info is not None, "a ready service has told its target"
        return DraftSource(NoModel(), self._info, tokenizer, self.target, math.inf, has_model=False)


class NoModel:
    """A `DraftModel` without a model, for policies that expand no node."""

    context_length = sys.maxsize

    def reserve(self, slots: int, prompt_ids: Sequence[int], principal: str) -> tuple[KVRange | None, int]:
        """Return a range that takes no memory."""
        return KVRange(0, slots), 0

    def release(self, kv: KVRange, token_ids: Sequence[int], principal: str) -> None:
        """Do nothing."""

    def move(self, kv: KVRange, slots: Sequence[int], start: int) -> None:
        """Do nothing, since no slot holds a token."""

    def expand(self, expansions: Sequence[Expansion]) -> NoReturn:
        """Fail, since only policies that expand no node are admitted."""
        raise AssertionError("a node was expanded without a draft model")


def _no_model(target: ModelInfo) -> ModelInfo:
    """The description that takes the place of a draft model's."""
    return ModelInfo(
        name=NO_MODEL,
        architecture="",
        parameters=0,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        dtype="",
        device="",
        tokenizer_fingerprint=target.tokenizer_fingerprint,
        version=version(),
        device_id="",
        step_bytes=0,
    )
