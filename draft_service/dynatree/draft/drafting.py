"""The part of a start that differs with and without a draft model."""

from __future__ import annotations

from typing import Protocol

from dynatree.common.model_info import ModelInfo
from dynatree.draft.growth.draft_source import DraftSource
from dynatree.draft.target.replicas import Replicas
from dynatree.draft.target.target import Target


class Drafting(Protocol):
    """A draft model that is loaded, or its absence."""

    def target(self, info: ModelInfo) -> Target:
        """Build the `Target` of a verify service, with costs that are not measured yet.

        Raises:
            FailedPreconditionError: Its tokenizer is another one.
        """

    async def source(self, replicas: Replicas) -> DraftSource:
        """Return the source of candidates, once a verify service is ready.

        Raises:
            StartupError: The target's tokenizer cannot be used.
        """
